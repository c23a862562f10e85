"""The commands and what they take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import bench, check, checkpoints, import_config, plan, report, tune
from .failures import reported, usage_errors
from .values import size

app = typer.Typer(
    name="tierzero",
    help="Train models larger than memory: ZeRO-3 over device, host and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench.add_to(app)
check.add_to(app)
checkpoints.add_to(app)
import_config.add_to(app)
plan.add_to(app)
report.add_to(app)
tune.add_to(app)


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


def _number(text: str) -> int:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1 <= found < 1e18 or found != int(found):
        raise typer.BadParameter(f"{text!r} is no number of parameters; write one such as 7e9")
    return int(found)


_SIZE_HELP = "memory per rank that there is, as 80GB; else what the configuration says."


@app.command()
def estimate(
    config: Annotated[Path | None, typer.Argument(help="Configuration file (TOML).", show_default=False)] = None,
    params: Annotated[
        int | None, typer.Option(parser=_number, metavar="NUMBER", help="Instead: any model of so many parameters.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that the state is divided among.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are on, in equal numbers.")] = 1,
    precision: Annotated[str, typer.Option(help="For --params: bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[int | None, typer.Option(parser=size, metavar="SIZE", help=f"Device {_SIZE_HELP}")] = None,
    host: Annotated[int | None, typer.Option(parser=size, metavar="SIZE", help=f"Host {_SIZE_HELP}")] = None,
    nvme: Annotated[int | None, typer.Option(parser=size, metavar="SIZE", help=f"NVMe {_SIZE_HELP}")] = None,
    gpu: Annotated[
        bool | None, typer.Option("--gpu/--cpu", help="Whether devices have memory of their own; else as here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the memory and traffic of every ZeRO stage, with and without offload. Allocates nothing."""
    with reported():
        import torch

        from ..config import Config
        from ..errors import ConfigError
        from ..planner.estimate import Limits
        from ..training import estimated

        if (config is None) == (params is None):
            raise ConfigError("estimate: give either a configuration file or --params")
        limits, alone = Limits(device, host, nvme), not (torch.cuda.is_available() if gpu is None else gpu)
        if config is not None:
            loaded = Config.load(config)
            report = estimated.estimate_config(loaded, ranks, nodes, limits, alone)
            recompute = loaded.activations.recompute
        else:
            assert params is not None
            if precision not in ("bf16", "fp16", "fp32"):
                raise ConfigError(f"estimate: --precision is {precision!r}; use bf16, fp16 or fp32")
            report = estimated.estimate_parameters(params, precision, ranks, nodes, limits, alone)
            recompute = None
        if as_json:
            print(json.dumps(report.as_json()))
        else:
            print("\n".join(estimated.lines(report, recompute)))


def main() -> None:
    """Entry point of the ``tierzero`` script."""
    with usage_errors():
        sys.exit(app(prog_name="tierzero", standalone_mode=False) or 0)
