"""Tiles of a simulated step on their way: read, updated, written back, read ahead, in the staging memory that there is.

All of it goes on beside the model's thread, as callbacks of the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tierzero.planner.buffers import FEWEST_STAGING_TILES
from tierzero.planner.fluid import Simulation
from tierzero.planner.step_case import StepCase
from tierzero.planner.step_units import TileWork

DEMAND, PREFETCH, WRITE_BACK = 0, 1, 2
Then = Callable[[], None]


@dataclass
class _Staging:
    """First come, first served."""

    free: int
    waiting: deque[tuple[int, Then]] = field(default_factory=deque)

    def take(self, nbytes: int, then: Then) -> None:
        self.waiting.append((nbytes, then))
        self._serve()

    def give(self, nbytes: int) -> None:
        self.free += nbytes
        self._serve()

    def _serve(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.free:
            nbytes, then = self.waiting.popleft()
            self.free -= nbytes
            then()


@dataclass
class _Ahead:
    """A tile whose state is being read ahead, or has been; ``then``: who waits for it."""

    read: bool = False
    then: Then | None = None


class SimulatedTiles:
    """``moved``: bytes read from the drive and written to it; ``unwritten``: tiles updated but not home."""

    def __init__(self, case: StepCase, simulation: Simulation) -> None:
        self._case, self._sim = case, simulation
        self._drive, self._processor = simulation.resources["drive"], simulation.resources["processor"]
        self._staging = _Staging(case.staging)
        self._ahead: dict[int, _Ahead] = {}
        """By the tile's identity."""
        self._updating: set[int] = set()
        """From the update's begin to the end of its write-back."""
        self.unwritten = 0
        self.moved = 0.0

    def read(self, nbytes: float, priority: int, then: Then) -> None:
        speeds = self._case.speeds
        self.moved += nbytes
        cost = nbytes + speeds.tile_s * speeds.drive.first if nbytes else 0.0
        self._handle(speeds.tile_read_s if nbytes else 0.0)
        self._sim.submit(self._drive.first, cost, then, priority)

    def _handle(self, seconds: float) -> None:
        """The I/O thread's own work, which takes the processor from others; nobody waits for it."""
        self._sim.submit(self._processor.second, seconds, lambda: None)

    def update(self, tile: TileWork, priority: int, then: Then) -> None:
        """Reads, updates and writes a tile; ``then`` as soon as its weights are new."""

        def written() -> None:
            self.unwritten -= 1
            self._updating.discard(id(tile))
            self._staging.give(tile.staged)

        def updated() -> None:
            then()
            self.write(tile.state, written)

        def read() -> None:
            self._sim.submit(self._processor.second, tile.elements / self._case.speeds.adam, updated)

        def rest() -> None:
            self.read(tile.gradients, priority, read)

        self.unwritten += 1
        self._updating.add(id(tile))
        ahead = self._ahead.pop(id(tile), None)
        if ahead is None:
            self._staging.take(tile.staged, lambda: self.read(tile.state + tile.gradients, priority, read))
        elif ahead.read:
            rest()
        else:
            ahead.then = rest

    def read_ahead(self, tiles: Iterable[TileWork], leaving: int = 0) -> None:
        """Begins to read the first of ``tiles``, the next step's in order, as far as staging memory is left over, but
        for ``leaving`` bytes.
        """
        reserve = FEWEST_STAGING_TILES * self._case.staging_tile + leaving
        for tile in tiles:
            if not tile.trained or not tile.state or id(tile) in self._ahead:
                continue
            if self._staging.waiting or self._staging.free < tile.staged + reserve:
                return
            self._staging.free -= tile.staged
            ahead = self._ahead[id(tile)] = _Ahead()

            def read(ahead: _Ahead = ahead) -> None:
                ahead.read = True
                if ahead.then is not None:
                    ahead.then()

            self.read(tile.state, WRITE_BACK, read)

    def write_gradient(self, tile: TileWork, adds: bool, then: Then) -> None:
        """Takes a tile's gradient to the drive; ``adds``: to the one that is there."""

        def written() -> None:
            self._staging.give(tile.gradients)
            then()

        def begin() -> None:
            self.read(tile.gradients if adds else 0, DEMAND, lambda: self.write(tile.gradients, written))

        self._staging.take(tile.gradients, begin)

    def write(self, nbytes: float, then: Then, priority: int = DEMAND) -> None:
        self.moved += nbytes
        self._handle(self._case.speeds.tile_write_s if nbytes else 0.0)
        self._sim.submit(self._drive.second, nbytes, then, priority)

    # Of tiles that are tried.

    def has_free(self, nbytes: int) -> bool:
        """So much staging memory, with nobody waiting for it."""
        return not self._staging.waiting and self._staging.free >= nbytes

    def take_free(self, nbytes: int) -> None:
        self._staging.free -= nbytes

    def give(self, nbytes: int) -> None:
        self._staging.give(nbytes)

    def is_on_its_way(self, tile: TileWork) -> bool:
        """Read ahead, or not back from its last update."""
        return id(tile) in self._ahead or id(tile) in self._updating
