"""Gathered units: which are in memory, which are on their way, which make room.

All decisions are made on the thread that runs the model, in program order, from the trace and from the arena's own
bookkeeping; never from timing. So every rank decides alike, and the order of the gathers is the same everywhere
without asking.

States of a unit (`Paging`) and who owns its arena buffers:

========== ==================================================================================================
AWAY       no buffers (``in_place``: the weights' home is what the device computes from, and has none ever)
COMING     the engine and the gather lane write into the buffers; nobody else may touch them
HERE       the pager owns them; forward, backward handles and copies read them while the unit is in use
========== ==================================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

import torch

from tierzero.errors import BudgetError
from tierzero.runtime.device import Device, Event
from tierzero.runtime.spans import Kind
from tierzero.runtime.state import Gathered, GroupState, UnitState
from tierzero.runtime.stats import Stalls
from tierzero.runtime.timeline import Timeline
from tierzero.runtime.trace import AccessTrace
from tierzero.runtime.update import Destination, Updater
from tierzero.sharding.collectives import Collectives
from tierzero.tiers import Buffer, IoEngine, MemoryPool, Priority
from tierzero.tiers.interrupts import held_back


class Paging(Enum):
    """See the module's docstring."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"


@dataclass
class Fetch:
    """A fetch in flight: the groups' buffers and the future that ends when they are filled (with the events that
    device work waits for).
    """

    gathered: list[Gathered]
    done: list[Future[list[Event]]]


@dataclass
class _Record:
    state: Paging = Paging.AWAY
    fetch: Fetch | None = None
    gathered: list[Gathered] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    reserved: list[Buffer] = field(default_factory=list)
    """Of a fetch that is about to begin; an interrupt may leave them here."""


