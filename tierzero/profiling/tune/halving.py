"""Successive halving (Jamieson and Talwalkar, 2016) over short measurements, and a duel that decides.

All candidates are measured for a few steps, the better half for twice as many, and so on. The machine drifts
meanwhile, so the default runs again every few candidates, and a candidate counts by its ratio to the default's runs
right before and after it. The last one meets the default in fresh runs by turns: what was chosen as the best of many is
partly lucky, and only these runs say whether it is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from tierzero.planner.search import WORTH

C = TypeVar("C", bound=Hashable)

_GROUP = 4
"""Candidates between two runs of the default."""


@dataclass(frozen=True)
class Measured:
    """One run: its median step of those that count, and the bytes that such a step moves to and from nvme."""

    step_s: float
    nvme_bytes: float = 0.0


@dataclass(frozen=True)
class Failed:
    """A run that did not get to its end."""

    why: str


@dataclass(frozen=True)
class Limits:
    """``warm_up``: steps that every run makes before those that count."""

    seconds: float
    warm_up: int = 2
    first_steps: int = 2
    most_steps: int = 8
    pairs: int = 3
    """Runs of each side in the duel."""


@dataclass(frozen=True)
class Trial(Generic[C]):
    """One run. Rounds count from 1, the duel is the last; round 0 is a run of the default that does not count."""

    round: int
    candidate: C
    steps: int
    outcome: Measured | Failed


@dataclass(frozen=True)
class Scored(Generic[C]):
    """A candidate in a round: its step over the default's in the same round, below 1 where it is faster."""

    round: int
    candidate: C
    steps: int
    measured: Measured
    ratio: float


@dataclass(frozen=True)
class Verdict(Generic[C]):
    """The duel: medians of the runs of both. ``gain``: the part of the step that is saved. ``spread``: how far runs of
    the same settings lie apart, as a part of their median, of the side where it is more.
    """

    candidate: C
    step_s: float
    default_s: float
    gain: float
    spread: float

    @property
    def is_better(self) -> bool:
        """By more than the spread, and enough to be worth a setting."""
        return self.gain > max(self.spread, WORTH)


@dataclass
class Outcome(Generic[C]):
    """What is known so far."""

    trials: list[Trial[C]] = field(default_factory=list)
    scores: list[Scored[C]] = field(default_factory=list)
    untried: list[C] = field(default_factory=list)
    """For want of time."""
    needed_s: float = 0.0
    """About what all candidates would have taken; 0 where nothing is known about it."""
    ended: str | None = None
    """Why it ended before everything was measured."""
    verdict: Verdict[C] | None = None

    @property
    def recommended(self) -> C | None:
        return self.verdict.candidate if self.verdict is not None and self.verdict.is_better else None


class DefaultFailedError(Exception):
    """The configuration itself does not run, so there is nothing to compare with."""


class _OutOfTimeError(Exception):
    pass


