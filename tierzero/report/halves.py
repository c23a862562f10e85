"""The two halves of a step, from its spans: how busy the drive is in the backward, and how long forwards wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierzero.records.reading import RunRecord, number
from tierzero.runtime.spans import Kind

_STEPS = 5
"""The newest, which stand for the others."""
_DRIVE = (Kind.PAGE_IN, Kind.READ_AHEAD, Kind.PAGE_OUT)
_WAITS = (Kind.STALL_NVME_READ, Kind.STALL_HOST_BUDGET)
Piece = tuple[float, float]


@dataclass(frozen=True)
class Halves:
    """``backward_use``: the share of the backwards in which the drive had requests; ``forward_waits``: the share of the
    whole time that is waiting for page-in outside of a backward.
    """

    backward_use: float
    forward_waits: float


def halves_of(run: RunRecord) -> Halves | None:
    """Of the newest steps with spans, the first two left out; None where there are none, or no backward in them."""
    backward = used = waited = whole = 0.0
    for step in [step for step in run.kept() if step > 2][-_STEPS:]:
        for rank in run.ranks:
            spans = run.spans(rank, step)
            inside = _joined(_pieces(spans[spans["unit"] < 0], (Kind.BACKWARD,)))
            backward += _length(inside)
            used += _length(_common(inside, _joined(_pieces(spans, _DRIVE))))
            waits = _joined(_pieces(spans, _WAITS))
            waited += _length(waits) - _length(_common(inside, waits))
            whole += number(rank.steps.get(step, {}), "end_s") or 0.0
    return Halves(used / backward, waited / whole) if backward > 0 and whole > 0 else None


def _pieces(spans: npt.NDArray[Any], kinds: Sequence[Kind]) -> list[Piece]:
    chosen = spans[np.isin(spans["kind"], [int(kind) for kind in kinds])]
    return list(zip(chosen["start"].tolist(), chosen["end"].tolist(), strict=True))


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same time, in pieces that do not overlap, in order."""
    found: list[Piece] = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _common(some: Sequence[Piece], others: Sequence[Piece]) -> list[Piece]:
    """What lies in both, each of which is joined."""
    both = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(start, end) for start, end in both if start < end]


def _length(pieces: Iterable[Piece]) -> float:
    return sum(end - start for start, end in pieces)
