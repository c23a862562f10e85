"""The command that finds settings by short runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .failures import reported
from .values import check_new, write_new


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(tune)


def tune(
    config: Annotated[Path, typer.Argument(help="Configuration file (TOML).", show_default=False)],
    minutes: Annotated[float, typer.Option(min=0.01, help="About how long it may take.")] = 5.0,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of each run, all on this machine.")] = 1,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the configuration with what was found to this new file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the few settings that make steps shorter on this machine, by short real runs of the configuration.

    Keys that the configuration sets are left alone. No checkpoint, log or file of a run is touched.
    """
    with reported():
        from ..config import Config
        from ..config.toml import toml_document
        from ..profiling.tune import report
        from ..profiling.tune.halving import Limits
        from ..profiling.tune.session import tuned
        from ..training.settings import said_with
        from ..training.stopping import StopSignals

        loaded = Config.load(config).override(assignments or [])
        if out is not None:
            check_new(out)
        with StopSignals() as stop, stop.at_once(), _progress() as (begin, note):
            result = tuned(loaded, ranks, Limits(60 * minutes), begin, note)
        chosen = result.found.recommended
        written = out if chosen is not None else None
        if out is not None and chosen is not None:
            write_new(out, toml_document(said_with(loaded, chosen.settings())))
        if as_json:
            found = report.as_json(result.found, loaded, result.alone)
            print(json.dumps({**found, "out": str(written) if written is not None else None}))
        else:
            print("\n".join(report.lines(result.found, loaded, result.alone)), flush=True)
        if out is not None and written is None:
            print(f"tierzero: note: {out} was not written: there is nothing to change", file=sys.stderr)
        if result.stopped is not None:
            raise result.stopped


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Says what is being measured where standard error is a terminal, and gives a line of each run everywhere."""
    if not sys.stderr.isatty():
        yield lambda text: None, lambda line: print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:
        yield status.update, lambda line: console.print(line, markup=False, highlight=False)
