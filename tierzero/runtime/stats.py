"""What a step moved and where it waited: counters that run, and the difference between two step boundaries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

STALL_KINDS = ("nvme_read", "nvme_write", "gather", "optimizer", "host_budget")


class Stalls:
    """Seconds that the training thread spent waiting, by what for. Nested waits count once, for the outermost."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STALL_KINDS, 0.0)
        self._depth = 0

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        started = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds[kind] += time.perf_counter() - started


@dataclass(frozen=True)
class Counters:
    """Totals since the model was sharded. Bytes, and seconds for ``stall_s``."""

    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0
    comm_bytes: dict[str, int] = field(default_factory=lambda: {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0})
    stall_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALL_KINDS, 0.0))

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.nvme_read_bytes - before.nvme_read_bytes,
            self.nvme_write_bytes - before.nvme_write_bytes,
            {name: value - before.comm_bytes[name] for name, value in self.comm_bytes.items()},
            {name: value - before.stall_s[name] for name, value in self.stall_s.items()},
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
