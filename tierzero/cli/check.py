"""The command that tells what is in use here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .failures import reported


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(check)


def check(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file (TOML), whose tiers.nvme are tried.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is in use on this machine (GPU, memory, cores, kernels, drives), and why what is not, is not."""
    with reported():
        from ..config import Config
        from ..profiling.here import look

        found = look(Config.load(config) if config is not None else Config.from_dict({}))
        print(json.dumps(found.as_json()) if as_json else "\n".join(found.lines()))
