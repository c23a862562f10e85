"""What a run did ahead of its time, in words: updates tried in the backward, and reading for the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tierzero.report.figures import Figures, Step
from tierzero.runtime.stats import Tries
from tierzero.training.text import amount, duration


@dataclass(frozen=True)
class TriesOfRun:
    """Steps by what became of their tries, and bytes of all of them."""

    tried: int
    lost: tuple[int, ...]
    lost_to_clipping: int
    left_out: tuple[int, ...]
    kept_share: float | None
    """Of the state that an update changes, over the steps that tried; None where it is not known."""
    tried_bytes: float
    redone_bytes: float


def tries_of(figures: Figures) -> TriesOfRun | None:
    """None where nothing was tried."""
    steps = figures.steps
    tried = [step for step in steps if step.ahead.tries in (Tries.KEPT, Tries.LOST)]
    lost = [step for step in tried if step.ahead.tries == Tries.LOST]
    tried_bytes = sum(step.ahead.tried_bytes for step in steps)
    if not tried and not tried_bytes:
        return None
    return TriesOfRun(
        len(tried),
        tuple(step.step for step in lost),
        sum(is_clipped(step) for step in lost),
        tuple(step.step for step in steps if step.ahead.tries == Tries.LEFT_OUT),
        _kept_share(tried, figures),
        tried_bytes,
        sum(step.ahead.redone_bytes for step in steps),
    )


def is_clipped(step: Step) -> bool:
    return step.ahead.clip_factor is not None and step.ahead.clip_factor < 1.0


def clips_of(figures: Figures) -> tuple[int, int]:
    """In how many steps clipping acted, of how many that it is known of."""
    known = [step for step in figures.steps if step.ahead.clip_factor is not None]
    return sum(map(is_clipped, known)), len(known)


def _kept_share(tried: Sequence[Step], figures: Figures) -> float | None:
    """What a step tried becomes current in the next, and counts there."""
    by_number = {step.step: step for step in figures.steps}
    following = [by_number[step.step + 1] for step in tried if step.step + 1 in by_number]
    whole = len(following) * figures.trained_bytes
    return sum(step.ahead.kept_bytes for step in following) / whole if whole else None


def sentences(figures: Figures) -> list[str]:
    """For the page and for a terminal."""
    tries = tries_of(figures)
    found = [] if tries is None else _of_tries(tries)
    if tries is None and figures.overlap == "both" and clips_of(figures)[1]:
        found = ['optimizer.overlap = "both" found nothing to try: no step had tiles and room for it.']
    return found + _of_start(figures)


def _of_tries(tries: TriesOfRun) -> list[str]:
    kept = tries.tried - len(tries.lost)
    first = f"In {_steps(tries.tried)} updates were tried in the backward, and in {kept} of them kept"
    if tries.kept_share is not None:
        first += f": {100 * tries.kept_share:.0f} % of the weights and optimizer state was updated ahead of these steps"
    found = [f"{first}."]
    vain = f"{amount(tries.redone_bytes)} of the {amount(tries.tried_bytes)} written ahead were in vain"
    if tries.lost:
        found.append(f"In {_steps(len(tries.lost))} they were lost and done again, {_why_lost(tries)}; {vain}.")
    elif tries.redone_bytes:
        found.append(f"{vain}: another backward came before the step, or something else asked for the state.")
    if tries.left_out:
        count = _steps(len(tries.left_out))
        found.append(
            f"{count} went without, to waste nothing, as steps before them had lost tries or would have: "
            f"{listed(tries.left_out)}."
        )
    return found


def _why_lost(tries: TriesOfRun) -> str:
    clipped, other = tries.lost_to_clipping, len(tries.lost) - tries.lost_to_clipping
    reason = "as the step fixed another update (other hyperparameters), or was skipped"
    if not other:
        return "as clipping acted"
    return f"in {clipped} of them as clipping acted, in {other} {reason}" if clipped else reason


def _of_start(figures: Figures) -> list[str]:
    steps = [step.ahead for step in figures.settled()]
    read, needed = median(step.read_ahead_bytes for step in steps), median(step.start_bytes for step in steps)
    cold = sum(step.cold_start_s for step in steps) / len(steps)
    if not read and not cold:
        return []
    of = f" (its first units have {amount(needed)})" if needed else ""
    return [
        f"A forward waits {duration_of(cold)} before its first unit can run; in the backward before it, "
        f"{amount(read)} of state were asked for ahead{of}."
    ]


def duration_of(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else duration(seconds)


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def listed(steps: Sequence[int]) -> str:
    """Numbers, neighbours as a range, at most eight of them."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-4:]])
