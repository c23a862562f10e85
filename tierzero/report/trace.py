"""The recorded steps as a Chrome trace, for Perfetto and chrome://tracing: a process per rank, a thread per lane."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierzero.errors import ConfigError
from tierzero.records.reading import RankRecord, RunRecord, number
from tierzero.report.lanes import LANES, Span, in_rows, spans_of

_ROWS = 1000
"""Thread numbers of a lane: more than it can have rows."""
_SAME_MOMENT = 10_000
"""Nanoseconds. Clocks of the day are kept less exactly than times within a step."""


def write_trace(run: RunRecord, steps: Sequence[int], path: Path) -> int:
    """Writes these steps of all ranks; returns the number of spans. Raises ConfigError where it cannot be written."""
    starts = [start for rank in run.ranks for step in steps if (start := _start(rank, step)) is not None]
    zero = min(starts, default=0.0)
    shown = {rank: in_rows(_all_spans(run, rank, steps, zero)) for rank in run.ranks}
    first = min((span.start for spans in shown.values() for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, spans in shown.items():
        events.extend(_names(rank, spans))
        events.extend(_event(rank.rank, span, first) for span in spans)
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file, allow_nan=False)
    except OSError as error:
        raise ConfigError(f"report: cannot write {path}: {error.strerror or error}") from None
    return sum(map(len, shown.values()))


def _start(rank: RankRecord, step: int) -> float | None:
    return number(rank.steps.get(step, {}), "start") if step in rank.kept else None


def _all_spans(run: RunRecord, rank: RankRecord, steps: Sequence[int], zero: float) -> Iterator[Span]:
    """Of all steps, at their places in time: a step begins exactly where the one before has ended."""
    ended = 0
    for step in sorted(steps):
        start = _start(rank, step)
        if start is None:
            continue
        offset = round((start - zero) * 1e9)
        if offset < ended + _SAME_MOMENT:
            offset = ended
        yield from spans_of(rank, step, run.spans(rank, step), offset)
        ended = offset + round(1e9 * (number(rank.steps[step], "end_s") or 0.0))


def _thread(span: Span) -> int:
    return LANES.index(span.lane) * _ROWS + span.row


def _event(rank: int, span: Span, first: int) -> dict[str, Any]:
    about: dict[str, Any] = {"step": span.step}
    if span.unit:
        about["unit"] = span.unit
    if span.tile >= 0:
        about["tile"] = span.tile
    if span.nbytes:
        about["bytes"] = span.nbytes
    return {
        "name": span.name,
        "cat": span.lane,
        "ph": "X",
        "ts": (span.start - first) / 1000,
        "dur": (span.end - span.start) / 1000,
        "pid": rank,
        "tid": _thread(span),
        "args": about,
    }


def _names(rank: RankRecord, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    machine = rank.about.get("machine")
    title = f"rank {rank.rank}" + (f" ({machine})" if machine else "")
    named = {_thread(span): span.lane if span.row == 0 else f"{span.lane} {span.row + 1}" for span in spans}
    entries: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": title}),
        ("process_sort_index", 0, {"sort_index": rank.rank}),
    ]
    for thread, name in sorted(named.items()):
        entries += [("thread_name", thread, {"name": name}), ("thread_sort_index", thread, {"sort_index": thread})]
    for name, thread, what in entries:
        yield {"name": name, "ph": "M", "pid": rank.rank, "tid": thread, "args": what}
