"""The commands on checkpoints: inspect, export, import."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .failures import reported
from .values import size

if TYPE_CHECKING:
    from ..checkpoint.sealed_inspection import SealedState

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(inspect)
    app.command()(export)
    app.command("import")(import_)


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="A checkpoint, or a folder of them; or paths of tiers.nvme, for what is sealed there.",
            show_default=False,
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and check every checksum.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every parameter and buffer.")] = False,
    as_json: _Json = False,
) -> None:
    """Show what a checkpoint holds and whether it is whole, or which step is sealed in durable tier files. Exit code 1:
    --verify has found damage.
    """
    with reported():
        from ..errors import ConfigError
        from ..training.inspected import inspected, listed, sealed_on, several

        folders = several(paths[0])
        states = sealed_on(paths) if not folders else []
        if states and verify:
            raise ConfigError(f"inspect: --verify is for checkpoints; a run that goes on from {paths[0]} checks it")
        if states:
            _print_sealed(states, as_json)
            return
        if len(paths) > 1:
            raise ConfigError(f"inspect: {paths[1]} is one path too many, as nothing is sealed there; name one")
        (path,) = paths
        with _progress("verifying", verify) as progress:
            found = [listed(folder, verify, progress) for folder in folders] or [inspected(path, verify, progress)]
        if as_json:
            objects = [each.as_json(tensors) for each in found]
            print(json.dumps({"path": str(path), "checkpoints": objects} if folders else objects[0]))
        elif folders:
            print("\n".join(each.line() for each in found))
        else:
            print("\n".join(found[0].lines(tensors)))
        if verify and not all(each.is_whole for each in found):
            raise SystemExit(1)


def _print_sealed(states: list[SealedState], as_json: bool) -> None:
    from ..training.inspected import sealed_lines

    if as_json:
        print(json.dumps({"sealed": [state.as_json() for state in states]}))
    else:
        print("\n".join(line for state in states for line in sealed_lines(state)))


def export(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    form: Annotated[
        str, typer.Option("--format", help="safetensors, or dcp (torch.distributed.checkpoint).")
    ] = "safetensors",
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32, from the fp32 master; else each weight's own.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="trained, or ema: the averages that a run with optimizer.ema keeps.")
    ] = "trained",
    max_file: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Most bytes of one safetensors file; 5GB.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PATTERN", help="Tensors to write, such as '*.lora_*'.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint's weights for other programs. A safetensors export that was interrupted goes on."""
    with reported():
        from ..checkpoint import export_dcp, export_safetensors
        from ..errors import ConfigError

        if form not in ("safetensors", "dcp"):
            raise ConfigError(f"export: --format is {form!r}; use safetensors or dcp")
        for option, value in (("--max-file", max_file), ("--only", only)):
            if form == "dcp" and value is not None:
                raise ConfigError(f"export: {option} is for --format safetensors")
        with _progress("exporting") as progress:
            if form == "dcp":
                export_dcp(checkpoint, out, dtype=dtype, weights=weights, progress=progress)
            else:
                limit = {} if max_file is None else {"max_file_bytes": max_file}
                export_safetensors(
                    checkpoint, out, dtype=dtype, weights=weights, only=only or (), progress=progress, **limit
                )
        _say_written(out, {"format": form, "dtype": dtype, "weights": weights}, as_json)


def import_(
    folder: Annotated[Path, typer.Argument(help="A folder of safetensors files.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write.", show_default=False)],
    precision: Annotated[str, typer.Option(help="That of the training: bf16, fp16 or fp32.")] = "bf16",
    buffers: Annotated[
        list[str] | None,
        typer.Option("--buffer", metavar="PATTERN", help="Tensors that are buffers, besides running statistics."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="PATTERN", help="Tensors to leave out, such as '*.attn.bias'.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Make a checkpoint to start from out of safetensors files: train CONFIG --resume OUT."""
    with reported():
        from ..checkpoint import import_safetensors
        from ..checkpoint.import_safetensors import BUFFERS

        patterns = (*BUFFERS, *(buffers or ()))
        with _progress("importing") as progress:
            import_safetensors(folder, out, precision=precision, buffers=patterns, skip=skip or (), progress=progress)
        _say_written(out, {"precision": precision}, as_json)


def _say_written(out: Path, how: dict[str, Any], as_json: bool) -> None:
    from ..training.text import amount

    nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if as_json:
        print(json.dumps({"path": str(out), "bytes": nbytes, **how}))
    else:
        print(f"{out}: {amount(nbytes)}")


@contextmanager
def _progress(title: str, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over bytes where standard error is a terminal, else nothing."""
    if not (wanted and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
