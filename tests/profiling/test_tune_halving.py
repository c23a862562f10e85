"""The search of `tierzero tune` on made-up machines: noise, drift, failures, and a clock that measuring moves on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.profiling.tune.halving import (
    DefaultFailedError,
    Failed,
    Limits,
    Measured,
    Outcome,
    Scored,
    Search,
)

DEFAULT = 0
START_S = 5.0


class Machine:
    """Candidates are numbers; ``factor`` of each is its true step over the default's."""

    def __init__(
        self,
        factors: Sequence[float],
        noise: float = 0.0,
        drift: float = 0.0,
        seed: int = 0,
        failing: Callable[[int, int], bool] = lambda candidate, run: False,
    ) -> None:
        self.factors, self.noise, self.drift, self.failing = [1.0, *factors], noise, drift, failing
        self.now, self.runs = 0.0, 0
        self._random = np.random.default_rng(seed)

    def measure(self, candidate: int, steps: int) -> Measured | Failed:
        self.runs += 1
        if self.failing(candidate, self.runs):
            self.now += START_S
            return Failed("no room")
        level = self.factors[candidate] * (1 + self.drift * self.now / 300)
        step_s = level * float(np.exp(self._random.normal(0, self.noise)))
        self.now += START_S + (2 + steps) * step_s
        return Measured(step_s, 100.0)

    def search(
        self,
        seconds: float = 3600.0,
        combine: Callable[[Sequence[Scored[int]]], Sequence[int]] = lambda scores: (),
        candidates: int | None = None,
    ) -> Outcome[int]:
        count = len(self.factors) if candidates is None else candidates + 1
        search = Search(DEFAULT, range(1, count), self.measure, combine, Limits(seconds), lambda: self.now)
        return search.run()


@pytest.mark.parametrize("drift", [0.0, 0.3, -0.3])
def test_the_truly_best_is_found_under_noise_and_drift(drift: float) -> None:
    found = 0
    for seed in range(40):
        factors = [1.1, 0.97, 1.4, 1.0, 0.8, 1.02, 0.95, 1.2, 0.99, 1.05, 1.0]
        outcome = Machine(factors, noise=0.02, drift=drift, seed=seed).search()
        assert outcome.recommended in (None, 5), "a lesser one was recommended"
        found += outcome.recommended == 5
    assert found >= 36


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.15])
def test_nothing_is_recommended_where_all_are_alike(noise: float) -> None:
    outcomes = [Machine([1.0] * 12, noise, seed=seed).search() for seed in range(200)]
    assert any(outcome.verdict is not None for outcome in outcomes)
    assert sum(outcome.recommended is not None for outcome in outcomes) <= 8


def test_a_gain_too_small_to_be_worth_a_setting_is_none() -> None:
    outcome = Machine([0.995, 1.0]).search()
    assert outcome.verdict is not None
    assert outcome.verdict.gain == pytest.approx(0.005)
    assert outcome.recommended is None


def test_nothing_faster_ends_without_a_duel() -> None:
    outcome = Machine([1.1, 1.2, 1.3]).search()
    assert outcome.verdict is None
    assert outcome.ended is None
    assert {trial.round for trial in outcome.trials} == {0, 1, 2}


@settings(max_examples=60, deadline=None)
@given(
    factors=st.lists(st.floats(0.3, 3.0), min_size=1, max_size=15),
    seconds=st.floats(20, 2000),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 1000),
)
def test_the_default_is_in_every_round_and_the_time_is_kept(
    factors: list[float], seconds: float, noise: float, seed: int
) -> None:
    machine = Machine(factors, noise, seed=seed)
    outcome = machine.search(seconds)
    longest = START_S + 10 * 3 * 2
    assert machine.now <= seconds + longest, "at most one run longer than the time"
    by_round: dict[int, set[int]] = {}
    for trial in outcome.trials:
        by_round.setdefault(trial.round, set()).add(trial.candidate)
    assert all(DEFAULT in candidates for candidates in by_round.values())
    tried = {trial.candidate for trial in outcome.trials} - {DEFAULT}
    assert tried.isdisjoint(outcome.untried)
    assert tried | set(outcome.untried) == set(range(1, len(factors) + 1)) or outcome.ended is not None


def test_the_better_half_gets_twice_the_steps() -> None:
    outcome = Machine([0.9 + 0.02 * number for number in range(8)]).search()
    rounds = {
        number: ({t.candidate for t in outcome.trials if t.round == number}, steps)
        for number, steps in ((1, 2), (2, 4), (3, 8), (4, 8))
    }
    assert [candidates for candidates, _ in rounds.values()] == [
        set(range(9)),
        {0, 1, 2, 3, 4},
        {0, 1, 2},
        {0, 1},
    ]
    assert all(trial.steps == rounds[trial.round][1] for trial in outcome.trials if trial.round)


def test_combinations_of_the_first_round_are_tried_and_can_win() -> None:
    seen: list[dict[int, float]] = []

    def combine(scores: Sequence[Scored[int]]) -> list[int]:
        seen.append({each.candidate: round(each.ratio, 6) for each in scores})
        return [5]

    outcome = Machine([0.9, 0.85, 1.1, 1.2, 0.7]).search(combine=combine, candidates=4)
    assert seen == [{1: 0.9, 2: 0.85, 3: 1.1, 4: 1.2}]
    assert outcome.recommended == 5


def test_a_candidate_that_fails_is_passed_over() -> None:
    outcome = Machine([0.5, 0.9, 1.1], failing=lambda candidate, run: candidate == 1).search()
    assert outcome.recommended == 2
    assert [trial.candidate for trial in outcome.trials if isinstance(trial.outcome, Failed)] == [1]


def test_a_winner_that_fails_in_the_duel_is_not_recommended() -> None:
    outcome = Machine([0.8], failing=lambda candidate, run: candidate == 1 and run > 4).search()
    assert outcome.recommended is None
    assert outcome.ended is not None
    assert "no room" in outcome.ended


def test_a_default_that_does_not_run_is_an_error_at_once_and_an_end_later() -> None:
    with pytest.raises(DefaultFailedError, match="no room"):
        Machine([0.9], failing=lambda candidate, run: candidate == DEFAULT).search()
    outcome = Machine([0.9] * 6, failing=lambda candidate, run: candidate == DEFAULT and run > 2).search()
    assert outcome.ended is not None
    assert len(outcome.trials) == 7


def test_too_little_time_says_what_is_needed() -> None:
    outcome = Machine([0.5] * 10).search(seconds=60.0)
    assert outcome.ended is not None
    assert len(outcome.untried) == 10
    machine = Machine([0.5] * 10)
    whole = machine.search()
    assert whole.untried == []
    assert outcome.needed_s == pytest.approx(machine.now, rel=0.5)


def test_what_is_known_survives_an_interruption() -> None:
    class Interrupted(BaseException):
        pass

    machine = Machine([0.9, 0.8])

    def measure(candidate: int, steps: int) -> Measured | Failed:
        if machine.runs == 3:
            raise Interrupted
        return machine.measure(candidate, steps)

    search = Search(DEFAULT, [1, 2], measure, lambda scores: (), Limits(1e6), lambda: machine.now)
    with pytest.raises(Interrupted):
        search.run()
    assert [trial.candidate for trial in search.outcome.trials] == [0, 0, 1]
