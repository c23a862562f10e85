"""A step as it is given to the simulation, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierzero.planner.fluid import Shared
from tierzero.planner.step_units import UnitWork


@dataclass(frozen=True)
class Speeds:
    """What one rank gets of the machine. ``processor``: seconds of work per second, of the model's operations (first)
    and of updates (second); ``drive``: bytes read and written; ``link``: bytes to the device and from it.
    """

    processor: Shared
    drive: Shared
    link: Shared | None
    adam: float
    """Parameters per second when nothing else runs."""
    gradient_copy: float
    """Bytes read and written per second where a gradient is taken over from autograd."""
    host_copy: float
    tiles_at_once: int
    """Reads, and writes, of whole tiles that the drive has in flight."""
    tile_s: float
    """Seconds that a tile takes of the drive on top of its bytes."""
    tile_read_s: float
    tile_write_s: float
    """Seconds of the processor for a tile's way beside its bytes."""
    unit_s: float
    """Seconds that a use of a unit takes of the model's thread."""


@dataclass(frozen=True)
class Access:
    """``unit`` runs for ``seconds``, for which its weights are fetched if it ``uses`` them; ``completes``: its
    gradients are complete then.
    """

    unit: int
    seconds: float
    uses: bool = True
    completes: bool = False


@dataclass(frozen=True)
class StepCase:
    """What is simulated. ``gather_s`` and ``reduce_s``: seconds of each unit's collectives, 0 without any; ``held``:
    units that are not evicted, because they are around others or stay gathered. Pools are in bytes.
    """

    units: Sequence[UnitWork]
    forward: Sequence[Access]
    backward: Sequence[Access]
    speeds: Speeds
    overlap: str
    prefetch: int
    arena: int
    staging: int
    staging_tile: int
    buckets: int
    gather_s: Sequence[float]
    reduce_s: Sequence[float]
    held: frozenset[int] = frozenset()
    micro_steps: int = 1
    tried: float = 0.0
    """With ``overlap`` "both": the part of the tiles that the backward tries to update, at most."""


@dataclass(frozen=True)
class Phases:
    """Seconds of a simulated step. ``busy``: by resource (processor, drive, link, network); ``waiting``: of the model's
    thread, by what for (weights, gradients, optimizer). ``nvme_bytes``: read and written.
    """

    step: float
    forward: float
    backward: float
    update: float
    busy: dict[str, float]
    waiting: dict[str, float]
    nvme_bytes: float

    def since(self, before: Phases) -> Phases:
        """What came after ``before`` in the same step."""
        return self.with_more(before, -1)

    def with_more(self, part: Phases, times: int) -> Phases:
        """With ``part`` so many times more."""
        names = dict.fromkeys((*self.waiting, *part.waiting))
        return Phases(
            self.step + times * part.step,
            self.forward + times * part.forward,
            self.backward + times * part.backward,
            self.update + times * part.update,
            {name: seconds + times * part.busy[name] for name, seconds in self.busy.items()},
            {name: self.waiting.get(name, 0.0) + times * part.waiting.get(name, 0.0) for name in names},
            self.nvme_bytes + times * part.nvme_bytes,
        )
