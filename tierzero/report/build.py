"""`tierzero report`: from the folder of a record to words, a page and a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierzero.errors import ConfigError
from tierzero.planner.machine import MachineProfile
from tierzero.records.reading import RunRecord, read_run
from tierzero.report.advice import Finding, findings
from tierzero.report.ahead import sentences, tries_of
from tierzero.report.figures import Figures, figures_of, typical
from tierzero.report.page import html_page
from tierzero.report.page_data import SHOWN
from tierzero.report.trace import write_trace


@dataclass(frozen=True)
class Report:
    """What was found, and written where."""

    run: RunRecord
    figures: Figures
    findings: Sequence[Finding]
    page: Path | None
    trace: Path | None

    def lines(self) -> list[str]:
        """For a terminal."""
        usual = typical(self.figures.settled())
        steps = self.figures.steps
        first = f"run      {len(steps)} steps ({steps[0].step} to {steps[-1].step}), {usual.period_s:.3g} s a step"
        if self.figures.overlap:
            first += f', optimizer.overlap = "{self.figures.overlap}"'
        parts = [f"{label} {100 * usual.share(p):.0f} %" for p, (label, _) in SHOWN.items() if usual.share(p) >= 0.005]
        found = [first, "time     " + ", ".join(parts)]
        found += [f"{finding.title}: {finding.text}" for finding in self.findings]
        found += [f"ahead    {sentence}" for sentence in sentences(self.figures)]
        found += [f"note     {note}" for note in self.run.notes]
        written = (("page", self.page), ("trace", self.trace))
        return found + [f"{what:8} {path}" for what, path in written if path is not None]

    def as_json(self) -> dict[str, Any]:
        usual, tries = typical(self.figures.settled()), tries_of(self.figures)
        return {
            "path": str(self.run.folder),
            "steps": len(self.figures.steps),
            "first_step": self.figures.steps[0].step,
            "last_step": self.figures.steps[-1].step,
            "ranks": self.figures.ranks,
            "step_s": usual.period_s,
            "share": usual.shares,
            "nvme_read_bytes": usual.read_bytes,
            "nvme_write_bytes": usual.write_bytes,
            "cold_start_share": usual.cold,
            "tries": None if tries is None else asdict(tries),
            "bound_by": self.findings[0].rule if self.findings else None,
            "findings": [asdict(finding) for finding in self.findings],
            "timelines": self.run.kept(),
            "notes": self.run.notes,
            "page": None if self.page is None else str(self.page),
            "trace": None if self.trace is None else str(self.trace),
        }


def build_report(
    folder: Path,
    step: int | None = None,
    page: Path | None = None,
    trace: Path | None = None,
    profile: MachineProfile | None = None,
) -> Report:
    """Reads the record and writes what is asked for. Raises ConfigError where there is no record, no timeline of
    ``step``, or nowhere to write.
    """
    run = read_run(folder)
    kept = run.kept()
    if step is not None and step not in kept:
        raise ConfigError(f"report: {folder} has no timeline of step {step}; {_listed(kept)}")
    if trace is not None and not kept:
        raise ConfigError(f"report: {folder} has no timeline to make a trace of; train with log.timeline = true")
    figures = figures_of(run)
    words = findings(figures, profile)
    if trace is not None:
        write_trace(run, [step] if step is not None else kept, trace)
    if page is not None:
        _write(page, html_page(run, figures, words, profile, step))
    return Report(run, figures, words, page, trace)


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "train with log.timeline = true"
    shown = ", ".join(map(str, steps if len(steps) <= 12 else [*steps[:6], "...", *steps[-6:]]))
    return f"there are those of {shown}"


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"report: cannot write {path}: {error.strerror or error}") from None
