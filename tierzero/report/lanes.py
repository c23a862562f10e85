"""The spans of a step in lanes: one kind of work in each, no two of which overlap unless one lies in the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from tierzero.records.reading import Line, RankRecord, number
from tierzero.runtime.spans import Kind

LANES = ("step", "compute", "stall", "gather", "gradients", "page-in", "page-out", "update", "on trial")
"""In the order in which they are shown. Of a lane with work that overlaps there are several, numbered."""

_LANE_OF = {
    Kind.FORWARD: "compute",
    Kind.BACKWARD: "compute",
    Kind.RECOMPUTE: "compute",
    Kind.OPTIMIZER_STEP: "compute",
    Kind.GRADIENT_NORM: "compute",
    Kind.CHECKPOINT: "compute",
    Kind.SEAL: "compute",
    Kind.STALL_NVME_READ: "stall",
    Kind.STALL_NVME_WRITE: "stall",
    Kind.STALL_GATHER: "stall",
    Kind.STALL_OPTIMIZER: "stall",
    Kind.STALL_HOST_BUDGET: "stall",
    Kind.ALL_GATHER: "gather",
    Kind.REDUCE_SCATTER: "gather",
    Kind.ALL_REDUCE: "gather",
    Kind.PAGE_IN: "page-in",
    Kind.READ_AHEAD: "page-in",
    Kind.PAGE_OUT: "page-out",
    Kind.GRADIENTS: "gradients",
    Kind.UPDATE: "update",
    Kind.TRIED: "on trial",
    Kind.KEPT: "on trial",
    Kind.LOST: "on trial",
}
_TITLES = {
    Kind.OPTIMIZER_STEP: "optimizer.step",
    Kind.GRADIENT_NORM: "gradient norm",
    Kind.STALL_NVME_READ: "waits for page-in",
    Kind.STALL_NVME_WRITE: "waits for writing",
    Kind.STALL_GATHER: "waits for other ranks",
    Kind.STALL_OPTIMIZER: "waits for updates",
    Kind.STALL_HOST_BUDGET: "waits for host memory",
    Kind.ALL_GATHER: "all-gather",
    Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.PAGE_IN: "page-in",
    Kind.READ_AHEAD: "page-in ahead",
    Kind.PAGE_OUT: "page-out",
    Kind.GRADIENTS: "gradients home",
    Kind.TRIED: "update on trial",
    Kind.KEPT: "trial kept",
    Kind.LOST: "trial lost",
}


@dataclass(frozen=True)
class Span:
    """A span as it is shown: whole nanoseconds from the end of the step before (work that began earlier is negative).
    ``kind`` is the name of its `Kind`, or of what is known by exclusion: "step", "outside", "between".
    """

    lane: str
    row: int
    """Of a lane whose work overlaps."""
    kind: str
    name: str
    start: int
    end: int
    nbytes: int
    unit: str = ""
    tile: int = -1
    step: int = 0


def spans_of(rank: RankRecord, step: int, recorded: npt.NDArray[Any], offset: int = 0) -> list[Span]:
    """The step's spans, ``offset`` nanoseconds later than recorded, without rows (`in_rows`)."""
    known = [span for values in recorded.tolist() if (span := _shown(rank, values)) is not None]
    around = _around(step, rank.steps.get(step, {}), [span for span in known if span.lane == "compute"])
    return [replace(span, start=span.start + offset, end=span.end + offset, step=step) for span in (*known, *around)]


def _shown(rank: RankRecord, values: tuple[float, float, int, int, int, int, int]) -> Span | None:
    start, end, nbytes, unit, tile, group, number_of_kind = values
    try:
        kind = Kind(number_of_kind)
    except ValueError:
        return None
    where = rank.unit_name(unit)
    name = _TITLES.get(kind, kind.name.lower())
    if kind in (Kind.FORWARD, Kind.BACKWARD) and unit < 0:
        name += " of the model"
    if where:
        name += f" {where}"
    if group:
        name += f" group {group}"
    if tile >= 0:
        name += f" tile {tile}"
    return Span(_LANE_OF[kind], 0, kind.name.lower(), name, round(start * 1e9), round(end * 1e9), nbytes, where, tile)


def _around(step: int, line: Line, compute: list[Span]) -> list[Span]:
    """What is known by exclusion: the step itself, the time before it, and what of it was outside of the model."""
    began, end = (round(1e9 * (number(line, key) or 0.0)) for key in ("began_s", "end_s"))
    if not end:
        return []
    found = [Span("step", 0, "step", f"step {step}", began, end, 0)]
    at = began
    for span in sorted((span for span in compute if span.end > began), key=lambda span: (span.start, -span.end)):
        if at < span.start <= end:
            found.append(Span("compute", 0, "outside", "outside the model", at, span.start, 0))
        at = max(at, span.end)
    if at < end:
        found.append(Span("compute", 0, "outside", "outside the model", at, end, 0))
    if began > 0:
        found.append(Span("compute", 0, "between", "between steps", 0, began, 0))
    return found


def in_rows(spans: Iterable[Span]) -> list[Span]:
    """Each span in the first row of its lane that is free; those of one thread, which nest, all in the first. By lane,
    row and start.
    """
    found: list[Span] = []
    by_lane: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for span in spans:
        by_lane[span.lane].append(span)
    for lane, members in by_lane.items():
        ends: list[int] = []
        for span in sorted(members, key=_outer_first):
            row = 0
            if lane not in ("step", "compute"):
                row = next((row for row, end in enumerate(ends) if end <= span.start), len(ends))
                ends[row : row + 1] = [span.end]
            found.append(replace(span, row=row))
    return sorted(found, key=lambda span: (LANES.index(span.lane), span.row, *_outer_first(span)))


def _outer_first(span: Span) -> tuple[int, int]:
    return span.start, -span.end
