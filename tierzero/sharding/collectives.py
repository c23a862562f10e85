"""Collectives over the ranks that share a model: issued in one fixed order on every rank, counted, and checked.

Gathers and reductions each have a process group and a thread of their own, so that a gather never waits behind a
reduction. Within one of them work is done in the order of submission; callers submit in program order, which is the
same on every rank. Before each collective the ranks compare tags (which unit they mean): ranks that use different
units, which would hang or mix data, all get an error that names both. Sums of a few values are ordered among the
gathers, so that a rank which saves while another one trains is found out in the same way.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tierzero.errors import RankLostError, RankMismatchError, TierZeroError
from tierzero.sharding.groups import give_back_groups, take_groups

T = TypeVar("T")

_CARRIED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32))
_TURN = timedelta(seconds=0.2)
_PATIENCE_S = 2.0
_ANY = -1
"""The tag of what belongs to no unit, among the reductions."""


@dataclass(frozen=True)
class World:
    """The ranks of a run as this one sees them; ``local_size`` of them share this node.

    They divide the model among them, or, in hybrid sharding, are several groups of ``shards`` ranks that each do:
    ``replica`` numbers the groups, and this rank has the shard number ``shard`` of its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    global_rank: int = 0
    """Among all processes of the job, which may be more than share this model."""
    group: dist.ProcessGroup | None = None
    replica_ranks: tuple[tuple[int, ...], ...] = ()
    """Global ranks of each group that divides the model, where there are several."""

    @property
    def replicas(self) -> int:
        return max(1, len(self.replica_ranks))

    @property
    def shards(self) -> int:
        return self.size // self.replicas

    @property
    def replica(self) -> int:
        return next((i for i, ranks in enumerate(self.replica_ranks) if self.global_rank in ranks), 0)

    @property
    def shard(self) -> int:
        return self.replica_ranks[self.replica].index(self.global_rank) if self.replica_ranks else self.rank

    @property
    def peers(self) -> tuple[int, ...]:
        """Global ranks that have the same shard, this one among them."""
        return tuple(ranks[self.shard] for ranks in self.replica_ranks)