class Pager:
    """Fetches units on demand and ahead of time, and evicts those whose next use is furthest away."""

    def __init__(
        self,
        units: list[UnitState],
        arena: MemoryPool,
        engine: IoEngine,
        updater: Updater,
        device: Device,
        collectives: Collectives | None,
        depth: int,
        stalls: Stalls,
        reads_ahead: bool = False,
        kept: Collection[int] = (),
        timeline: Timeline | None = None,
    ) -> None:
        self.timeline = timeline or Timeline()
        self._kept = kept
        self._reads_ahead = reads_ahead
        self._units = units
        self.outer = {index for unit in units for index in unit.ancestors}
        """Units with others inside."""
        self._arena = arena
        self._engine = engine
        self._updater = updater
        self._device = device
        self._collectives = collectives
        self._depth = depth
        self._stalls = stalls
        self._records = [_Record() for _ in units]
        self._demanded = -1
        """The unit that is being demanded: not to be evicted for what is fetched ahead of the next."""
        self._by_storage: dict[int, Gathered] = {}
        self._outlived: list[Gathered] = []
        """Dropped, but somebody still reads them."""
        self.trace = AccessTrace()
        self.before_demand: Callable[[], None] = lambda: None
        """Raises where nothing can be fetched now."""
        self.after_use: Callable[[float, bool], None] = lambda waited, backward: None
        """Called with the seconds that a use by the model has waited, and whether it is the backward's; not before a
        step's first forward has its first unit.
        """

    def demand(self, unit: UnitState, in_order: bool = True) -> list[Gathered]:
        """The unit's gathered groups, waiting for them if need be; then starts the fetches that the trace foretells.
        ``in_order``: this is a use by the model, which the trace learns; else none of its order.
        """
        self.before_demand()
        if in_order:
            self.trace.access(unit.index, _in_backward())
        self._demanded = unit.index
        record = self._records[unit.index]
        began, starting = time.perf_counter(), self._stalls.starting
        if record.state is Paging.AWAY:
            self._start(unit, Priority.DEMAND, required=True)
        if in_order:
            self.prefetch()
        if record.state is Paging.COMING:
            self._finish(unit, record)
        if in_order:
            if not starting:
                self.after_use(time.perf_counter() - began, _in_backward())
            if self._stalls.starting and (unit.index not in self.outer or _in_backward()):
                self._stalls.starting = False
        return record.gathered

    def prefetch(self) -> None:
        """Starts fetches of the next units of the trace, as many as the depth and the arena's free or less urgent
        memory allow. What comes after the step's last backward waits for its update: of that, the state is read ahead.
        """
        if self._depth == 0:
            return
        left = len(self._units)
        if _in_backward() and self.trace.in_last_backward():
            left = self.trace.left()
            if self._reads_ahead:
                self._updater.read_ahead([group for unit in self.trace.order() for group in self._units[unit].groups])
        for index in self.trace.upcoming(min(self._depth, left)):
            if self._records[index].state is Paging.AWAY and not self._start(
                self._units[index], Priority.PREFETCH, required=False
            ):
                return

    def find(self, storage: int) -> Gathered | None:
        """The gathered group whose memory starts at address ``storage``."""
        return self._by_storage.get(storage)

    def forget(self, unit: UnitState) -> None:
        """Drops gathered copies of a unit whose weights are about to change; waits for a fetch in flight."""
        record = self._records[unit.index]
        if record.state is Paging.COMING:
            self._finish(unit, record)
        if record.state is Paging.HERE:
            self._drop(unit.index)
        for event in record.events:
            event.synchronize()  # copies out of a home that is about to change may be under way still
        record.events = []

    def settle(self, only: UnitState | None = None) -> None:
        """Waits for fetches in flight (of one unit, or all), and so for the updates that they carry out."""
        for unit in self._units if only is None else [only]:
            record = self._records[unit.index]
            if record.state is Paging.COMING:
                self._finish(unit, record)

    def is_here(self, unit: UnitState) -> bool:
        return self._records[unit.index].state is not Paging.AWAY

    def gathered_units(self) -> list[str]:
        """Titles of the units that hold arena memory now."""
        lent = " (read by a backward, or kept by your code)"
        return [
            unit.title + (lent if any(gathered.is_lent for gathered in record.gathered) else "")
            for unit, record in zip(self._units, self._records, strict=True)
            if record.state is not Paging.AWAY
        ]

    # Starting and finishing.

    @torch.inference_mode(False)
    def _start(self, unit: UnitState, priority: Priority, *, required: bool) -> bool:
        """Begins a fetch; False when there is no room for one that is not required.

        What an inference begins, training may use: the buffers must not become tensors that autograd refuses.
        """
        record = self._records[unit.index]
        try:
            if not self._take_buffers(record, unit, required):
                return False
            after = self._device.now()
            with self._engine.whole():
                self._begin(record, unit, after, priority)
        finally:
            if record.reserved:
                with held_back():
                    self._give_back(record)
        return True

    def _begin(self, record: _Record, unit: UnitState, after: Event, priority: Priority) -> None:
        """Hands the reserved buffers over to a fetch."""
        fetch = record.fetch = Fetch([], [])
        record.state = Paging.COMING
        buffers, record.reserved = iter(record.reserved), []
        try:
            for group in unit.groups:
                fetch.gathered.append(self._gathered(group, None if group.in_place else next(buffers)))
            for gathered in fetch.gathered:
                fetch.done.append(self._bring(gathered.group, gathered, after, priority))
        except Exception:
            self._abandon(record, fetch)
            raise

    def _gathered(self, group: GroupState, buffer: Buffer | None) -> Gathered:
        if buffer is not None:
            flat = buffer.view(group.layout.dtype, group.layout.numel)
        else:
            whole = group.whole_kept("weight") if group.keeps_whole("weight") else group.whole_home("weight")
            assert whole is not None
            flat = whole
        return Gathered(group, buffer, flat)

    def _bring(self, group: GroupState, gathered: Gathered, after: Event, priority: Priority) -> Future[list[Event]]:
        spec, group.pending = group.pending, None
        destination = None
        if gathered.buffer is not None:
            destination = Destination(gathered.buffer, group.shard_start * group.layout.dtype.itemsize, after)
        nothing = spec is None and destination is None and group.updating is None
        local = _done() if nothing else self._engine.submit(self._updater.bring(group, spec, destination, priority))
        if self._collectives is None or group.layout.parts == 1:
            return local
        if group.in_place:
            if group.gathered_version == group.version:
                return local
            group.gathered_version = group.version
        return self._collectives.submit_gather(group.unit.index, self._gather_work(group, gathered, local, after))

    def _gather_work(
        self, group: GroupState, gathered: Gathered, local: Future[list[Event]], after: Event
    ) -> Callable[[], list[Event]]:
        collectives = self._collectives
        assert collectives is not None

        def work() -> list[Event]:
            for event in (after, *local.result()):
                self._device.wait(event)
            shard = gathered.flat.narrow(0, group.shard_start, group.layout.shard_numel)
            with self.timeline.span(Kind.ALL_GATHER, group.unit.index, group.index, nbytes=gathered.flat.nbytes):
                collectives.all_gather(gathered.flat, shard)
            return [self._device.now()]

        return work

    def _finish(self, unit: UnitState, record: _Record) -> None:
        fetch = record.fetch
        assert fetch is not None
        kind = (
            "gather" if self._collectives is not None and any(g.layout.parts > 1 for g in unit.groups) else "nvme_read"
        )
        try:
            with self._stalls.waiting(kind, self._updater.room, unit.index):
                events = [event for done in fetch.done for event in done.result()]
        except BaseException:
            self._abandon(record, fetch)
            raise
        for event in events:
            self._device.wait(event)
        for gathered in fetch.gathered:
            self._by_storage[gathered.flat.untyped_storage().data_ptr()] = gathered
        record.state, record.fetch, record.gathered, record.events = Paging.HERE, None, fetch.gathered, events

    def _abandon(self, record: _Record, fetch: Fetch) -> None:
        """After a failed fetch: its buffers go back once nothing can write into them any more."""
        for done in fetch.done:
            done.exception()
        for gathered in fetch.gathered:
            gathered.group.gathered_version = -1
            if gathered.buffer is not None:
                self._arena.release(gathered.buffer)
        record.state, record.fetch = Paging.AWAY, None

    # Room.

    def _take_buffers(self, record: _Record, unit: UnitState, required: bool) -> bool:
        """Reserves a buffer for each group that needs one; False when there is no room and none is required."""
        self._give_back(record)
        for group in unit.groups:
            if not group.in_place and not self._reserve(record, group.gathered_bytes(), unit, required):
                return False
        return True

    def _give_back(self, record: _Record) -> None:
        while record.reserved:
            self._arena.release(record.reserved.pop())

    def _take_back(self) -> None:
        """Memory whose last reader is done."""
        done = [gathered for gathered in self._outlived if not gathered.is_lent]
        self._outlived = [gathered for gathered in self._outlived if gathered.is_lent]
        for gathered in done:
            assert gathered.buffer is not None
            self._arena.release(gathered.buffer)

    def _reserve(self, record: _Record, nbytes: int, unit: UnitState, required: bool) -> bool:
        if self._outlived:
            self._take_back()
        while True:
            with held_back():  # or an interrupt would find the buffer with nobody
                buffer = self._arena.try_allocate(nbytes)
                if buffer is not None:
                    record.reserved.append(buffer)
                    return True
            victim = self._victim(unit, required)
            if victim is not None:
                self._drop(victim)
                continue
            if not required:
                return False
            if not self._settle_one(unit):
                used = ", ".join(self.gathered_units()) or "nothing"
                raise BudgetError(
                    f"tiers.device: {nbytes:,} bytes for unit {unit.title!r} do not fit beside the units in use "
                    f"({used}) in the "
                    f"{self._arena.capacity:,} bytes for gathered units; raise tiers.device or choose smaller units",
                    nbytes,
                )

    def _victim(self, wanted: UnitState, required: bool) -> int | None:
        """The unit here whose next use is furthest; for a prefetch, only if that is further than the wanted unit's."""
        candidates = [
            index
            for index, record in enumerate(self._records)
            if record.state is Paging.HERE
            and index != wanted.index
            and index != self._demanded
            and index not in self._kept
            and not self._units[index].active
            and any(gathered.buffer is not None for gathered in record.gathered)
            and not any(gathered.is_lent for gathered in record.gathered)
        ]
        if not candidates:
            return None
        victim = max(candidates, key=lambda index: (self.trace.distance(index), index))
        if not required and self.trace.distance(victim) <= self.trace.distance(wanted.index):
            return None
        return victim

    def _settle_one(self, wanted: UnitState) -> bool:
        """Waits for one fetch in flight of another unit, so that it can be evicted."""
        for unit, record in zip(self._units, self._records, strict=True):
            if record.state is Paging.COMING and unit is not wanted and unit.index != self._demanded:
                self._finish(unit, record)
                return True
        return False

    def _drop(self, index: int) -> None:
        record = self._records[index]
        with self._engine.whole():
            for gathered in record.gathered:
                self._by_storage.pop(gathered.flat.untyped_storage().data_ptr(), None)
                if gathered.is_lent:
                    self._outlived.append(gathered)
                elif gathered.buffer is not None:
                    self._arena.release(gathered.buffer)
            record.state, record.gathered = Paging.AWAY, []


def _done() -> Future[list[Event]]:
    done: Future[list[Event]] = Future()
    done.set_result([])
    return done


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
