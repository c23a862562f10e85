"""The page: one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from tierzero.planner.machine import MachineProfile
from tierzero.records.reading import RunRecord, number
from tierzero.report.advice import Finding
from tierzero.report.ahead import sentences
from tierzero.report.figures import Figures, Typical, typical
from tierzero.report.page_data import SHOWN, page_data
from tierzero.training.text import amount, count

_MEANINGS = {
    "computing": "What is left of the step beside the waits. With log.timeline it is divided further.",
    "forward": "The model's forward, its operations only.",
    "backward": "The model's backward, its operations only.",
    "recompute": "Forwards that run again in the backward (activations.recompute, or checkpointing of your own).",
    "optimizer_step": "clip_grad_norm_ and optimizer.step(): they fix the update, which runs beside the next forward.",
    "stall_nvme_read": "A unit's weights, with their update, were not there in time.",
    "stall_host_budget": "An update stood in line for staging memory.",
    "stall_nvme_write": "Gradients, or a flush, were on their way to their tier.",
    "stall_gather": "Gathers and reductions, or ranks that come later.",
    "stall_optimizer": "Updates that had to be finished first.",
    "other": "In the step, but in no forward and no backward of the model: your loop, the loss.",
    "between": "From the end of a step to the next forward: data, validation, checkpoints, your loop.",
}


def html_page(
    run: RunRecord,
    figures: Figures,
    words: Sequence[Finding],
    profile: MachineProfile | None = None,
    step: int | None = None,
) -> str:
    """The whole page. ``step``: whose timeline is shown first."""
    data = page_data(run, figures, profile, step)
    name = run.folder.resolve().name or str(run.folder)
    body = [
        _header(run, figures, name),
        _findings(words),
        _ahead(figures),
        _chart_section(data),
        _timeline_section(data),
        _phase_table(figures),
        _notes(run, figures),
    ]
    return _document(f"{name} - TierZero report", body, data)


def _document(title: str, body: Iterable[str], data: Any) -> str:
    # "<" must not stand in the data, or text of the run could end the script that it is in.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_asset('page.css')}</style>",
            "</head>",
            "<body>",
            *body,
            f'<script type="application/json" id="data">{embedded}</script>',
            f"<script>\n{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return files("tierzero.report").joinpath(name).read_text(encoding="utf-8")


def _header(run: RunRecord, figures: Figures, name: str) -> str:
    usual = typical(figures.settled())
    facts = [
        (str(len(figures.steps)), "steps recorded"),
        (_seconds(usual.period_s), "a step, from end to end"),
        (str(figures.ranks), "rank" if figures.ranks == 1 else "ranks"),
    ]
    parameters = number(run.about, "parameters")
    if parameters:
        facts.insert(0, (count(parameters), "parameters"))
    if usual.read_bytes or usual.write_bytes:
        facts.append((amount(usual.read_bytes + usual.write_bytes), "read and written on the drive in a step"))
    losses = [step.loss for step in figures.steps if step.loss is not None]
    if losses:
        facts.append((f"{losses[-1]:.4g}", f"loss, from {losses[0]:.4g}"))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(what)}</span></li>" for value, what in facts)
    where = f'<p class="soft">{escape(str(run.folder))}{_written(run)}</p>'
    return f'<h1>{escape(name)}</h1>\n{where}\n<ul class="facts">{items}</ul>'


def _written(run: RunRecord) -> str:
    written = run.about.get("written")
    return f", begun {escape(written)}" if isinstance(written, str) else ""


def _findings(words: Sequence[Finding]) -> str:
    if not words:
        return ""
    items = "".join(f"<li><strong>{escape(found.title)}.</strong> {escape(found.text)}</li>" for found in words)
    return f'<h2>What bounded the run</h2>\n<ul class="findings">{items}</ul>'


def _ahead(figures: Figures) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(figures))
    return f'<h2>Ahead of the step</h2>\n<ul class="ahead">{items}</ul>' if items else ""


_CHARTS = {
    "times": ("Time by step", "Where the training thread's time went, one bar for each step, mean of the ranks."),
    "loss": ("Loss", ""),
    "drive": ("The drive", "Bytes per second from the end of a step to the end of the next, all ranks together."),
    "tiers": ("Tiers", "Bytes in use, all ranks together: the most since the start, and what the plan has set aside."),
    "ahead": (
        "Updates ahead of the step",
        "Bytes of state tried in a step's backward, all ranks together, and what became of those of the step before.",
    ),
    "comm": ("Collectives", "Bytes by kind, all ranks together, as the usual formulas count them."),
}


def _chart_section(data: dict[str, Any]) -> str:
    parts = ['<div class="charts">']
    for name, (title, about) in _CHARTS.items():
        if name in data["charts"]:
            wide = ' class="wide"' if name == "times" else ""
            text = f'<p class="soft">{about}</p>' if about else ""
            parts.append(f'<section{wide}><h2>{title}</h2>{text}<figure id="{name}"></figure></section>')
    return "\n".join([*parts, "</div>"])


def _timeline_section(data: dict[str, Any]) -> str:
    if not data["timelines"]:
        return ""
    return "\n".join(
        [
            "<h2>Timeline of a step</h2>",
            '<div class="controls"><label>Show <select id="choice"></select></label>',
            '<button id="closer" type="button">Zoom in</button>',
            '<button id="further" type="button">Zoom out</button>',
            '<button id="all" type="button">All</button></div>',
            '<p class="soft">Drag to move; to zoom, turn the wheel with Ctrl, Command or Shift held, or click twice; '
            "on the keyboard + - 0 and the arrows. Point at a span for its name, time and bytes. Page-in and page-out "
            "include the time in line for the drive.</p>",
            '<div class="lanes"><canvas id="lanes" tabindex="0" aria-label="Timeline of a step"></canvas></div>',
            '<ul class="legend" id="kinds"></ul>',
        ]
    )


def _phase_table(figures: Figures) -> str:
    usual = typical(figures.settled())
    rows = "".join(_phase_row(phase, usual) for phase in SHOWN if usual.share(phase) > 0)
    head = "<thead><tr><th>phase</th><th>in a step</th><th>share</th><th>what it is</th></tr></thead>"
    skipped = len(figures.steps) - len(figures.settled())
    about = f"Means over the steps{' but the first two' if skipped else ''}; together they are the whole time."
    return (
        f'<h2>The phases</h2>\n<p class="soft">{about}</p>\n'
        f'<div class="table"><table>{head}<tbody>{rows}</tbody></table></div>'
    )


def _phase_row(phase: str, usual: Typical) -> str:
    label, color = SHOWN[phase]
    share = usual.share(phase)
    return (
        f'<tr><td><span class="swatch" style="background: var(--{color})"></span>{escape(label)}</td>'
        f"<td>{_seconds(share * usual.mean_s)}</td><td>{100 * share:.1f} %</td>"
        f"<td>{escape(_MEANINGS.get(phase, ''))}</td></tr>"
    )


def _notes(run: RunRecord, figures: Figures) -> str:
    notes = list(run.notes)
    dropped = sum(step.dropped for step in figures.steps)
    if dropped:
        notes.append(f"{dropped} spans found no room in memory and are missing in the timelines; all phases are whole")
    if not figures.has_phases:
        notes.append("this run was recorded without log.timeline = true: there are no phases and no timelines")
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<h2>Notes</h2>\n<ul class="notes">{items}</ul>'


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
