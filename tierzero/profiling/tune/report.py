"""What a search has found, as a person reads it and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tierzero.config import Config
from tierzero.profiling.tune.candidates import Candidate
from tierzero.profiling.tune.halving import Failed, Measured, Outcome, Scored, Trial, Verdict
from tierzero.training.settings import set_lines
from tierzero.training.text import amount, duration

Found = Outcome[Candidate]


def lines(found: Found, config: Config, alone: Sequence[str]) -> list[str]:
    """The table, the gain, the settings to take, and what to know about them."""
    text = [*_table(found), ""] if found.trials else []
    text += [f"failed   {candidate}: {why}" for candidate, why in _failures(found).items()]
    text.append(f"gain     {_gain(found)}")
    if found.recommended is not None:
        text += set_lines(found.recommended.settings())
    if alone:
        text.append(f"left     {', '.join(alone)}: set in the configuration")
    return text + [f"note     {note}" for note in _notes(found, config)]


def as_json(found: Found, config: Config, alone: Sequence[str]) -> dict[str, Any]:
    """One object; bytes and seconds. ``verdict`` is null where nothing was faster or the time did not suffice."""
    verdict, recommended = found.verdict, found.recommended
    return {
        "recommended": recommended.settings() if recommended is not None else None,
        "verdict": None
        if verdict is None
        else {
            "changes": dict(verdict.candidate.changes),
            "step_s": verdict.step_s,
            "as_configured_step_s": verdict.default_s,
            "gain": verdict.gain,
            "spread": verdict.spread,
        },
        "trials": [_trial_json(trial) for trial in found.trials],
        "compared": [
            {"round": each.round, "changes": dict(each.candidate.changes), "ratio": each.ratio} for each in found.scores
        ],
        "left_alone": list(alone),
        "untried": [dict(candidate.changes) for candidate in found.untried],
        "ended_early": found.ended,
        "notes": _notes(found, config),
    }


def trial_line(trial: Trial[Candidate]) -> str:
    """One run, when it has ended."""
    outcome = trial.outcome
    result = f"{outcome.step_s:.3g} s a step" if isinstance(outcome, Measured) else f"failed: {outcome.why}"
    when = f"round {trial.round}" if trial.round else "warm-up"
    return f"{when}  {trial.candidate}  {trial.steps} steps  {result}"


def _trial_json(trial: Trial[Candidate]) -> dict[str, Any]:
    outcome = trial.outcome
    measured = (
        {"step_s": outcome.step_s, "nvme_bytes": outcome.nvme_bytes}
        if isinstance(outcome, Measured)
        else {"failed": outcome.why}
    )
    return {"round": trial.round, "changes": dict(trial.candidate.changes), "steps": trial.steps, **measured}


def _failures(found: Found) -> dict[Candidate, str]:
    return {trial.candidate: trial.outcome.why for trial in found.trials if isinstance(trial.outcome, Failed)}


def _gain(found: Found) -> str:
    verdict = found.verdict
    if not found.trials and found.ended is None:
        return "nothing to try: all keys that matter here are set in the configuration"
    if verdict is not None:
        return _of_verdict(verdict)
    if found.ended is not None:
        return "not known: it ended before the best was compared with the configuration as it is"
    return "none: nothing that was tried was faster than the configuration as it is"


def _of_verdict(verdict: Verdict[Candidate]) -> str:
    if verdict.is_better:
        return (
            f"{100 * verdict.gain:.1f}% of a step: {verdict.step_s:.3g} s instead of {verdict.default_s:.3g} s; runs "
            f"of the same settings differ by {100 * verdict.spread:.1f}%"
        )
    way = f"{100 * abs(verdict.gain):.1f}% {'faster' if verdict.gain > 0 else 'slower'}"
    return (
        f"none beyond the spread: the best, {verdict.candidate}, was {way}; runs of the same settings differ by "
        f"{100 * verdict.spread:.1f}%"
    )


def _notes(found: Found, config: Config) -> list[str]:
    notes = []
    if found.ended is not None:
        notes.append(f"ended early: {found.ended}")
    if found.untried:
        notes.append(
            f"{len(found.untried)} changes were not tried for want of time; all would have taken about "
            f"{duration(found.needed_s)}, see --minutes"
        )
    if config.checkpoint.durable:
        notes.append("measured without checkpoint.durable, which makes every step longer")
    return notes


def _table(found: Found) -> list[str]:
    titles = ("changed", "round", "steps", "step s", "against as configured", "nvme moved")
    rows = [titles, *_default_rows(found)]
    latest = {each.candidate: each for each in found.scores}
    rows += [_row(each) for each in sorted(latest.values(), key=lambda each: (-each.round, each.ratio))]
    scored_or_default = {*latest, Candidate()}
    for trial in found.trials:
        if trial.candidate not in scored_or_default:
            rows.append(_unscored_row(trial))
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def _default_rows(found: Found) -> list[tuple[str, ...]]:
    """The configuration as it is, in its last round."""
    own = [(each, each.outcome) for each in found.trials if each.candidate == Candidate()]
    runs = [(trial, outcome) for trial, outcome in own if isinstance(outcome, Measured)]
    if not runs:
        return []
    last, measured = runs[-1]
    step_s = statistics.median(outcome.step_s for trial, outcome in runs if trial.round == last.round)
    return [(str(Candidate()), str(last.round), str(last.steps), f"{step_s:.3g}", "", amount(measured.nvme_bytes))]


def _row(each: Scored[Candidate]) -> tuple[str, ...]:
    measured = each.measured
    change = f"{100 * (each.ratio - 1):+.1f}%"
    cells = (f"{measured.step_s:.3g}", change, amount(measured.nvme_bytes))
    return (str(each.candidate), str(each.round), str(each.steps), *cells)


def _unscored_row(trial: Trial[Candidate]) -> tuple[str, ...]:
    """Of what failed, or was not compared any more."""
    name, counts = str(trial.candidate), (str(trial.round), str(trial.steps))
    if isinstance(trial.outcome, Failed):
        return (name, *counts, "failed", "", "")
    return (name, *counts, f"{trial.outcome.step_s:.3g}", "", amount(trial.outcome.nvme_bytes))