@dataclass
class CommBytes:
    """Bytes moved by this rank's collectives as the usual formulas count them: the size of the whole tensor, and for
    an all-reduce, which is a reduce-scatter and an all-gather, twice that. A ring sends (N-1)/N of it on N ranks.
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0


class _Worker:
    """One thread that runs what it is given in order. A daemon: a collective whose peer has died must not keep the
    process from exiting.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.given_up = threading.Event()
        """What still waits for other ranks fails."""
        self.clean = False
        """Ended with nothing left in flight."""
        arguments = (self._work, self.given_up)
        self._thread = threading.Thread(target=_run_in_order, args=arguments, name="tierzero-collective", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread after what it was given, or after `_PATIENCE_S` where the other ranks do not take part."""
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
            self.clean = not self._thread.is_alive()
            self.given_up.set()
            self._thread.join(_PATIENCE_S)


def _run_in_order(
    work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None], given_up: threading.Event
) -> None:
    while (item := work.get()) is not None:
        future, call = item
        try:
            if given_up.is_set():
                raise _closed()
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, future, call  # an idle thread must not keep a model alive


def _closed() -> TierZeroError:
    return TierZeroError(
        "the collectives of this model were given up: it was closed, or ranks did different things, as the first error "
        "says"
    )


def _host_wait(work: dist.Work | None, given_up: threading.Event) -> None:
    """Waits in short turns, in Python between them: a thread inside the wait itself when the interpreter ends would
    take the process down with SIGABRT, and hide the error that it ends for.
    """
    while work is not None:
        try:
            work.wait(_TURN)
            return
        except RuntimeError:
            if work.is_completed():
                with _lost_rank():
                    work.wait()  # its own error, if it has one
                return
            if given_up.is_set():
                raise _closed() from None


@contextmanager
def _lost_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            "lost contact with another rank, which has ended or hangs: its own message says why, if it failed; else it "
            f"had fewer batches or steps than this one ({error})"
        ) from error


@dataclass
class _Lane:
    """One ordered sequence of collectives: a group for data, a host group for tags, a thread."""

    data: dist.ProcessGroup
    tags: dist.ProcessGroup
    work_in: Callable[[], AbstractContextManager[object]]
    """Around the work of this lane: orders it on a device, apart from the other lane's."""
    thread: _Worker = field(default_factory=_Worker)


class Collectives:
    """All-gather, reduce-scatter and all-reduce over ``world``; only made where it has more than one rank."""

    def __init__(
        self,
        world: World,
        unit_names: list[str],
        host_compute: bool,
        new_lane: Callable[[], Callable[[], AbstractContextManager[object]]] = lambda: nullcontext,
    ) -> None:
        self._world = world
        self._names = unit_names
        assert world.group is not None
        self._host_data = host_compute
        own = world.replica_ranks[world.replica] if world.replicas > 1 else ()
        self._groups = take_groups(world.group, host_compute, own, world.peers)
        self._gather = _Lane(self._groups.gather, self._groups.gather_tags, new_lane())
        self._reduce = _Lane(self._groups.reduce, self._groups.reduce_tags, new_lane())
        self._small = self._groups.small
        self.bytes = CommBytes()
        # At interpreter exit too, before the threads are stopped wherever they are.
        self._end = weakref.finalize(self, _close_all, (self._gather.thread, self._reduce.thread))

    def submit_gather(self, unit: int, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` in the gathers' order, after the ranks agreed that it is ``unit``'s turn."""
        return self._submit(self._gather, unit, work)

    def submit_reduce(self, unit: int, work: Callable[[], T]) -> Future[T]:
        return self._submit(self._reduce, unit, work)

    def submit_any(self, flag: Callable[[], bool]) -> Future[bool]:
        """In the reductions' order: whether ``flag``, which may wait, is true on any rank."""

        def agree() -> bool:
            found = torch.tensor([int(flag())], device="cpu")
            work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._reduce.tags, async_op=True)
            _host_wait(work, self._reduce.thread.given_up)
            return bool(found[0])

        return self._submit(self._reduce, _ANY, agree)

    def _submit(self, lane: _Lane, unit: int, work: Callable[[], T]) -> Future[T]:
        def run() -> T:
            self._check_tag(lane, unit)
            with lane.work_in():
                return work()

        return lane.thread.submit(run)

    def _check_tag(self, lane: _Lane, unit: int) -> None:
        tags = torch.empty(self._world.size, dtype=torch.int64, device="cpu")
        _host_wait(_gather_into(tags, torch.tensor([unit], device="cpu"), lane.tags), lane.thread.given_up)
        if bool((tags != unit).any()):
            lane.thread.given_up.set()  # what is queued behind would wait for ranks that are elsewhere
            raise RankMismatchError(self._difference(tags.tolist()))

    def _difference(self, tags: Sequence[int]) -> str:
        asked = ", ".join(
            f"rank {rank}: {repr(self._names[tag]) if tag >= 0 else 'a call of every rank'}"
            for rank, tag in enumerate(tags)
        )
        if min(tags) < 0:
            return (
                f"ranks do different things at the same time ({asked}); use the same units, and make backward and "
                "calls such as clip_grad_norm_, step, full_state_dict and save_checkpoint on every rank, in one order"
            )
        return (
            f"ranks use different units at the same time ({asked}); make every rank run the same units in the same "
            "order, or put the modules that differ into one unit (sharding.units)"
        )

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills ``whole`` with all ranks' ``shard`` (which may be this rank's own part of ``whole``). Call only from
        gather work.
        """
        self._wait(_gather_into(whole, shard, self._gather.data), self._gather)
        self.bytes.all_gather += whole.nbytes

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """``shard`` becomes this rank's part of the ranks' mean of ``whole``, which is used up. Call only from reduce
        work.
        """
        self._wait(_reduce_scatter(shard, self._divided_before(whole), self._reduce.data), self._reduce)
        self._add_replicas(shard)
        self._divided_after(shard)
        self.bytes.reduce_scatter += whole.nbytes

    def all_reduce_mean(self, whole: torch.Tensor) -> None:
        """``whole`` becomes the ranks' mean. Call only from reduce work."""
        self._wait(dist.all_reduce(self._divided_before(whole), group=self._reduce.data, async_op=True), self._reduce)
        self._add_replicas(whole)
        self._divided_after(whole)
        self.bytes.all_reduce += 2 * whole.nbytes

    def _add_replicas(self, gradients: torch.Tensor) -> None:
        """In hybrid sharding, what the ranks of one group have summed is summed over the groups."""
        if self._groups.peers is not None:
            self._wait(dist.all_reduce(gradients, group=self._groups.peers, async_op=True), self._reduce)
            self.bytes.all_reduce += 2 * gradients.nbytes

    # An fp16 sum of scaled gradients would overflow long before their mean does. The other types have the range, and
    # are rounded once less when the sum is divided.

    def _divided_before(self, gradients: torch.Tensor) -> torch.Tensor:
        return gradients.div_(self._world.size) if gradients.dtype == torch.float16 else gradients

    def _divided_after(self, gradients: torch.Tensor) -> None:
        if gradients.dtype != torch.float16:
            gradients.div_(self._world.size)

    def small_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a few host values over the ranks; from the training thread, at the same point on every rank. Not
        counted.
        """
        return self._small_reduce(values, dist.ReduceOp.SUM)

    def small_max(self, values: torch.Tensor) -> torch.Tensor:
        return self._small_reduce(values, dist.ReduceOp.MAX)

    def _small_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        def reduce() -> torch.Tensor:
            work = dist.all_reduce(values, op=op, group=self._small, async_op=True)
            _host_wait(work, self._gather.thread.given_up)
            return values

        return self._submit(self._gather, _small_tag(values, op == dist.ReduceOp.MAX), reduce).result()

    def barrier(self) -> None:
        self.small_sum(torch.zeros(1, device="cpu"))

    def broadcast(self, values: torch.Tensor) -> None:
        """Rank 0's ``values`` (host memory) on every rank."""
        source = dist.get_global_rank(self._small, 0)

        def send() -> None:
            work = dist.broadcast(_as_carried(values), src=source, group=self._small, async_op=True)
            _host_wait(work, self._gather.thread.given_up)

        self._submit(self._gather, _small_tag(values, False) - 2, send).result()

    def _wait(self, work: dist.Work | None, lane: _Lane) -> None:
        if self._host_data:
            _host_wait(work, lane.thread.given_up)
        elif work is not None:
            work.wait()  # on a GPU this orders streams and does not block

    def close(self) -> None:
        """Ends the threads, also where another rank is gone. Safe to call twice."""
        if not self._end.alive:
            return
        self._end()
        lanes = (self._gather.thread, self._reduce.thread)
        if self._world.group is not None and all(lane.clean for lane in lanes):
            give_back_groups(self._world.group, self._host_data, self._world.shards, self._groups)


def _small_tag(values: torch.Tensor, largest: bool) -> int:
    """A tag for what belongs to no unit: below 0, and another one for another kind, type or number of values."""
    return -(1 + largest + 4 * values.itemsize + 64 * values.numel())


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()


def _as_carried(values: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every backend moves: frozen weights may be of 8-bit and unsigned types."""
    return values if values.dtype in _CARRIED else values.view(torch.uint8)


def _gather_into(whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(_as_carried(whole), _as_carried(shard), group=group, async_op=True)
    return work


def _reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = reduce(shard, whole, group=group, async_op=True)
    return work
