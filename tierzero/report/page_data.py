"""What the page's script draws: charts over the steps, and the timelines of some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tierzero.planner.machine import MachineProfile
from tierzero.records.reading import RankRecord, RunRecord, number
from tierzero.report.figures import COLLECTIVES, TIERS, Figures, Step
from tierzero.report.lanes import LANES, Span, in_rows, spans_of
from tierzero.runtime.timeline import STALLED

MOST_SPANS = 60_000
"""On one page, about 3 MB of it; of further steps the trace has the spans."""

SHOWN = {
    "computing": ("computing", "forward"),
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "recompute": ("recomputed forward", "recompute"),
    "optimizer_step": ("clip and optimizer.step", "optimizer-step"),
    STALLED["nvme_read"]: ("waits for page-in", "nvme-read"),
    STALLED["host_budget"]: ("waits for host memory", "host-budget"),
    STALLED["nvme_write"]: ("waits for writing", "nvme-write"),
    STALLED["gather"]: ("waits for other ranks", "gather"),
    STALLED["optimizer"]: ("waits for updates", "optimizer"),
    "other": ("outside the model", "outside"),
    "between": ("between steps", "between"),
}
"""Phases in the order of the stack: what they are called, and their colour in the style sheet."""

_COLOR_OF = {
    "step": "between",
    "stall_nvme_read": "nvme-read",
    "stall_nvme_write": "nvme-write",
    "stall_gather": "gather",
    "stall_optimizer": "optimizer",
    "stall_host_budget": "host-budget",
    "all_gather": "gather",
    "reduce_scatter": "gather",
    "all_reduce": "gather",
    "gradient_norm": "optimizer-step",
    "optimizer_step": "optimizer-step",
    "page_in": "page-in",
    "read_ahead": "page-in-ahead",
    "page_out": "page-out",
    "seal": "checkpoint",
    "tried": "tried",
    "kept": "kept",
    "lost": "lost",
}
LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("recompute", "recomputed forward"),
    ("optimizer-step", "clip, optimizer.step"),
    ("outside", "outside the model"),
    ("between", "between steps"),
    ("nvme-read", "waits for page-in"),
    ("page-in", "page-in"),
    ("page-in-ahead", "page-in ahead"),
    ("page-out", "page-out"),
    ("update", "update"),
    ("gradients", "gradients"),
    ("gather", "gathers and reductions"),
    ("tried", "update on trial"),
    ("kept", "trial kept"),
    ("lost", "trial lost"),
)
HINTS = {
    "page-in-ahead": "state of the next forward, read in this backward",
    "tried": "made in the backward, beside what is current: the step decides whether it counts",
    "kept": "the step fixed the same update: what was written ahead became current, nothing is moved",
    "lost": "the step fixed another update: the next forward makes it, from what was current all the time",
}
"""What a span of a colour means, for whoever points at it."""
UNMOVED = ("kept", "lost")
"""Spans that have bytes and move none of them."""


def page_data(run: RunRecord, figures: Figures, profile: MachineProfile | None, step: int | None) -> dict[str, Any]:
    """``step``: the timeline to show first; None is the newest."""
    timelines, left_out = _timelines(run, step)
    if left_out:
        run.note(f"this page has no room for the timelines of {left_out} more steps: --step N shows one, --trace all")
    wanted = [at for at, one in enumerate(timelines) if step is None or one["step"] == step]
    newest = max((timelines[at]["step"] for at in wanted), default=0)
    return {
        "steps": [one.step for one in figures.steps],
        "charts": _charts(figures, profile),
        "timelines": timelines,
        "chosen": next((at for at in wanted if timelines[at]["step"] == newest), 0),
        "legend": _legend(timelines),
        "hints": HINTS,
        "unmoved": UNMOVED,
    }


def _legend(timelines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Trials only where there are some: few runs have them."""
    found = {kind for one in timelines for kind in one["kinds"]}
    return [(kind, label) for kind, label in LEGEND if kind in found or kind not in ("tried", "kept", "lost")]


def _charts(figures: Figures, profile: MachineProfile | None) -> dict[str, Any]:
    charts = {"times": _times(figures), "tiers": _tiers(figures)}
    if any(step.loss is not None for step in figures.steps):
        loss = [_series("loss", "forward", [step.loss for step in figures.steps])]
        charts["loss"] = {"title": "Loss by step", "format": "plain", "tight": True, "series": loss}
    if any(step.read_bytes or step.write_bytes for step in figures.steps):
        charts["drive"] = _drive(figures, profile)
    if any(any(step.comm_bytes.values()) for step in figures.steps):
        charts["comm"] = _comm(figures)
    if any(step.ahead.tried_bytes for step in figures.steps):
        charts["ahead"] = _ahead(figures)
    return charts


def _series(label: str, color: str, values: Sequence[float | None]) -> dict[str, Any]:
    return {"label": label, "color": color, "values": [None if v is None else float(f"{v:.6g}") for v in values]}


def _over(figures: Figures, value: Callable[[Step], float]) -> list[float]:
    return [value(step) for step in figures.steps]


def _times(figures: Figures) -> dict[str, Any]:
    series = []
    for phase, (label, color) in SHOWN.items():
        values = [step.between_s if phase == "between" else step.phase_s.get(phase, 0.0) for step in figures.steps]
        if any(value >= 1e-4 * step.period_s for value, step in zip(values, figures.steps, strict=True)):
            series.append(_series(label, color, values))
    return {"title": "Time by step", "format": "seconds", "stacked": True, "height": 260, "series": series}


