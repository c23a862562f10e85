"""The updates that steps have fixed: pending until they are applied, and the ways to apply them.

The pager applies a unit's updates with its next gather. Here are the other ways: before a gradient would overwrite one
that an update still has to read, for whoever needs the tiers up to date, and, with ``overlap = "backward"``, as soon as
a unit's gradients are complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from tierzero.errors import ConfigError
from tierzero.runtime.anticipation import Anticipation
from tierzero.runtime.fixing import MomentOwners, Stepped, fixed_updates, next_updates
from tierzero.runtime.pager import Pager
from tierzero.runtime.state import GroupState, SlotState, UnitState, UpdateSpec
from tierzero.runtime.stats import Stalls, StepOutcome, Tries
from tierzero.runtime.trial_rules import Amount, Habit
from tierzero.runtime.update import Updater
from tierzero.tiers import IoEngine, Priority


@dataclass(frozen=True)
class _Work:
    """Totals: elements updated, and updated ahead of their step; seconds of drive and kernel, and of the clock."""

    updated: int
    ahead: int
    drive_s: float
    kernel_s: float
    clock: float


class PendingUpdates:
    """Each group's fixed update (``GroupState.pending``) on its way to the tiers.

    ``start_afresh`` zeroes the moments and step counts of parameters that change their optimizer.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        engine: IoEngine,
        updater: Updater,
        pager: Pager,
        stalls: Stalls,
        start_afresh: Callable[[list[SlotState]], None],
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        self._units = units
        self._engine, self._updater, self._pager, self._stalls = engine, updater, pager, stalls
        self._moments = MomentOwners(start_afresh)
        self.anticipation = Anticipation()
        self._speculation = updater.speculation
        self.habit = Habit()
        self.outcome = StepOutcome()
        self.spares_free: Callable[[], Future[None] | None] = lambda: None
        """What frees the spare slots of the tiles, where something does that has begun."""
        trained = (tile.span.numel for group in self._groups() if group.fmt is not None for tile in group.tiles)
        self.amount = Amount(sum(trained))
        self._work_before = self._work()

    def fix(self, stepped: Stepped, loss_scale: float) -> None:
        """Fixes the update of these parameters; it will read the gradients as they stand."""
        self._moments.take_over(stepped)
        groups = dict.fromkeys(slot.group for slot, _ in stepped)
        late = [group for group in groups if group.pending is not None]
        if late:
            self._apply(late)
        for unit in {group.unit.index: group.unit for group in groups}.values():
            self._pager.forget(unit)
        with self._engine.whole():
            for group, spec in fixed_updates(stepped, loss_scale):
                group.version += 1
                group.pending = spec

    def fix_rest(self, stepped: Stepped, loss_scale: float) -> None:
        """`fix` of those that the backward has not updated already."""
        done = self.anticipation.units
        self.fix([(slot, hyper_of) for slot, hyper_of in stepped if slot.group.unit.index not in done], loss_scale)

    def apply_all(self) -> None:
        """Every update is applied and written when this returns."""
        self._pager.settle()
        self._speculation.drop(group for group in self._groups() if group.pending is None)
        self._apply(self._groups())
        self.settle_early()
        with self._stalls.waiting("nvme_write"):
            self._engine.run(self._updater.drain())

    def make_way(self, unit: UnitState) -> None:
        """Before a gradient of ``unit`` arrives: it must not overwrite one that a pending update still has to read."""
        self.anticipation.check_arrival(unit)
        self._speculation.drop(group for group in unit.groups if group.pending is None)
        self._pager.settle(unit)
        if any(group.pending is not None or group.updating is not None for group in unit.groups):
            self._apply(unit.groups)

    def begin_all(self) -> None:
        """Begins every update that no gather has begun."""
        self._begin(self._groups())

    def _apply(self, groups: Iterable[GroupState]) -> None:
        """Applies pending updates now, without gathering; waits for the updates, not for their write-back."""
        groups = list(groups)
        self._begin(groups)
        self._settle(groups)

    def _begin(self, groups: Iterable[GroupState]) -> None:
        with self._engine.whole():
            for group in groups:
                spec, group.pending = group.pending, None
                if spec is not None:
                    update = self._update_after(group.updating, group, spec, Priority.DEMAND)
                    # Whoever comes after an interrupt of the wait below still waits for it.
                    group.updating = self._engine.submit(self._updater.whole_or_failed(update))

    def _settle(self, groups: Iterable[GroupState]) -> None:
        busy = [(group, group.updating) for group in groups if group.updating is not None]
        with self._stalls.waiting("optimizer"):
            _wait_all([updating for _, updating in busy])
        for group, updating in busy:
            if group.updating is updating:
                group.updating = None

    def speculate(self, unit: UnitState, reduced: Future[None] | None, loss_scale: float) -> None:
        """Tries the update that the step to come would fix if nothing is clipped, once ``reduced`` is done."""
        stepped = [(s, s.hyper_of) for s in unit.all_slots() if s.has_grad and s.hyper_of is not None]
        if not self.habit.tries() or any(slot.state_of != hyper_of for slot, hyper_of in stepped):
            return
        after = [future for future in (self.spares_free(), reduced) if future is not None]
        with contextlib.suppress(ConfigError):  # the step itself says so
            for group, spec in next_updates(stepped, loss_scale):
                if spec is not None and group.pending is None:
                    self._speculation.begin(group, spec, after)

    def end_speculation(self, applied: bool, slots: Sequence[SlotState]) -> None:
        """After a step has fixed its updates, or none; ``slots`` had gradients."""
        factor = min((slot.clip_factor for slot in slots), default=1.0)
        self.outcome = StepOutcome(factor, Tries.of(self._speculation.is_right(), self.habit.left_out))
        self._speculation.stop()
        self._speculation.drop(group for group in self._groups() if group.pending is None)
        self.habit.step_ended(applied and all(slot.clip_factor == 1.0 for slot in slots))
        now, before = self._work(), self._work_before
        self._work_before = now
        updated = now.updated - before.updated
        element_s = max(now.drive_s - before.drive_s, now.kernel_s - before.kernel_s) / updated if updated else 0.0
        self.amount.step_ended(now.ahead - before.ahead, element_s, now.clock - before.clock)
        self._speculation.allow(0 if self.habit.pauses else self.amount.elements)

    def backward_ended(self) -> None:
        if self.habit.tries():
            self._speculation.all_begun()
        self.habit.backward_ended()
        self.amount.backward_ended()

    def _work(self) -> _Work:
        updater, drive_s = self._updater, self._engine.busy_s
        return _Work(updater.updated, self._speculation.ahead, drive_s, updater.kernel_seconds, time.perf_counter())

    # Beside the backward.

    def begin_early(self, unit: UnitState, reduced: Future[None] | None) -> None:
        """Updates a unit whose gradients are complete, once ``reduced`` is done, as the step to come would."""
        if (
            unit.active
            # What else of the unit the backward may still read would have to be gathered again, on this rank alone.
            or (self._ranks > 1 and not all(group.layout.trainable for group in unit.groups))
            or unit.index in self.anticipation.units
        ):
            return
        stepped = [(s, s.hyper_of) for s in unit.all_slots() if s.has_grad and s.hyper_of is not None and s.hyper_of(s)]
        if not stepped:
            return
        self.fix(stepped, loss_scale=1.0)  # scaled training is refused with updates in the backward
        with self._engine.whole():
            self.anticipation.assume(unit, stepped)
            for group in unit.groups:
                spec, group.pending = group.pending, None
                if spec is not None:
                    update = self._update_after(reduced, group, spec, Priority.WRITE_BACK)
                    group.updating = self._engine.submit(self._updater.whole_or_failed(update))

    async def _update_after(
        self, before: Future[Any] | None, group: GroupState, spec: UpdateSpec, priority: Priority
    ) -> None:
        if before is not None:
            await asyncio.wrap_future(before)
        await self._updater.apply(group, spec, priority)

    def settle_early(self) -> None:
        """Waits for updates that have begun without a gather; raises what failed in them."""
        self._settle(self._groups())

    def spend_confirmed(self) -> None:
        """The gradients that confirmed updates have used may be overwritten."""
        for unit in self.anticipation.take_confirmed(self._units):
            for slot in unit.all_slots():
                used = slot.has_grad and slot.hyper_of is not None
                slot.drop_gradient()
                slot.spent = used

    def _groups(self) -> list[GroupState]:
        return [group for unit in self._units for group in unit.groups]


def _wait_all(futures: Iterable[Future[Any]]) -> None:
    """Waits for every one, then raises the first failure: nothing may go on in the background behind an error or an
    interrupt.
    """
    futures = list(futures)
    try:
        failures = [error for error in [future.exception() for future in futures] if error is not None]
    except BaseException:
        wait(futures)
        raise
    if failures:
        raise failures[0]
