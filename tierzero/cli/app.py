"""The commands and what they take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .failures import reported, usage_errors

app = typer.Typer(
    name="tierzero",
    help="Train models larger than memory: ZeRO-3 over device, host and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"tierzero {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train models larger than memory: ZeRO-3 over device, host and NVMe."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Configuration file (TOML).", show_default=False)],
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all, instead of train.steps.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="PATH|auto", help="Go on from a checkpoint; auto: the newest, if any.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be given several times."),
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="Write one JSON object per step to this file.")] = None,
) -> None:
    """Train the model that a configuration describes."""
    with reported(same_everywhere=True):
        from ..config import Config
        from ..train import prepare
        from ..train import train as run

        loaded = Config.load(config).override(assignments or [])
        if steps is not None:
            loaded = loaded.override([f"train.steps={steps}"])
        if metrics is not None:
            loaded = loaded.override([f"log.metrics={json.dumps(str(metrics), ensure_ascii=False)}"])
        job = prepare(loaded, resume)
    with reported():
        run(job)


def main() -> None:
    """Entry point of the ``tierzero`` script."""
    with usage_errors():
        sys.exit(app(prog_name="tierzero", standalone_mode=False) or 0)
