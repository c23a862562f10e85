"""The choices that make a step fastest, found by trying them on the simulated step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from tierzero.errors import BudgetError
from tierzero.planner.prediction import Prediction
from tierzero.planner.shape import MemoryPlan

WORTH = 0.01
"""A choice is taken over the one before it in the list of options when the step is shorter by this part at least."""
_ROUNDS = 3


@dataclass(frozen=True)
class Choice:
    """What a plan may decide; see the configuration's keys of the same names. ``order``: kinds of state, the first of
    which gets the fastest memory that there is. ``tile`` and ``prefetch``: None as `plan_memory` decides.
    """

    recompute: str | int
    overlap: str
    order: tuple[str, ...]
    tile: int | None
    prefetch: int | None


@dataclass(frozen=True)
class Options:
    """For every field of a `Choice` what may be chosen, the preferred first."""

    recompute: Sequence[str | int]
    overlap: Sequence[str]
    order: Sequence[tuple[str, ...]]
    tile: Sequence[int | None]
    prefetch: Sequence[int | None]

    def first(self) -> Choice:
        return Choice(**{field.name: getattr(self, field.name)[0] for field in fields(self)})


@dataclass(frozen=True)
class Candidate:
    """A choice with what comes of it. ``activations``: bytes at most, beside the device tier's pools."""

    choice: Choice
    plan: MemoryPlan
    prediction: Prediction
    activations: int
    overlap: str
    """The choice's, or what "auto" comes to."""
    second_slots: int = 0
    """Bytes of tier files that second slots take, beside those of the plan."""

    @property
    def step_s(self) -> float:
        return self.prediction.step_s


Try = Callable[[Choice], Candidate]
"""Raises BudgetError for a choice that does not fit."""


def fastest(options: Options, attempt: Try) -> Candidate:
    """One field after another is set to what makes the step shortest, until nothing does. Raises BudgetError, that of
    the leanest choice tried, when none fits.
    """
    tried: dict[Choice, Candidate | BudgetError] = {}

    def outcome(choice: Choice) -> Candidate | BudgetError:
        if choice not in tried:
            try:
                tried[choice] = attempt(choice)
            except BudgetError as error:
                tried[choice] = error
        return tried[choice]

    best = _first_that_fits(options, outcome)
    for _ in range(_ROUNDS):
        before = best
        for field in fields(options):
            for option in getattr(options, field.name):
                found = outcome(replace(best.choice, **{field.name: option}))
                if not isinstance(found, BudgetError) and found.step_s < best.step_s * (1 - WORTH):
                    best = found
        if best is before:
            break
    return best


def _first_that_fits(options: Options, outcome: Callable[[Choice], Candidate | BudgetError]) -> Candidate:
    shortage: BudgetError | None = None
    first = options.first()
    for recompute in options.recompute:
        for tile in options.tile:
            found = outcome(replace(first, recompute=recompute, tile=tile))
            if not isinstance(found, BudgetError):
                return found
            if shortage is None or found.missing < shortage.missing:
                shortage = found
    assert shortage is not None
    raise shortage
