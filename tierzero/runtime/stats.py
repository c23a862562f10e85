"""What a step moved and where it waited: counters that run, and the difference between two step boundaries."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from tierzero.runtime.timeline import Timeline

STALL_KINDS = ("nvme_read", "nvme_write", "gather", "optimizer", "host_budget")


class RoomClock:
    """Seconds in which a tile stood in line for staging memory while all that had some were being written home: more
    memory, not a faster read, would have helped. Changed on the engine's loop, read from any thread.
    """

    def __init__(self) -> None:
        self._waiting = self._holding = self._writing = 0
        self._total, self._changed = 0.0, time.perf_counter()

    def change(self, *, waiting: int = 0, holding: int = 0, writing: int = 0) -> None:
        """So many tiles more (or fewer) are in that state."""
        self._total, self._changed = self.seconds(), time.perf_counter()
        self._waiting += waiting
        self._holding += holding
        self._writing += writing

    def seconds(self) -> float:
        blocked = self._waiting > 0 and self._writing >= self._holding
        return self._total + (time.perf_counter() - self._changed if blocked else 0.0)


class Stalls:
    """Seconds that the training thread spent waiting, by what for. Nested waits count once, for the outermost."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.seconds = dict.fromkeys(STALL_KINDS, 0.0)
        self.cold_start_s = 0.0
        """What of all of them was while ``starting``."""
        self.starting = False
        """A step's first forward has begun, and none of its units without others inside has its weights yet."""
        self._timeline = timeline or Timeline()
        self._depth = 0

    @contextmanager
    def waiting(self, kind: str, room: RoomClock | None = None, unit: int = -1) -> Iterator[None]:
        """What of the wait ``room`` counts is a wait for ``host_budget``. ``unit``: whom it is for, if any."""
        started, before = time.perf_counter(), room.seconds() if room is not None else 0.0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                ended = time.perf_counter()
                elapsed = ended - started
                for_room = min(elapsed, room.seconds() - before) if room is not None else 0.0
                self.seconds["host_budget"] += for_room
                self.seconds[kind] += elapsed - for_room
                self.cold_start_s += elapsed if self.starting else 0.0
                if self._timeline.on:
                    self._timeline.stalled(kind, unit, started, ended, for_room)


class Tries(StrEnum):
    """What became of the updates that were tried ahead of a step."""

    KEPT = "kept"
    LOST = "lost"
    LEFT_OUT = "left out"
    """None were tried, as they had been lost in an earlier step."""

    @classmethod
    def of(cls, right: bool | None, left_out: bool) -> Tries | None:
        """``right``: whether the step fixed what was tried, None where nothing was."""
        if right is None:
            return cls.LEFT_OUT if left_out else None
        return cls.KEPT if right else cls.LOST

    @classmethod
    def of_ranks(cls, said: Iterable[str | None]) -> Tries | None:
        """Of a step, from what its ranks say. Those that tried something agree; one that had no time says None."""
        found = set(said)
        return next((kind for kind in (cls.LOST, cls.KEPT, cls.LEFT_OUT) if kind in found), None)


@dataclass(frozen=True)
class StepOutcome:
    """What a step fixed: the smallest factor that clipping gave a gradient, and what it made of `Tries`."""

    clip_factor: float = 1.0
    tries: Tries | None = None


@dataclass(frozen=True)
class Counters:
    """Totals since the model was sharded. Bytes, and seconds for ``stall_s``, ``cold_start_s`` and ``step_s`` (of a
    clock: differences count).
    """

    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0
    comm_bytes: dict[str, int] = field(default_factory=lambda: {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0})
    stall_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALL_KINDS, 0.0))

    step_s: float = field(default_factory=time.perf_counter)
    redone_bytes: int = 0
    """Of state that was written ahead of a step in vain."""
    tried_bytes: int = 0
    """Of state that was written ahead of a step."""
    kept_bytes: int = 0
    """Of that, what the step made current."""
    read_ahead_bytes: int = 0
    """Of state that a backward began to read for the next forward."""
    cold_start_s: float = 0.0
    """What of the stalls came before the first unit without others inside could run."""

    def since(self, before: Counters, began: Counters) -> Counters:
        """What was moved since ``before``, and the time since ``began``."""
        return Counters(
            self.nvme_read_bytes - before.nvme_read_bytes,
            self.nvme_write_bytes - before.nvme_write_bytes,
            {name: value - before.comm_bytes[name] for name, value in self.comm_bytes.items()},
            {name: value - began.stall_s[name] for name, value in self.stall_s.items()},
            self.step_s - began.step_s,
            self.redone_bytes - before.redone_bytes,
            self.tried_bytes - before.tried_bytes,
            self.kept_bytes - before.kept_bytes,
            self.read_ahead_bytes - before.read_ahead_bytes,
            self.cold_start_s - began.cold_start_s,
        )

    @property
    def compute_s(self) -> float:
        """What of a step's time was not waiting."""
        return max(0.0, self.step_s - sum(self.stall_s.values()))

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
