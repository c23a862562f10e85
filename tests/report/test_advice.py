"""Each rule of the words: the figures that it speaks up at, and those a little below them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierzero.planner.machine import Drive, MachineProfile, bundled_profile
from tierzero.records.reading import RankRecord, RunRecord
from tierzero.report.advice import RULES, Facts, findings
from tierzero.report.figures import Ahead, Figures, Step, typical
from tierzero.report.halves import Halves, halves_of
from tierzero.runtime.spans import SPAN, Kind

MIB = 2**20
COMPUTE = {"forward": 0.3, "backward": 0.6}


def step(number: int, phases: dict[str, float], between: float = 0.0, **more: Any) -> Step:
    figures = {
        "read_bytes": 100.0 * MIB,
        "write_bytes": 100.0 * MIB,
        "drive_busy_s": 0.3,
        "update_s": 0.1,
        "comm_bytes": {},
        "tier_bytes": {},
        "peak_tier_bytes": {},
    }
    return Step(number, sum(phases.values()), between, phases, **(figures | more))


def run(phases: dict[str, float], between: float = 0.0, steps: int = 5, **more: Any) -> Figures:
    """A run whose every step takes a second: what ``phases`` leave of it is forward and backward."""
    left = 1.0 - between - sum(phases.values())
    filled = {"forward": left / 3, "backward": 2 * left / 3, **phases}
    made = tuple(step(number, filled, between, **more) for number in range(1, steps + 1))
    return Figures(made, 1, True, {"host": 1e9}, "forward")


def profile(read: float, write: float, mixed: float) -> MachineProfile:
    drive = Drive(name="a drive", read=read, write=write, mixed=mixed)
    return bundled_profile("h100-node").model_copy(update={"drives": (drive,), "striped": None})


def rules(figures: Figures, machine: MachineProfile | None = None) -> list[str]:
    return [finding.rule for finding in findings(figures, machine)]


def texts(figures: Figures, machine: MachineProfile | None = None) -> str:
    return "\n".join(finding.text for finding in findings(figures, machine))


def test_a_run_that_only_computes_is_bound_by_that_alone() -> None:
    assert rules(run({})) == ["computing"]
    assert "that is the bound" in texts(run({}))
    assert rules(run({"stall_nvme_read": 0.04, "other": 0.04})) == ["computing"]


@pytest.mark.parametrize(
    ("phases", "between", "rule", "key"),
    [
        ({"stall_nvme_read": 0.62}, 0.0, "staging", "tiers.host"),
        ({"stall_host_budget": 0.06}, 0.0, "host budget", "Raise tiers.host (it came to 1.00 GB)"),
        ({"stall_nvme_write": 0.06}, 0.0, "writing", "placement.gradients"),
        ({"stall_gather": 0.06}, 0.0, "collectives", "sharding.min_unit"),
        ({"stall_optimizer": 0.06}, 0.0, "waiting update", "tz.gathered"),
        ({"recompute": 0.11}, 0.0, "recompute", 'activations.recompute = "none"'),
        ({"optimizer_step": 0.06}, 0.0, "step call", "clip_grad_norm_"),
        ({"other": 0.06}, 0.0, "outside", "no forward or backward"),
        ({}, 0.06, "between", "checkpoint.async"),
    ],
)
def test_each_cause_is_named_with_its_share_and_what_to_do(
    phases: dict[str, float], between: float, rule: str, key: str
) -> None:
    share = next(iter(phases.values()), between)
    found = {finding.rule: finding for finding in findings(run(phases, between))}
    assert rule in found
    assert found[rule].share == pytest.approx(share)
    assert f"{100 * share:.0f} %" in found[rule].text
    assert key in found[rule].text
    small = dict.fromkeys(phases, 0.049)
    assert rule not in rules(run(small, min(between, 0.049)))


def test_the_largest_cause_comes_first() -> None:
    found = rules(run({"stall_nvme_read": 0.5, "stall_gather": 0.3, "other": 0.1}))
    assert found == ["staging", "collectives", "outside"]


def test_waiting_for_page_in_depends_on_what_the_drive_does() -> None:
    waiting = {"stall_nvme_read": 0.4}
    assert "staging" in rules(run(waiting, drive_busy_s=0.79))
    assert "drive" in rules(run(waiting, drive_busy_s=0.81))
    assert "update" in rules(run(waiting, read_bytes=0.0))
    # 100 MiB read and 100 MiB written in each second, against what the profile says.
    fast, slow = profile(1e9, 1e9, 1000.0 * MIB), profile(1e9, 1e9, 220.0 * MIB)
    assert "staging" in rules(run(waiting, drive_busy_s=0.9), fast)
    assert "20 % of what the profile says" in texts(run(waiting), fast)
    assert "drive" in rules(run(waiting, drive_busy_s=0.1), slow)
    assert "91 % of what the profile says" in texts(run(waiting), slow)


def test_bytes_beyond_the_mixture_count_at_their_own_rate() -> None:
    figures = run({"stall_nvme_read": 0.4}, read_bytes=300.0 * MIB)
    facts = Facts(figures, typical(figures.settled()), profile(400.0 * MIB, 9e9, 1000.0 * MIB))
    assert facts.drive_use == pytest.approx(200 / 1000 + 200 / 400)


def test_a_rank_that_the_others_wait_for_is_named() -> None:
    figures = run({"stall_gather": 0.3})
    uneven = replace(figures, ranks=3, gather_waits={0: 0.5, 1: 0.1, 2: 0.5})
    assert "slow rank" in rules(uneven)
    assert "Rank 1 waits least" in texts(uneven)
    assert "collectives" in rules(replace(uneven, gather_waits={0: 0.5, 1: 0.3, 2: 0.5}))


def test_without_overlap_the_advice_is_overlap() -> None:
    figures = run({"stall_optimizer": 0.3})
    assert 'optimizer.overlap = "forward"' in texts(replace(figures, overlap="none"))
    assert 'optimizer.overlap = "forward"' not in texts(figures)


def test_the_other_half_is_advised_where_the_drive_idles_in_the_backward_and_forwards_wait() -> None:
    def advised(use: float = 0.2, waits: float = 0.2, clips: int = 0, **more: Any) -> str:
        steps = [
            replace(one, ahead=Ahead(clip_factor=0.5 if number < clips else 1.0))
            for number, one in enumerate(run({"stall_nvme_read": 0.3}, steps=10).steps)
        ]
        figures = replace(run({"stall_nvme_read": 0.3}), steps=tuple(steps), halves=Halves(use, waits), **more)
        return next((one.text for one in findings(figures) if one.rule == "other half"), "")

    assert 'the drive has requests in 20 % of the backward only. optimizer.overlap = "both"' in advised()
    assert "clipping acted in 3 of 10 steps" in advised(clips=3)
    assert '"auto" found too little free there' in advised(is_auto=True)
    assert "no more space" in advised(durable=True)
    refused = [{"use": 0.6}, {"waits": 0.04}, {"clips": 6}, {"overlap": "both"}]
    assert [advised(**more) for more in refused] == [""] * 4


def test_a_cold_start_names_the_bytes_that_staging_lacks() -> None:
    def told(cold: float, read: float, waits: float = 0.3) -> str:
        ahead = Ahead(cold_start_s=cold, start_bytes=5e9, read_ahead_bytes=read)
        figures = run({"stall_nvme_read": waits}, ahead=ahead)
        return next((one.text for one in findings(figures) if one.rule == "cold start"), "")

    assert "about 4.00 GB more of tiers.host (staging)" in told(0.2, 1e9)
    assert "room is not what is missing" in told(0.2, 5e9)
    assert told(0.04, 1e9, 0.05) == ""
    assert told(0.1, 1e9) == "", "most of the waiting is elsewhere"


def spans(*pieces: tuple[float, float, Kind, int]) -> Any:
    return np.array([(start, end, 1, unit, -1, 0, kind) for start, end, kind, unit in pieces], SPAN)


def test_the_halves_of_a_step_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward from 4 to 8, with requests from 5 to 7; waits of 1 second before it and half a second in it."""
    recorded = spans(
        (4, 8, Kind.BACKWARD, -1),
        (4, 5, Kind.BACKWARD, 1),
        (3, 4, Kind.PAGE_IN, 1),
        (5, 6.5, Kind.PAGE_OUT, 1),
        (6, 7, Kind.READ_AHEAD, 1),
        (1, 2, Kind.STALL_NVME_READ, 1),
        (5, 5.5, Kind.STALL_HOST_BUDGET, 1),
    )
    rank = RankRecord(0, {}, {3: {"end_s": 10.0}}, (3,))
    monkeypatch.setattr(RunRecord, "spans", lambda *_: recorded)
    assert halves_of(RunRecord(Path(), {}, {}, (rank,))) == Halves(0.5, 0.1)
    assert halves_of(RunRecord(Path(), {}, {}, (replace(rank, kept=(2,)),))) is None


def test_uneven_steps_are_noticed_and_the_first_two_do_not_count() -> None:
    even, slow = step(1, COMPUTE), step(2, {name: 3 * seconds for name, seconds in COMPUTE.items()})
    figures = run({})
    start = replace(figures, steps=(slow, slow, *[even] * 20))
    assert rules(start) == ["computing"]
    assert "uneven" in rules(replace(figures, steps=(even, even, *[even] * 16, *[slow] * 4)))


def test_every_rule_copes_with_a_single_empty_step() -> None:
    figures = Figures((step(1, {}),), 1, False, {}, "")
    facts = Facts(figures, typical(figures.settled()))
    assert [rule(facts) for rule in RULES] == [None] * len(RULES)
