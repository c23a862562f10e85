"""What updates beside the backward assume about the step that is to follow, and whether it comes so.

``overlap = "backward"`` updates a parameter before ``optimizer.step()`` is called. That gives what the step would have
given only if the step comes, once, with the same hyperparameters. A loop that does otherwise is stopped with an error,
because what has been updated cannot be taken back.

A parameter's way: its update is *assumed* in the backward, *confirmed* by its optimizer's step; from then on its
gradient is *spent* until it is dropped (``zero_grad``), as if it still stood there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from tierzero.errors import ConfigError
from tierzero.optim.owner import GroupHyper, HyperOf
from tierzero.runtime.fixing import Stepped
from tierzero.runtime.state import SlotState, UnitState


class Anticipation:
    """The parameters updated in the backward whose step has not come yet, each with what it was updated with."""

    def __init__(self) -> None:
        self.units: set[int] = set()
        """Units updated in this backward, by index."""
        self._assumed: dict[SlotState, GroupHyper | None] = {}

    def assume(self, unit: UnitState, stepped: Stepped) -> None:
        self.units.add(unit.index)
        self._assumed.update((slot, hyper_of(slot)) for slot, hyper_of in stepped)

    def confirm(self, hyper_of: HyperOf, slots: Iterable[SlotState]) -> None:
        """A step with ``hyper_of`` of ``slots`` has come."""
        for slot in slots:
            if slot.spent:
                _refuse(f"a second optimizer.step() for one backward: the gradient of {slot.name!r} is used up")
            if slot in self._assumed:
                if self._assumed[slot] != hyper_of(slot):
                    _refuse(f"the hyperparameters of {slot.name!r} were changed between backward and optimizer.step()")
                del self._assumed[slot]

    def take_confirmed(self, units: Iterable[UnitState]) -> list[UnitState]:
        """The units whose parameters are all confirmed; they are not this backward's any more."""
        done = [u for u in units if u.index in self.units and not any(s in self._assumed for s in u.all_slots())]
        self.units.difference_update(unit.index for unit in done)
        return done

    def check_dropped(self, slots: Iterable[SlotState]) -> None:
        """Gradients of ``slots`` are dropped."""
        lost = next((slot for slot in slots if slot in self._assumed), None)
        if lost is not None:
            _refuse(
                f"gradients are dropped, but {lost.name!r} was updated with its own and no optimizer.step() followed"
            )

    def check_arrival(self, unit: UnitState) -> None:
        """A gradient of ``unit`` is about to arrive."""
        if unit.index in self.units:
            _refuse(f"a second backward before optimizer.step(), which has updated unit {unit.title!r} already")
        spent = next((slot for slot in unit.all_slots() if slot.spent), None)
        if spent is not None:
            _refuse(f"a second backward without zero_grad(): the gradient of {spent.name!r} is used up")

    def check_use(self) -> None:
        """Weights are about to be read."""
        if self._assumed:
            name = next(iter(self._assumed)).name
            _refuse(f"weights are used between backward and optimizer.step(), and {name!r} has been updated already")

    def clear(self) -> None:
        """The state is a new one, as after loading a checkpoint."""
        self.units.clear()
        self._assumed.clear()


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what}; optimizer.overlap = 'backward' updates in the backward, which cannot be taken back: use 'forward' "
        "for such a loop, and go on from a checkpoint"
    )
