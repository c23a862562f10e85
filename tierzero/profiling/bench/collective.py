"""Collectives by size of message, through the same calls as in training.

``python -m tierzero.profiling.bench.collective JOB`` is a rank that `local_ranks` starts.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tierzero.config import Config
from tierzero.profiling.bench.timing import Progress, Spread
from tierzero.runtime.device import CpuDevice, Device, choose_device
from tierzero.sharding.collectives import Collectives, World
from tierzero.training.ranks import Ranks, set_threads

OPS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = tuple(1 << bit for bit in range(16, 27, 2))
_SAMPLES = 3
_MOST_CALLS = 1000


@dataclass(frozen=True)
class CollectivePlan:
    """``sizes``: of the whole tensor, in bytes."""

    sizes: tuple[int, ...] = SIZES
    seconds: float = 20.0


@dataclass(frozen=True)
class CollectiveRow:
    op: str
    nbytes: int
    rate: Spread

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "bytes": self.nbytes, "bytes_per_s": self.rate.as_json()}


@dataclass(frozen=True)
class CollectiveReport:
    """Bytes of the whole tensor per second."""

    backend: str
    ranks: int
    nodes: int
    rows: tuple[CollectiveRow, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        rows = [row.as_json() for row in self.rows]
        return {"backend": self.backend, "ranks": self.ranks, "nodes": self.nodes, "rows": rows}

    def by_size(self, op: str) -> dict[int, Spread]:
        return {row.nbytes: row.rate for row in self.rows if row.op == op}

    @classmethod
    def from_json(cls, value: dict[str, Any], notes: Sequence[str]) -> CollectiveReport:
        rows = tuple(CollectiveRow(row["op"], row["bytes"], Spread(**row["bytes_per_s"])) for row in value["rows"])
        return cls(value["backend"], value["ranks"], value["nodes"], rows, tuple(notes))


def measure(plan: CollectivePlan, ranks: Ranks, device: Device, progress: Progress) -> CollectiveReport:
    """On the process group that this rank is in; every rank of it must call this."""
    group = dist.distributed_c10d._get_default_group()
    world = World(
        ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, global_rank=ranks.rank, group=group
    )
    collectives = Collectives(world, ["the bench"], device.is_host, device.lane)
    try:
        rows = _Measured(plan, collectives, device, ranks.world_size).rows(progress)
        dist.barrier()  # a rank that leaves while another one is still at its last call may take that one down
    finally:
        collectives.close()
    left_out = [nbytes for nbytes in plan.sizes if nbytes not in {row.nbytes for row in rows}]
    notes = []
    if left_out:
        notes.append(
            f"collective: messages from {min(left_out):,} bytes on were left out for want of time; give more --seconds"
        )
    nodes = max(1, ranks.world_size // max(1, ranks.local_world_size))
    return CollectiveReport(dist.get_backend(), ranks.world_size, nodes, tuple(rows), tuple(notes))


@dataclass(frozen=True)
class _Measured:
    plan: CollectivePlan
    collectives: Collectives
    device: Device
    ranks: int

    def rows(self, progress: Progress) -> list[CollectiveRow]:
        """The smallest messages first, until the time is over on some rank."""
        found: list[CollectiveRow] = []
        started = time.perf_counter()
        for number, nbytes in enumerate(sorted(self.plan.sizes)):
            if found and self._most(time.perf_counter() - started) > self.plan.seconds:
                break
            progress(f"{nbytes:,} bytes", number / len(self.plan.sizes))
            found += [CollectiveRow(op, nbytes, self._rate(op, nbytes)) for op in OPS]
        return found

    def _rate(self, op: str, nbytes: int) -> Spread:
        call = self._call(op, nbytes)
        self._timed(call, 1)
        each = self.plan.seconds / (len(self.plan.sizes) * len(OPS) * _SAMPLES)
        calls = max(1, min(_MOST_CALLS, int(each / self._most(self._timed(call, 1)))))
        return Spread.of([nbytes * calls / self._timed(call, calls) for _ in range(_SAMPLES)])

    def _call(self, op: str, nbytes: int) -> Callable[[], object]:
        """bf16, as weights and gradients are."""
        collectives = self.collectives
        part = max(1, nbytes // 2 // self.ranks)
        where = self.device.torch_device
        whole = torch.ones(part * self.ranks, dtype=torch.bfloat16, device=where)
        shard = torch.ones(part, dtype=torch.bfloat16, device=where)
        if op == "all_gather":
            return lambda: collectives.submit_gather(0, lambda: collectives.all_gather(whole, shard)).result()
        if op == "reduce_scatter":
            return lambda: collectives.submit_reduce(0, lambda: collectives.reduce_scatter_mean(shard, whole)).result()
        return lambda: collectives.submit_reduce(0, lambda: collectives.all_reduce_mean(whole)).result()

    def _timed(self, call: Callable[[], object], calls: int) -> float:
        self.collectives.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self.device.synchronize()
        return time.perf_counter() - started

    def _most(self, value: float) -> float:
        """Over the ranks, so that all of them do the same."""
        return float(self.collectives.small_max(torch.tensor([value], dtype=torch.float64)))


def on_group(plan: CollectivePlan, ranks: Ranks, progress: Progress) -> CollectiveReport:
    """On the group that a launcher's ranks have joined."""
    return measure(plan, ranks, choose_device(ranks.local_rank), progress)


def main() -> None:
    """A local rank: rank 0 prints lines of JSON, how far it is and at last the report."""
    # Whoever started this rank holds the other end: a rank does not outlive it.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads(sys.argv[1])
    ranks = Ranks.from_environment()
    plan = CollectivePlan(tuple(job["sizes"]), job["seconds"])
    timeout = timedelta(seconds=60 + 4 * plan.seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{job['rendezvous']}", rank=ranks.rank, world_size=ranks.world_size, timeout=timeout
    )
    set_threads(Config.from_dict({}), ranks)

    def said(what: str, done: float) -> None:
        _say({"progress": [what, done]}, ranks)

    report = measure(plan, ranks, CpuDevice(), said)
    _say({"report": report.as_json(), "notes": report.notes}, ranks)
    dist.destroy_process_group()


def _say(value: dict[str, Any], ranks: Ranks) -> None:
    if ranks.first:
        print(json.dumps(value), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def job_text(plan: CollectivePlan, rendezvous: str) -> str:
    return json.dumps(asdict(plan) | {"rendezvous": rendezvous})


if __name__ == "__main__":
    main()
