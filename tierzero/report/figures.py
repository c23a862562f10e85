"""The figures of every step over all ranks: seconds are means of the ranks, bytes are sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tierzero.records.reading import Line, RunRecord, mean, number
from tierzero.report.halves import Halves, halves_of
from tierzero.runtime.stats import STALL_KINDS, Tries
from tierzero.runtime.timeline import PHASES, STALLED

TIERS = ("device", "host", "nvme")
IN_STEP = tuple(phase for phase in PHASES if phase != "between")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Ahead:
    """What a step did ahead of its time; see the keys of the record. Of an older record there is nothing of it."""

    tried_bytes: float = 0.0
    kept_bytes: float = 0.0
    redone_bytes: float = 0.0
    read_ahead_bytes: float = 0.0
    start_bytes: float = 0.0
    cold_start_s: float = 0.0
    tries: str | None = None
    clip_factor: float | None = None


@dataclass(frozen=True)
class Step:
    """One step. ``phase_s`` adds up to ``step_s``, without the time ``between_s`` since the step before; of a run
    without timeline it has the stalls, and ``computing`` for the rest.
    """

    step: int
    step_s: float
    between_s: float
    phase_s: dict[str, float]
    read_bytes: float
    write_bytes: float
    drive_busy_s: float
    """Seconds in which the drive had reads or writes to do: those of whichever of the two took longer."""
    update_s: float
    comm_bytes: dict[str, float]
    tier_bytes: dict[str, float]
    peak_tier_bytes: dict[str, float]
    loss: float | None = None
    dropped: int = 0
    ahead: Ahead = Ahead()

    @property
    def period_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.step_s + self.between_s


@dataclass(frozen=True)
class Figures:
    """All steps of a run, and what holds for the run."""

    steps: tuple[Step, ...]
    ranks: int
    has_phases: bool
    budgets: dict[str, float]
    overlap: str
    gather_waits: dict[int, float] = field(default_factory=dict)
    """Mean seconds of a step that each rank waits for others."""
    trained_bytes: float = 0.0
    """Of weights and optimizer state that an update changes; 0 where that was not recorded."""
    halves: Halves | None = None
    durable: bool = False
    is_auto: bool = False
    """``overlap`` is what "auto" came to."""

    def settled(self) -> tuple[Step, ...]:
        """Without the first steps, whose order of use is unknown yet and which have no update to make; all of them
        where there are no others.
        """
        return self.steps[2:] or self.steps


def figures_of(run: RunRecord) -> Figures:
    numbers = sorted({step for rank in run.ranks for step in rank.steps})
    has_phases = bool(numbers)
    steps = [_recorded(run, step) for step in numbers] or [_logged(line) for line in run.logged.values()]
    ranks = run.ranks or ()
    budgets = {tier: sum(number(rank.about, "budgets", tier) or 0.0 for rank in ranks) for tier in TIERS}
    waits = {r.rank: mean(_seconds(s, "phase_s", STALLED["gather"]) for s in r.steps.values()) for r in ranks}
    overlap = next((str(rank.about["overlap"]) for rank in ranks if "overlap" in rank.about), "")
    overlap = overlap or _configured(run, "optimizer", "overlap") or ""
    count = len(ranks) or int(number(run.about, "ranks") or 1)
    return Figures(
        tuple(steps),
        count,
        has_phases,
        budgets,
        overlap,
        waits,
        _seconds(run.about, "trained_bytes"),
        halves_of(run),
        _configured(run, "checkpoint", "durable") is True,
        _configured(run, "optimizer", "overlap") == "auto",
    )


def _configured(run: RunRecord, section: str, key: str) -> Any:
    config = run.about.get("config")
    keys = config.get(section) if isinstance(config, dict) else None
    return keys.get(key) if isinstance(keys, dict) else None


def _ahead(lines: Sequence[Line]) -> Ahead:
    def total(key: str) -> float:
        return sum(_seconds(line, key) for line in lines)

    first = lines[0] if lines else {}
    tries = Tries.of_ranks(line.get("tries") if isinstance(line.get("tries"), str) else None for line in lines)
    return Ahead(
        total("tried_bytes"),
        total("kept_bytes"),
        total("redone_bytes"),
        total("read_ahead_bytes"),
        total("start_bytes"),
        mean(_seconds(line, "cold_start_s") for line in lines),
        tries,
        number(first, "clip_factor"),
    )


def _seconds(line: Line, *keys: str) -> float:
    return max(0.0, number(line, *keys) or 0.0)


def _recorded(run: RunRecord, step: int) -> Step:
    lines = [rank.steps[step] for rank in run.ranks if step in rank.steps]

    def average(*keys: str) -> float:
        return mean(_seconds(line, *keys) for line in lines)

    def total(*keys: str) -> float:
        return sum(_seconds(line, *keys) for line in lines)

    return Step(
        step,
        average("step_s"),
        average("began_s"),
        {phase: average("phase_s", phase) for phase in IN_STEP},
        total("nvme_read_bytes"),
        total("nvme_write_bytes"),
        max(average("nvme_read_busy_s"), average("nvme_write_busy_s")),
        average("update_s"),
        {name: total("comm_bytes", name) for name in COLLECTIVES},
        {tier: total("tier_bytes", tier) for tier in TIERS},
        {tier: total("peak_tier_bytes", tier) for tier in TIERS},
        number(run.logged.get(step, {}), "loss"),
        int(total("dropped")),
        _ahead(lines),
    )


def _logged(line: Line) -> Step:
    step_s = _seconds(line, "step_s")
    stalls = {STALLED[kind]: _seconds(line, "stall_s", kind) for kind in STALL_KINDS}
    return Step(
        line["step"],
        step_s,
        0.0,
        {"computing": max(0.0, step_s - sum(stalls.values())), **stalls},
        _seconds(line, "nvme_read_bytes"),
        _seconds(line, "nvme_write_bytes"),
        0.0,
        0.0,
        {name: _seconds(line, "comm_bytes", name) for name in COLLECTIVES},
        {tier: _seconds(line, "tier_bytes", tier) for tier in TIERS},
        {tier: _seconds(line, "peak_tier_bytes", tier) for tier in TIERS},
        number(line, "loss"),
        ahead=_ahead([line]),
    )


@dataclass(frozen=True)
class Typical:
    """A step of the run as it usually is: the median ``period_s`` and bytes, the mean period, and shares of that."""

    period_s: float
    mean_s: float
    shares: dict[str, float]
    read_bytes: float
    write_bytes: float
    cold: float
    """Share of the time in which forwards wait before their first unit can run."""
    busy: float
    """Share of the time that the drive had something to do; 0 where that was not recorded."""
    update: float

    def share(self, *phases: str) -> float:
        return sum(self.shares.get(phase, 0.0) for phase in phases)


def typical(steps: Sequence[Step]) -> Typical:
    period = median(step.period_s for step in steps) or 1e-9
    phases = dict.fromkeys(phase for step in steps for phase in step.phase_s)
    total = sum(step.period_s for step in steps) or 1e-9
    shares = {phase: sum(step.phase_s.get(phase, 0.0) for step in steps) / total for phase in phases}
    shares["between"] = sum(step.between_s for step in steps) / total
    return Typical(
        period,
        total / max(1, len(steps)),
        shares,
        median(step.read_bytes for step in steps),
        median(step.write_bytes for step in steps),
        sum(step.ahead.cold_start_s for step in steps) / total,
        sum(step.drive_busy_s for step in steps) / total,
        sum(step.update_s for step in steps) / total,
    )
