"""From `AccumulateGrad` to the gradient shard: collected per unit, reduced over the ranks, accumulated into their
home tier.

A parameter's full gradient is taken from it the moment autograd has completed it. On one rank with the shard in host
memory it is added straight to the shard. Otherwise the unit's gradients are collected in a *bucket* (the unit's flat
buffer); once all have arrived, or the backward is over, the bucket is reduced and put away. The sum of squares that
clipping needs is taken in the same pass, over each parameter's fragment as a whole, so that it does not depend on
tiles or tiers.

With several ranks the buckets are reduced in one fixed order on every rank (last unit first), because collectives
must match; a unit that a rank did not use contributes zeros if another rank used it, and stays untouched if none did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from tierzero.errors import BudgetError
from tierzero.optim.gradient import accumulate
from tierzero.runtime.device import Device
from tierzero.runtime.gradient_home import Arrival, Bucket, GradientHome, bucket_bytes, new_bucket
from tierzero.runtime.paged import take_gradient
from tierzero.runtime.state import GroupState, SlotState, UnitState
from tierzero.runtime.stats import Stalls
from tierzero.runtime.tile_io import TileIO
from tierzero.sharding.collectives import Collectives
from tierzero.tiers import IoEngine, MemoryPool, TieredStore
from tierzero.tiers.interrupts import held_back

_WORTH_THREADS = 256 * 1024
"""Elements of a gradient from which on it is added by several threads."""

_USED, _LATE = 1, 2


@dataclass
class _UnitArrivals:
    """A unit's gradients in one backward. ``arrived`` are parameters, not gradients: reentrant checkpointing delivers
    one for each use of a parameter, some of them after the unit was complete and dispatched (late ones).
    """

    expected: int
    arrived: set[SlotState] = field(default_factory=set)
    dispatched: bool = False
    buckets: dict[int, Bucket] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.expected


class Gradients:
    """Receives the gradients of all units.

    ``on_unit_complete`` is called on the training thread when a unit's gradients of this backward are on their way
    home, with the future of their arrival, or None when they are there.
    """

    def __init__(
        self,
        units: list[UnitState],
        engine: IoEngine,
        store: TieredStore,
        tile_io: TileIO,
        device: Device,
        collectives: Collectives | None,
        buckets: MemoryPool,
        stalls: Stalls,
    ) -> None:
        self._units = units
        self._engine = engine
        self._device = device
        self._collectives = collectives
        self._pool = buckets
        self._stalls = stalls
        self._arrivals = [
            _UnitArrivals(sum(group.layout.trainable for group in u.groups for _ in group.slots)) for u in units
        ]
        self._in_flight: dict[int, Future[None]] = {}
        self._order = [unit.index for unit in reversed(units) if self._arrivals[unit.index].expected]
        self._next = 0
        self._helpers = ThreadPoolExecutor(os.cpu_count(), "tierzero-gradient")
        self._tasks: set[int] = set()
        self._whole = {id(g): g.whole_home("gradient") for u in units for g in u.groups if g.layout.trainable}
        self._home = GradientHome(engine, store, tile_io, device, collectives, buckets, self._whole)
        self.before_arrival: Callable[[UnitState], None] = lambda unit: None
        self.on_unit_complete: Callable[[UnitState, Future[None] | None], None] = lambda unit, future: None
        self.on_backward_begin: Callable[[], None] = lambda: None
        """Called before anything of a backward is sent, in every one that sends something on any rank."""
        self.on_backward_end: Callable[[], None] = lambda: None

    # Arrival, on the thread that runs the backward.

    def arrive(self, slot: SlotState) -> None:
        """Takes the gradient that autograd has just completed from the parameter."""
        grad = take_gradient(slot.parameter)
        if grad is None:
            return
        unit = slot.group.unit
        self.watch_backward_end()
        self.before_arrival(unit)
        if grad.is_sparse:
            grad = grad.to_dense()
        values = grad.detach().reshape(-1)
        if self._is_direct(slot.group):
            self._add_directly(slot, values)
        else:
            self._collect(slot, values)
        state = self._arrivals[unit.index]
        if slot not in state.arrived:
            state.arrived.add(slot)
            if state.complete:
                self._complete(unit)

    def _is_direct(self, group: GroupState) -> bool:
        return self._collectives is None and self._device.is_host and self._whole[id(group)] is not None

    def _add_directly(self, slot: SlotState, values: torch.Tensor) -> None:
        whole = self._whole[id(slot.group)]
        assert whole is not None
        target = whole.narrow(0, slot.slot.offset, slot.slot.numel)
        if slot.has_grad and slot.clip_factor != 1.0:
            target.mul_(slot.clip_factor)
        slot.clip_factor = 1.0
        # The compute threads are idle while autograd hands a gradient over.
        threads = torch.get_num_threads() if values.numel() >= _WORTH_THREADS else 1
        slot.sum_of_squares = accumulate(
            target, values.contiguous(), overwrite=not slot.has_grad, threads=threads, executor=self._helpers
        )
        slot.has_grad = True

    def _collect(self, slot: SlotState, values: torch.Tensor) -> None:
        bucket = self._bucket(slot.group)
        if self._collectives is None and slot.has_grad and slot.slot.index in bucket.arrived:
            # Each addend onto what is accumulated, as where gradients are added in place: (a + b) + c, not a + (b + c).
            self._put_away(slot.group.unit)
            bucket = self._bucket(slot.group)
        part = bucket.flat.narrow(0, slot.slot.offset, slot.slot.numel)
        if slot.slot.index in bucket.arrived:
            part.add_(values)
        else:
            part.copy_(values)
            bucket.arrived.add(slot.slot.index)

    def _bucket(self, group: GroupState) -> Bucket:
        state = self._arrivals[group.unit.index]
        found = state.buckets.get(group.index)
        if found is None:
            if group.keeps_whole("gradient") or not state.dispatched:
                self._settle(group.unit.index)  # a late one must not wait for ranks that have not come as far
            while (found := self._new_bucket(group, state)) is None:
                self._make_room(group)
        return found

    def _new_bucket(self, group: GroupState, state: _UnitArrivals) -> Bucket | None:
        with held_back():  # or an interrupt would find the buffer with nobody
            buffer = self._pool.try_allocate(bucket_bytes(group))
            if buffer is not None:
                state.buckets[group.index] = new_bucket(group, buffer)
        return state.buckets.get(group.index)

    def _make_room(self, group: GroupState) -> None:
        if self._in_flight:
            self._settle(next(iter(self._in_flight)))
        elif not self._spill(group.unit):
            nbytes = bucket_bytes(group)
            raise BudgetError(
                f"tiers.device: {nbytes:,} bytes for the gradients of unit {group.unit.title!r} do not fit in "
                f"the {self._pool.capacity:,} "
                "bytes for gradients on their way; raise tiers.device or choose smaller units",
                nbytes,
            )

    def _spill(self, wanted: UnitState) -> bool:
        """Puts away what another unit has collected so far; only on one rank, where no other rank must do the same."""
        if self._collectives is not None:
            return False
        for unit in self._units:
            if unit is not wanted and self._arrivals[unit.index].buckets:
                self._put_away(unit)  # more of its gradients will come
                return True
        return False

    def _complete(self, unit: UnitState) -> None:
        if self._collectives is None:
            self._dispatch(unit)
            return
        while self._next < len(self._order):
            index = self._order[self._next]
            state = self._arrivals[index]
            if not state.dispatched and not state.complete:
                return
            if not state.dispatched:
                self._dispatch(self._units[index])
            self._next += 1

    # The end of a backward.

    def watch_backward_end(self) -> None:
        """In a backward: what is complete then is put away at its end. Of nested ones (reentrant checkpointing) the
        outermost counts, so this is also called where that one computes nothing but an inner one.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            first = not self._tasks
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
            if first:
                self.on_backward_begin()

    def _end_backward(self, task: int) -> None:
        self._tasks.discard(task)
        if self._tasks:
            return
        if self._collectives is not None:
            used, late = self._agree_on_used(self._collectives)
            # First what this rank would have sent sooner had it had all of it: others may have.
            rest = self._order[self._next :]
            for index in dict.fromkeys([*rest, *[unit.index for unit in reversed(self._units)]]):
                if used.get(index) and not self._arrivals[index].dispatched:
                    self._add_missing(self._units[index], used[index])
                    self._dispatch(self._units[index])
            for index in reversed(late):
                self._settle(index)
                self._add_missing(self._units[index], late[index])
                self._put_away(self._units[index])
            self._order = [unit.index for unit in reversed(self._units) if used.get(unit.index)]
        else:
            for unit in self._units:
                if self._arrivals[unit.index].arrived and not self._arrivals[unit.index].dispatched:
                    self._dispatch(unit)
        self._reset_arrivals()
        self.on_backward_end()

    def _reset_arrivals(self) -> None:
        for state in self._arrivals:
            state.arrived.clear()
            state.dispatched = False
        self._next = 0

    def _agree_on_used(self, collectives: Collectives) -> tuple[dict[int, list[SlotState]], dict[int, list[SlotState]]]:
        """For each unit, the slots that got a gradient on any rank in this backward; and, of units in their order,
        those that got more of it on any rank after the unit was dispatched there.
        """
        slots = [slot for unit in self._units for slot in unit.all_slots() if slot.group.layout.trainable]
        flags = torch.zeros(len(slots), dtype=torch.int32, device="cpu")
        for position, slot in enumerate(slots):
            state = self._arrivals[slot.group.unit.index]
            bucket = state.buckets.get(slot.group.index)
            waiting = bucket is not None and slot.slot.index in bucket.arrived
            flags[position] = (_LATE if waiting else _USED) if state.dispatched else _USED * waiting
        with self._stalls.waiting("gather"):
            collectives.small_max(flags)
        used: dict[int, list[SlotState]] = {}
        late: dict[int, list[SlotState]] = {}
        for flag, slot in zip(flags.tolist(), slots, strict=True):
            if flag:
                used.setdefault(slot.group.unit.index, []).append(slot)
            if flag == _LATE:
                late.setdefault(slot.group.unit.index, []).append(slot)
        return used, late

    def _add_missing(self, unit: UnitState, slots: list[SlotState]) -> None:
        """Zeros for what another rank has a gradient for and this one has not."""
        self.before_arrival(unit)
        for slot in slots:
            bucket = self._bucket(slot.group)
            if slot.slot.index not in bucket.arrived:
                bucket.flat.narrow(0, slot.slot.offset, slot.slot.numel).zero_()
                bucket.arrived.add(slot.slot.index)

    # Reducing and putting away.

    def _dispatch(self, unit: UnitState) -> None:
        """Sends the unit's buckets home: its gradients are complete."""
        self.on_unit_complete(unit, self._put_away(unit) or self._in_flight.get(unit.index))

    def _put_away(self, unit: UnitState) -> Future[None] | None:
        """From here on the unit's buckets belong to the lane (several ranks) or to the engine."""
        state = self._arrivals[unit.index]
        state.dispatched = self._collectives is not None
        buckets, state.buckets = list(state.buckets.values()), {}
        future: Future[None] | None = None
        if buckets:
            with self._engine.whole():
                work = [(bucket, self._note_arrivals(bucket)) for bucket in buckets]
                future = self._home.send(unit, work, self._device.now())
                self._in_flight[unit.index] = future
        return future

    def _note_arrivals(self, bucket: Bucket) -> list[Arrival]:
        arrivals = []
        for slot in bucket.group.slots:
            if slot.slot.index in bucket.arrived:
                arrivals.append(Arrival(slot, slot.has_grad, slot.clip_factor))
                slot.has_grad, slot.clip_factor = True, 1.0
        return arrivals

    # Waiting and dropping.

    def _settle(self, unit: int) -> None:
        future = self._in_flight.get(unit)
        if future is None:
            return
        try:
            kind = "gather" if self._collectives is not None else "nvme_write"
            with self._stalls.waiting(kind, unit=unit):
                future.result()
        finally:
            if future.done():  # else an interrupt: it is still on its way
                self._in_flight.pop(unit, None)

    def finish(self) -> None:
        """Waits until every gradient is at home; raises the first failure."""
        for unit in list(self._in_flight):
            self._settle(unit)

    def drop(self, slots: Sequence[SlotState] | None = None) -> None:
        """Forgets gradients (of ``slots``, or all), also half-collected ones of a backward that failed."""
        self.finish()
        dropped = [slot for unit in self._units for slot in unit.all_slots()] if slots is None else slots
        if torch._C._current_graph_task_id() == -1:
            self._drop_collected(dropped)
        for slot in dropped:
            slot.drop_gradient()
            take_gradient(slot.parameter)  # there is one where an interrupt came before it was taken

    def _drop_collected(self, slots: Sequence[SlotState]) -> None:
        for slot in slots:
            buckets = self._arrivals[slot.group.unit.index].buckets
            bucket = buckets.get(slot.group.index)
            if bucket is not None:
                bucket.arrived.discard(slot.slot.index)
                if not bucket.arrived:
                    self._release(bucket)
                    del buckets[slot.group.index]
        if not any(state.buckets for state in self._arrivals):
            self._tasks.clear()
            self._reset_arrivals()

    def _release(self, bucket: Bucket) -> None:
        """Of a bucket that is not sent."""
        bucket.restore()
        self._pool.release(bucket.buffer)

    def close(self) -> None:
        self._helpers.shutdown(wait=False)

    def recover(self) -> None:
        """After a backward that was broken off: what it left half collected is put away as it is, or dropped where
        ranks would have to agree.
        """
        self._tasks.clear()
        if not any(state.arrived for state in self._arrivals):
            return
        for unit in self._units:
            state = self._arrivals[unit.index]
            if state.buckets and self._collectives is None:
                self.before_arrival(unit)
                self._dispatch(unit)
            for bucket in state.buckets.values():
                self._release(bucket)
            state.buckets = {}
        self._reset_arrivals()
