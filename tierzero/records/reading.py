"""Reads the record of a run as far as it is there: of one that was killed, or still runs, the end is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierzero.errors import ConfigError
from tierzero.records import files
from tierzero.runtime.spans import SPAN

Line = dict[str, Any]


@dataclass(frozen=True, eq=False)
class RankRecord:
    """One rank's part. ``steps`` by their number; ``kept`` are the steps that there are spans of."""

    rank: int
    about: Line
    steps: dict[int, Line]
    kept: tuple[int, ...]

    def unit_name(self, unit: int) -> str:
        """As the model names it; empty for no unit."""
        names = self.about.get("units")
        if unit < 0:
            return ""
        return str(names[unit]) if isinstance(names, list) and unit < len(names) else f"unit {unit}"


@dataclass(frozen=True)
class RunRecord:
    """The record. ``logged`` is what the loop wrote of each step; ``notes`` say what could not be read."""

    folder: Path
    about: Line
    logged: dict[int, Line]
    ranks: tuple[RankRecord, ...]
    notes: list[str] = field(default_factory=list)

    def kept(self) -> list[int]:
        """Steps that some rank has spans of, in order."""
        return sorted({step for rank in self.ranks for step in rank.kept})

    def spans(self, rank: RankRecord, step: int) -> npt.NDArray[Any]:
        """The spans of one rank in one step, by start, in seconds from the end of the step before; empty where there
        are none, with a note where they are damaged.
        """
        path = files.spans_file(self.folder, rank.rank, step)
        found = np.empty(0, SPAN)
        if step in rank.kept and step in rank.steps:
            try:
                found = np.load(path, allow_pickle=False)
                if found.dtype != SPAN or found.ndim != 1:
                    raise ValueError("no spans")
            except (OSError, ValueError, EOFError) as error:
                self.note(f"{path.name} cannot be read ({error}); its step has no timeline of rank {rank.rank}")
                return np.empty(0, SPAN)
        good = np.isfinite(found["start"]) & np.isfinite(found["end"]) & (found["end"] >= found["start"])
        return np.sort(found[good], order=["start", "end"])

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def read_run(folder: Path) -> RunRecord:
    """Raises ConfigError where there is no record, or it is a newer version's."""
    if not folder.is_dir():
        raise ConfigError(f"report: {folder} is not a folder; name that of log.dir, or of tz.record")
    notes: list[str] = []
    about = _about(folder / files.RUN, files.RUN_FORMAT, notes)
    logged = _lines(folder / files.STEPS, notes)
    ranks = tuple(_rank(folder, number, notes) for number in _rank_numbers(folder))
    if not logged and not any(rank.steps for rank in ranks):
        raise ConfigError(
            f"report: {folder} has no record of a step; train with --set log.dir=FOLDER --set log.timeline=true"
        )
    return RunRecord(folder, about, logged, ranks, notes)


def _rank_numbers(folder: Path) -> list[int]:
    found = (files.rank_and_step(path) for path in folder.glob("rank-*.jsonl"))
    return sorted({entry[0] for entry in found if entry is not None})


def _rank(folder: Path, number: int, notes: list[str]) -> RankRecord:
    about = _about(files.rank_about(folder, number), files.RANK_FORMAT, notes)
    steps = _lines(files.rank_steps(folder, number), notes)
    entries = (files.rank_and_step(path) for path in (folder / files.TIMELINE).glob("rank-*.npy"))
    kept = sorted(entry[1] for entry in entries if entry and entry[0] == number and entry[1] in steps)
    return RankRecord(number, about, steps, tuple(step for step in kept if step is not None))


def _about(path: Path, form: str, notes: list[str]) -> Line:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        notes.append(f"{path.name} cannot be read: what it says of the run is left out")
        return {}
    if not isinstance(value, dict) or value.get("format") != form:
        notes.append(f"{path.name} is of something else: what it says of the run is left out")
        return {}
    if value.get("version") != files.VERSION:
        raise ConfigError(
            f"report: {path} is of version {value.get('version')}, and this TierZero reads {files.VERSION}; use the "
            "TierZero that wrote it"
        )
    return value


def _lines(path: Path, notes: list[str]) -> dict[int, Line]:
    """The lines that can be read, by step, the last of a step counting."""
    try:
        raw = path.read_bytes().splitlines()
    except OSError:
        return {}
    found = [line for line in map(_line, raw) if line is not None]
    if len(found) < len(raw):
        notes.append(
            f"{path.name}: {len(raw) - len(found)} of {len(raw)} lines cannot be read (a run that was killed?)"
        )
    return dict(sorted((line["step"], line) for line in found))


def _line(raw: bytes) -> Line | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return value if isinstance(step, int) and not isinstance(step, bool) and step > 0 else None


def number(line: Line, *keys: str) -> float | None:
    """The number under nested keys, or None where there is none."""
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
