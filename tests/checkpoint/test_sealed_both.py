"""``optimizer.overlap = "both"`` on durable tiers: what is tried in the backward costs no sealed step, and no bit."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..support.crash_images import Life, Moments, Plan, live
from ..support.oracle import Outcome, assert_bits

QUIETLY = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def wanted_of(root: Path, plan: Plan) -> Outcome:
    """Of the run that is neither killed nor sealed, and tries nothing."""
    return live(root / "none", "none", plan, seals=False).outcome


def assert_goes_on(image: Path, plan: Plan, wanted: Outcome, least: int, rank: int = 0) -> Life:
    """From ``least`` or a later step, bit for bit."""
    life = live(image, "both", plan, rank)
    assert least <= life.first
    life.outcome.losses = wanted.losses[: life.first] + life.outcome.losses
    assert_bits(life.outcome, wanted)
    return life


PLANS = {
    "all of it": (Plan(8, clips=(3,), spoiled=(6,), skips=(4,)), True, True),
    "not sealed": (Plan(5, unsealed=(2, 3)), True, False),
    "accumulated": (Plan(4, backwards=2), True, False),
    "in a hurry": (Plan(4, patient=False), None, False),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_bit_changes(name: str, tmp_path: Path) -> None:
    plan, some_kept, some_lost = PLANS[name]
    life = live(tmp_path / "both", "both", plan)
    assert_bits(life.outcome, wanted_of(tmp_path, plan))
    assert some_kept is None or (life.kept > 0) == some_kept
    assert (life.lost > 0) == some_lost


KILLED = {
    "before the step that would keep it": ("write_spare", 8),
    "while tiles change slots": ("adopt_spare", 8),
    "after the next seal was recorded": ("write_record", 4),
    "after the record before was removed": ("remove_records", 4),
    "after the seal": ("seal", 3),
}


@pytest.mark.parametrize("slow", [pytest.param("page_in", marks=pytest.mark.long), "sync"])
def test_named_moments(slow: str, tmp_path: Path) -> None:
    """Sealed beside a backward in which updates, or the seal itself, take long: what was lost in step 2 is updated
    beside the backward of step 3, which does not use it.
    """
    plan = Plan(steps=5, slow=slow)
    if slow == "page_in":
        plan = dataclasses.replace(plan, clips=(2,), skips=(3,), prefetch=0)
    wanted = wanted_of(tmp_path, plan)
    moments = Moments(tmp_path / "both", list(KILLED.values()))
    with moments.watched():
        live(tmp_path / "both", "both", plan)
    assert len(moments.images) == len(KILLED)
    for image, sealed in moments.images:
        assert_goes_on(image, plan, wanted, sealed_step(plan, 0, sealed))


def some(steps: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(1, steps - 1), max_size=2)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    steps = draw(st.integers(4, 7))
    clips, spoiled, skips, unsealed = (draw(some(steps)) for _ in range(4))
    slow = draw(st.sampled_from(["", "page_in", "sync"]))
    return Plan(
        steps,
        clips,
        spoiled,
        skips,
        draw(st.integers(1, 2)),
        unsealed,
        draw(st.booleans()),
        draw(st.integers(0, 1)),
        slow,
    )


MOMENTS = st.sets(st.integers(3, 90), min_size=2, max_size=3)


def check(plan: Plan, chosen: set[int]) -> None:
    """Killed at each of some moments, and at one more of the run that goes on from the first."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wanted = wanted_of(root, plan)
        moments = Moments(root / "both", chosen)
        with moments.watched():
            assert_bits(live(root / "both", "both", plan).outcome, wanted)
        for image, sealed in moments.images:
            again = Moments(image, chosen)
            with again.watched():
                life = assert_goes_on(image, plan, wanted, sealed_step(plan, 0, sealed))
            for second, more in again.images[:1]:
                assert_goes_on(second, plan, wanted, sealed_step(plan, life.first, more))


def sealed_step(plan: Plan, first: int, seals: int) -> int:
    """The step after which a life that began with ``first`` completed so many seals."""
    return ([first] + [step + 1 for step in range(first, plan.steps) if step not in plan.unsealed])[seals]


@settings(max_examples=1, **QUIETLY)
@given(plan=plans(), chosen=MOMENTS)
def test_killed_at_some_moments(plan: Plan, chosen: set[int]) -> None:
    check(plan, chosen)


@pytest.mark.long
@settings(max_examples=200, **QUIETLY)
@given(plan=plans(), chosen=MOMENTS)
def test_killed_at_many_moments(plan: Plan, chosen: set[int]) -> None:
    check(plan, chosen)
