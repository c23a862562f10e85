"""The command that translates a configuration of DeepSpeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .failures import reported
from .values import write_new


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("import-config")(import_config)


def import_config(
    config: Annotated[Path, typer.Argument(help="DeepSpeed's configuration (JSON).", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Write the configuration to this new file.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that will run, where the file gives a batch per rank only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Translate a DeepSpeed configuration, and say what became of every key in it."""
    with reported():
        from ..config.deepspeed import report, translate

        translation = translate(config, ranks)
        text = translation.toml()
        if out is not None:
            write_new(out, text)
        if as_json:
            print(json.dumps({**report.as_json(translation), "out": None if out is None else str(out)}))
            return
        table = "\n".join(report.lines(translation))
        if out is None:
            print(text, end="", flush=True)
            print(table, file=sys.stderr)
        else:
            print(table)
