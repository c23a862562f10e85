"""The command on the record of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .failures import reported


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(report)


def report(
    run_dir: Annotated[Path, typer.Argument(help="The folder of log.dir, or of tz.record.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=1, help="The step whose timeline is shown; else the newest.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page; else report.html in the folder.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Also a Chrome trace, of --step or of all that are kept.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE.json", help="A machine profile, or a bundled one's name: to compare the drive with."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; a page only with --out.")] = False,
) -> None:
    """Show where each step's time went: in words, as an HTML page, as a trace."""
    with reported():
        from ..planner.machine import MachineProfile
        from ..report.build import build_report

        machine = MachineProfile.load(profile) if profile is not None else None
        page = out if out is not None or as_json else run_dir / "report.html"
        found = build_report(run_dir, step, page, trace, machine)
        print(json.dumps(found.as_json()) if as_json else "\n".join(found.lines()))