class Search(Generic[C]):
    """One search. ``outcome`` holds what is known whenever `run` is interrupted.

    ``measure(candidate, steps)`` runs the warm-up and ``steps`` more; ``combine(scores)`` gives candidates made of
    those of the first round; ``clock`` gives seconds; ``report`` is told of every run.
    """

    def __init__(
        self,
        default: C,
        candidates: Sequence[C],
        measure: Callable[[C, int], Measured | Failed],
        combine: Callable[[Sequence[Scored[C]]], Sequence[C]],
        limits: Limits,
        clock: Callable[[], float],
        report: Callable[[Trial[C]], None] = lambda trial: None,
    ) -> None:
        self.outcome: Outcome[C] = Outcome()
        self._default, self._candidates = default, list(candidates)
        self._measure, self._combine, self._report = measure, combine, report
        self._limits, self._clock = limits, clock
        self._deadline = clock() + limits.seconds
        self._round, self._steps = 0, 1
        self._start_s, self._step_s = 0.0, 0.0

    def run(self) -> Outcome[C]:
        """Raises DefaultFailedError where the default does not run."""
        try:
            best = self._best()
            if best is not None:
                self.outcome.verdict = self._duel(best)
        except _OutOfTimeError:
            self.outcome.ended = "the time was up"
        except DefaultFailedError as error:
            if len(self.outcome.trials) == 1:
                raise
            self.outcome.ended = f"the configuration itself failed: {error}"
        return self.outcome

    def _best(self) -> Scored[C] | None:
        """The last one left of all candidates; None where none was faster than the default."""
        # The very first run compiles kernels and fills file caches, which no other one does.
        self._default_run(0.0)
        self._round, self._steps = 1, self._limits.first_steps
        first = self._default_run(0.0)
        scores = self._measured_round(self._affordable(), first)
        left = [each.candidate for each in _better_half(scores)] + list(self._combine(scores))
        while len(left) > 1 and self._time_left() >= self._round_s(len(left), self._next_steps()) + self._duel_s():
            self._round, self._steps = self._round + 1, self._next_steps()
            scores = [*scores, *self._measured_round(left)]
            latest = [each for each in scores if each.round == self._round]
            left = [each.candidate for each in _better_half(latest)] or left
        known = {each.candidate: each for each in scores}
        faster = [each for each in known.values() if each.ratio < 1 and each.candidate in left]
        return min(faster, key=lambda each: each.ratio, default=None)

    def _affordable(self) -> list[C]:
        """As many candidates as there is time for, from the first on."""
        count = len(self._candidates)
        self.outcome.needed_s = self._limits.seconds - self._time_left() + self._schedule_s(count)
        while count and self._schedule_s(count) > self._time_left():
            count -= 1
        self.outcome.untried = self._candidates[count:]
        if self._candidates and not count:
            raise _OutOfTimeError
        return self._candidates[:count]

    def _measured_round(self, candidates: Sequence[C], first: Measured | None = None) -> list[Scored[C]]:
        """The default, some candidates, the default, and so on. ``first``: the default's run that was made already.

        Cut short where the time that is left is needed for the duel.
        """
        found: list[Scored[C]] = []
        before, group = first, list[tuple[C, Measured]]()
        try:
            before = before or self._default_run(self._duel_s())
            for begin in range(0, len(candidates), _GROUP):
                group = []
                for each in candidates[begin : begin + _GROUP]:
                    outcome = self._run(each, self._duel_s())
                    if isinstance(outcome, Measured):
                        group.append((each, outcome))
                after = self._default_run(self._duel_s())
                found += self._scored(group, (before.step_s + after.step_s) / 2)
                before, group = after, []
        except _OutOfTimeError:
            found += self._scored(group, before.step_s) if before is not None else []
            self.outcome.ended = "the time was up"
        self.outcome.scores += found
        return found

    def _scored(self, group: Sequence[tuple[C, Measured]], level_s: float) -> list[Scored[C]]:
        return [
            Scored(self._round, candidate, self._steps, measured, measured.step_s / level_s)
            for candidate, measured in group
        ]

    def _duel(self, best: Scored[C]) -> Verdict[C] | None:
        self._round, self._steps = self._round + 1, self._next_steps()
        sides: dict[C, list[float]] = {self._default: [], best.candidate: []}
        for pair in range(self._limits.pairs):
            for side in list(sides) if pair % 2 == 0 else list(reversed(sides)):
                outcome = self._run(side, 0.0)
                if isinstance(outcome, Failed):
                    self.outcome.ended = f"{side} failed in its last runs: {outcome.why}"
                    return None
                sides[side].append(outcome.step_s)
        default_s, step_s = (statistics.median(values) for values in sides.values())
        spread = max((max(values) - min(values)) / statistics.median(values) for values in sides.values())
        ratio = step_s / default_s
        measured = replace(best.measured, step_s=step_s)
        self.outcome.scores.append(Scored(self._round, best.candidate, self._steps, measured, ratio))
        return Verdict(best.candidate, step_s, default_s, 1 - ratio, spread)

    def _default_run(self, reserve_s: float) -> Measured:
        began = self._clock()
        outcome = self._run(self._default, reserve_s)
        if isinstance(outcome, Failed):
            raise DefaultFailedError(outcome.why)
        stepping = (self._limits.warm_up + self._steps) * outcome.step_s
        self._step_s, self._start_s = outcome.step_s, max(0.0, self._clock() - began - stepping)
        return outcome

    def _run(self, candidate: C, reserve_s: float) -> Measured | Failed:
        if self._time_left() < self._run_s(self._steps) + reserve_s:
            raise _OutOfTimeError
        outcome = self._measure(candidate, self._steps)
        trial = Trial(self._round, candidate, self._steps, outcome)
        self.outcome.trials.append(trial)
        self._report(trial)
        return outcome

    def _next_steps(self) -> int:
        return min(2 * self._steps, self._limits.most_steps)

    def _time_left(self) -> float:
        return self._deadline - self._clock()

    def _run_s(self, steps: int) -> float:
        """What a run takes, by the default's last one; 0 before the first."""
        return self._start_s + (self._limits.warm_up + steps) * self._step_s

    def _round_s(self, count: int, steps: int) -> float:
        return (count + 1 - (-count // _GROUP)) * self._run_s(steps)

    def _duel_s(self) -> float:
        return 2 * self._limits.pairs * self._run_s(self._next_steps()) if self._step_s else 0.0

    def _schedule_s(self, count: int) -> float:
        """Of everything after the default's first run, with ``count`` candidates and some combinations of them."""
        seconds, steps = self._round_s(count, self._steps) - self._run_s(self._steps), self._steps
        left = (count + 1) // 2 + (2 if count > 1 else 0)
        while left > 1:
            steps = min(2 * steps, self._limits.most_steps)
            seconds += self._round_s(left, steps)
            left = (left + 1) // 2
        return seconds + 2 * self._limits.pairs * self._run_s(min(2 * steps, self._limits.most_steps))


def _better_half(scores: Sequence[Scored[C]]) -> list[Scored[C]]:
    return sorted(scores, key=lambda each: each.ratio)[: (len(scores) + 1) // 2]
