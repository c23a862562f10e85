"""The command that plans a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .failures import reported
from .values import check_new, write_new


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(plan)


def plan(
    config: Annotated[Path, typer.Argument(help="Configuration file (TOML).", show_default=False)],
    profile: Annotated[
        Path | None, typer.Option(help="Machine profile, from tierzero bench all --save, or a bundled one's name.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Plan for so many ranks on machines like the profile's.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are on, in equal numbers.")] = 1,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Write the configuration with the plan to this new file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the fastest placement and schedule, its peak memory, its step time and what bounds it. Allocates nothing.

    Exit code 2 where nothing fits, with the bytes missing.
    """
    with reported():
        from ..config import Config
        from ..config.toml import toml_document
        from ..errors import BudgetError
        from ..training import plan_report
        from ..training.improvements import improvements
        from ..training.planned import Planner, default_plan, planned_config, site_of

        loaded = Config.load(config).override(assignments or [])
        loaded.check()
        if out is not None:
            check_new(out)
        planner = Planner(loaded, site_of(str(profile) if profile is not None else None, ranks, nodes))
        try:
            found = planner.plan()
        except BudgetError as error:
            if as_json:
                print(json.dumps({"fits": False, "missing_bytes": error.missing, "why": str(error)}))
            raise
        if out is not None:
            write_new(out, toml_document(planned_config(found)))
        default, better = default_plan(planner), improvements(planner, found)
        if as_json:
            print(json.dumps(plan_report.as_json(found, better, default)))
        else:
            print("\n".join(plan_report.lines(found, better, default)))
