"""Updates ahead of their step in a simulated backward, as `tierzero.runtime.speculation` tries them: behind everything
else, into second slots, and in staging memory that others leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tierzero.planner.buffers import FEWEST_STAGING_TILES
from tierzero.planner.fluid import Simulation
from tierzero.planner.simulated_tiles import WRITE_BACK, SimulatedTiles, Then
from tierzero.planner.step_case import StepCase
from tierzero.planner.step_units import TileWork

_MOST = 4
"""Tiles at once."""


class SimulatedTries:
    """Of each step ``case.tried`` of the tiles that can be, at most, in the order in which gradients are complete."""

    def __init__(self, case: StepCase, simulation: Simulation, tiles: SimulatedTiles) -> None:
        self._case, self._sim, self._tiles = case, simulation, tiles
        self._processor = simulation.resources["processor"]
        self._reserve = FEWEST_STAGING_TILES * case.staging_tile
        triable = sum(1 for unit in case.units for tile in unit.tiles if _can_be(tile))
        self._each_step = round(case.tried * triable) if case.overlap == "both" else 0
        self._left = self._each_step
        self._waiting: deque[TileWork] = deque()
        self._running: dict[int, list[Then]] = {}
        """By the tile's identity: who waits for the end of what is tried."""
        self._done: set[int] = set()
        self._stopped = False

    def begin_step(self) -> None:
        self._left, self._stopped = self._each_step, False

    def begin(self, tiles: Iterable[TileWork]) -> None:
        """Tries tiles whose gradients are home."""
        self._waiting.extend(tile for tile in tiles if _can_be(tile))
        self._pump()

    def stop(self) -> None:
        """The step: what is not updated yet will not be."""
        self._waiting.clear()
        self._stopped = True

    @property
    def claims(self) -> int:
        """Bytes of staging memory that reading ahead leaves to what is tried."""
        more = self._left > 0 and not self._stopped
        return self._case.staging // 2 if more or self._running else 0

    def holds(self, tile: TileWork) -> bool:
        return id(tile) in self._running or id(tile) in self._done

    def take(self, tile: TileWork, updated: Then, untried: Then) -> None:
        """Calls ``updated`` where the tile's update was tried, else ``untried``, once nobody is at it any more."""

        def decided() -> None:
            was_done = id(tile) in self._done
            self._done.discard(id(tile))
            (updated if was_done else untried)()

        if id(tile) in self._running:
            self._running[id(tile)].append(decided)
        else:
            decided()

    def _pump(self) -> None:
        while self._waiting and self._left and len(self._running) < _MOST:
            tile = self._waiting[0]
            if not self._tiles.has_free(tile.staged + self._reserve):
                return
            self._waiting.popleft()
            if not self._tiles.is_on_its_way(tile):
                self._left -= 1
                self._try(tile)

    def _try(self, tile: TileWork) -> None:
        self._running[id(tile)] = []
        self._tiles.take_free(tile.staged)

        def read() -> None:
            if self._stopped:
                ended()
            else:
                self._sim.submit(self._processor.second, tile.elements / self._case.speeds.adam, changed)

        def changed() -> None:
            self._tiles.write(tile.state, written, WRITE_BACK)

        def written() -> None:
            self._done.add(id(tile))
            ended()

        def ended() -> None:
            waiting = self._running.pop(id(tile))
            self._tiles.give(tile.staged)
            for go_on in waiting:
                go_on()
            self._pump()

        self._tiles.read(tile.state + tile.gradients, WRITE_BACK, read)


def _can_be(tile: TileWork) -> bool:
    return tile.trained and tile.weights > 0 and tile.optimizer > 0