def _tiers(figures: Figures) -> dict[str, Any]:
    colors = {"device": "forward", "host": "update", "nvme": "page-in"}
    series, limits = [], []
    for tier in TIERS:
        peaks = [step.peak_tier_bytes.get(tier, 0.0) for step in figures.steps]
        if any(peaks):
            series.append(_series(f"{tier}, most so far", colors[tier], peaks))
            if tier != "nvme" and figures.budgets.get(tier):
                limits.append({"label": f"{tier} as planned", "value": figures.budgets[tier], "color": colors[tier]})
    return {"title": "Bytes in each tier by step", "format": "bytes", "series": series, "limits": limits}


def _drive(figures: Figures, profile: MachineProfile | None) -> dict[str, Any]:
    series = [
        _series("read", "forward", _over(figures, lambda step: step.read_bytes / (step.period_s or 1.0))),
        _series("written", "nvme-read", _over(figures, lambda step: step.write_bytes / (step.period_s or 1.0))),
    ]
    drive = profile.all_drives() if profile is not None else None
    limits = []
    if drive is not None:
        limits = [
            {"label": "the drive reading", "value": drive.read, "color": "forward"},
            {"label": "writing", "value": drive.write, "color": "nvme-read"},
            {"label": "both at once, together", "value": drive.mixed, "color": "soft"},
        ]
    return {"title": "Bytes per second to and from the drive", "format": "rate", "series": series, "limits": limits}


def _ahead(figures: Figures) -> dict[str, Any]:
    series = [
        _series("tried", "tried", _over(figures, lambda step: step.ahead.tried_bytes)),
        _series("kept", "kept", _over(figures, lambda step: step.ahead.kept_bytes)),
        _series("lost", "lost", _over(figures, lambda step: step.ahead.redone_bytes)),
    ]
    return {"title": "Bytes of state updated ahead by step", "format": "bytes", "series": series}


def _comm(figures: Figures) -> dict[str, Any]:
    colors = dict(zip(COLLECTIVES, ("forward", "gather", "gradients"), strict=True))
    series = []
    for name in COLLECTIVES:
        values = [step.comm_bytes.get(name, 0.0) for step in figures.steps]
        if any(values):
            series.append(_series(name.replace("_", "-"), colors[name], values))
    return {"title": "Bytes in collectives by step", "format": "bytes", "series": series}


def _timelines(run: RunRecord, wanted: int | None) -> tuple[list[dict[str, Any]], int]:
    """As many as fit, the wanted step and then the newest first, in the order of the steps; and how many do not."""
    order = sorted(run.kept(), key=lambda step: (step != wanted, -step))
    found: list[dict[str, Any]] = []
    room = MOST_SPANS
    for taken, step in enumerate(order):
        here = []
        for rank in run.ranks:
            if step in rank.kept:
                recorded = run.spans(rank, step)
                room -= len(recorded)
                here.append((rank, in_rows(spans_of(rank, step, recorded))))
        if room < 0 and found:
            return sorted(found, key=lambda one: one["step"]), len(order) - taken
        found += [_timeline(rank, step, spans, len(run.ranks) > 1) for rank, spans in here]
    return sorted(found, key=lambda one: one["step"]), 0


def _timeline(rank: RankRecord, step: int, spans: Sequence[Span], several: bool) -> dict[str, Any]:
    rows = _rows(spans)
    lanes = [lane for lane in LANES if lane in rows]
    names = {name: at for at, name in enumerate(dict.fromkeys(span.name for span in spans))}
    kinds = {name: at for at, name in enumerate(dict.fromkeys(_color(span) for span in spans))}
    depths = _depths([span for span in spans if span.lane == "compute"])
    packed = [
        [
            lanes.index(span.lane),
            depths.get(id(span), span.row),
            kinds[_color(span)],
            names[span.name],
            round(span.start / 1000, 1),
            round((span.end - span.start) / 1000, 1),
            span.nbytes,
        ]
        for span in spans
    ]
    rows["compute"] = max(depths.values(), default=0) + 1
    line = rank.steps.get(step, {})
    title = f"step {step}, rank {rank.rank}" if several else f"step {step}"
    dropped = int(number(line, "dropped") or 0)
    return {
        "step": step,
        "title": f"{title} ({dropped} spans not recorded)" if dropped else title,
        "end": max(1e6 * (number(line, "end_s") or 0.0), max((row[4] + row[5] for row in packed), default=1.0)),
        "lanes": [{"name": lane, "rows": rows[lane]} for lane in lanes],
        "kinds": list(kinds),
        "names": list(names),
        "spans": packed,
    }


def _color(span: Span) -> str:
    return _COLOR_OF.get(span.kind, span.kind)


def _rows(spans: Sequence[Span]) -> dict[str, int]:
    found: dict[str, int] = {}
    for span in spans:
        found[span.lane] = max(found.get(span.lane, 0), span.row + 1)
    return found


def _depths(spans: Sequence[Span]) -> dict[int, int]:
    """How many spans each lies in, by identity; they come in order, outer ones first."""
    found: dict[int, int] = {}
    around: list[Span] = []
    for span in spans:
        while around and around[-1].end <= span.start:
            around.pop()
        found[id(span)] = len(around)
        around.append(span)
    return found
