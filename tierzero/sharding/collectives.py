"""Collectives over the ranks that share a model: issued in one fixed order on every rank, counted, and checked.

Gathers and reductions each have a process group and a thread of their own, so that a gather never waits behind a
reduction. Within one of them work is done in the order of submission; callers submit in program order, which is the
same on every rank. Before each collective the ranks compare tags (which unit they mean): ranks that use different
units, which would hang or mix data, all get an error that names both.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tierzero.errors import TierZeroError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of a run as this one sees them; ``local_size`` of them share this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    global_rank: int = 0
    """Among all processes of the job, which may be more than share this model."""
    group: dist.ProcessGroup | None = None


@dataclass
class CommBytes:
    """Bytes moved by this rank's collectives: for each, the size of the whole tensor (what the usual formulas
    count).
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0


class RankMismatchError(TierZeroError, RuntimeError):
    """Ranks asked for different units at the same point of the program."""


class _Worker:
    """One thread that runs what it is given in order. A daemon: a collective whose peer has died must not keep the
    process from exiting.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_run_in_order, args=(self._work,), name="tierzero-collective", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Lets the thread end after what it was given."""
        self._work.put(None)


def _run_in_order(work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := work.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


@dataclass
class _Lane:
    """One ordered sequence of collectives: a group for data, a host group for tags, a thread."""

    data: dist.ProcessGroup
    tags: dist.ProcessGroup
    thread: _Worker = field(default_factory=_Worker)


class Collectives:
    """All-gather, reduce-scatter and all-reduce over ``world``; only made where it has more than one rank."""

    def __init__(self, world: World, unit_names: list[str], host_compute: bool) -> None:
        self._world = world
        self._names = unit_names
        ranks = dist.get_process_group_ranks(world.group) if world.group is not None else None
        timeout = timedelta(minutes=30)

        def new(backend: str | None) -> dist.ProcessGroup:
            # Only the ranks of this model take part in making its groups: others may shard other models, or none.
            group = dist.new_group(ranks=ranks, backend=backend, timeout=timeout, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            return group

        data = "gloo" if host_compute else None
        self._gather = _Lane(new(data), new("gloo"))
        self._reduce = _Lane(new(data), new("gloo"))
        self._small = new("gloo")
        self.bytes = CommBytes()

    def submit_gather(self, unit: int, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` in the gathers' order, after the ranks agreed that it is ``unit``'s turn."""
        return self._submit(self._gather, unit, work)

    def submit_reduce(self, unit: int, work: Callable[[], T]) -> Future[T]:
        return self._submit(self._reduce, unit, work)

    def _submit(self, lane: _Lane, unit: int, work: Callable[[], T]) -> Future[T]:
        def run() -> T:
            self._check_tag(lane, unit)
            return work()

        return lane.thread.submit(run)

    def _check_tag(self, lane: _Lane, unit: int) -> None:
        tags = torch.empty(self._world.size, dtype=torch.int64)
        _gather_into(tags, torch.tensor([unit]), lane.tags)
        if bool((tags != unit).any()):
            asked = ", ".join(f"rank {rank}: {self._names[tag]!r}" for rank, tag in enumerate(tags.tolist()))
            raise RankMismatchError(
                f"ranks use different units at the same time ({asked}); make every rank run the same units in the "
                "same order, "
                "or put the modules that differ into one unit (sharding.units)"
            )

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills ``whole`` with all ranks' ``shard`` (which may be this rank's own part of ``whole``). Call only from
        gather work.
        """
        _gather_into(whole, shard, self._gather.data)
        self.bytes.all_gather += whole.nbytes

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """``shard`` becomes this rank's part of the ranks' mean of ``whole``. Call only from reduce work."""
        _reduce_scatter(shard, whole, self._reduce.data)
        shard.div_(self._world.size)
        self.bytes.reduce_scatter += whole.nbytes

    def all_reduce_mean(self, whole: torch.Tensor) -> None:
        """``whole`` becomes the ranks' mean. Call only from reduce work."""
        dist.all_reduce(whole, group=self._reduce.data)
        whole.div_(self._world.size)
        self.bytes.all_reduce += whole.nbytes

    def small_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a few host values over the ranks; from the training thread, at the same point on every rank. Not
        counted.
        """
        dist.all_reduce(values, group=self._small)
        return values

    def small_max(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._small)
        return values

    def barrier(self) -> None:
        self.small_sum(torch.zeros(1))

    def broadcast(self, values: torch.Tensor) -> None:
        """Rank 0's ``values`` (host memory) on every rank."""
        source = dist.get_global_rank(self._small, 0)
        dist.broadcast(values, src=source, group=self._small)

    def close(self) -> None:
        for lane in (self._gather, self._reduce):
            lane.thread.close()


def _gather_into(whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    single = getattr(dist, "all_gather_single", None)
    (single or dist.all_gather_into_tensor)(whole, shard, group=group)


def _reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    single = getattr(dist, "reduce_scatter_single", None)
    (single or dist.reduce_scatter_tensor)(shard, whole, group=group)
