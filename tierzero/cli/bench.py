"""The commands that measure this machine: bench io, adam, link, compute, all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .failures import reported
from .values import size, sizes, wholes

if TYPE_CHECKING:
    from ..config import Config
    from ..profiling.bench.io import IoPlan
    from ..profiling.bench.report import Results
    from ..profiling.bench.timing import Progress

_SECONDS = {"io": 60.0, "adam": 15.0, "link": 6.0, "compute": 45.0, "collective": 20.0}

_Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="CONFIG", help="Configuration file: its paths, block size, depth, threads."),
]
_Nvme = Annotated[
    list[Path] | None, typer.Option("--nvme", metavar="PATH", help="Folder on a drive; may be given several times.")
]
_Blocks = Annotated[Any, typer.Option(parser=sizes, metavar="SIZES", help="Block sizes, as 256KiB,1MiB,8MiB.")]
_Depths = Annotated[Any, typer.Option(parser=wholes, metavar="NUMBERS", help="Queue depths, as 1,8,16.")]
_Size = Annotated[int | None, typer.Option("--size", parser=size, metavar="SIZE", help="Bytes of the test file; 2GiB.")]
_Seconds = Annotated[float | None, typer.Option(min=0.01, help="About how long each part may take.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    bench = typer.Typer(no_args_is_help=True, help="Measure what this machine can do, as the runtime uses it.")
    for command in (io, adam, link, compute):
        bench.command()(command)
    bench.command("all")(all_)
    app.add_typer(bench, name="bench")


def io(
    nvme: _Nvme = None,
    config: _Config = None,
    blocks: _Blocks = None,
    depths: _Depths = None,
    nbytes: _Size = None,
    seconds: _Seconds = None,
    as_json: _Json = False,
) -> None:
    """Rates and latencies of tier files on drives, by block size and queue depth."""
    with _measuring(as_json) as bench:
        bench.io(_plan(bench.config(config), nvme, blocks, depths, nbytes), seconds)


def adam(config: _Config = None, seconds: _Seconds = None, as_json: _Json = False) -> None:
    """Parameters that the Adam kernel updates, by number of threads."""
    with _measuring(as_json) as bench:
        bench.config(config)
        bench.adam(seconds)


def link(config: _Config = None, seconds: _Seconds = None, as_json: _Json = False) -> None:
    """Copies between host and device memory; within host memory where devices have none of their own."""
    with _measuring(as_json) as bench:
        bench.config(config)
        bench.link(seconds)


def compute(config: _Config = None, seconds: _Seconds = None, as_json: _Json = False) -> None:
    """Matrix products, attention and elementwise operations, by data type."""
    with _measuring(as_json) as bench:
        bench.config(config)
        bench.compute(seconds)


def all_(
    nvme: _Nvme = None,
    config: _Config = None,
    blocks: _Blocks = None,
    depths: _Depths = None,
    nbytes: _Size = None,
    seconds: _Seconds = None,
    save: Annotated[Path | None, typer.Option(metavar="PROFILE.json", help="Write a profile for planning.")] = None,
    as_json: _Json = False,
) -> None:
    """Everything. --save writes the machine profile that step times are predicted from."""
    with _measuring(as_json) as bench:
        loaded = bench.config(config)
        plan = None
        if nvme or loaded.tiers.nvme:
            plan = _plan(loaded, nvme, blocks, depths, nbytes)
            plan.check()
        else:
            print("tierzero: note: no drive is measured: give --nvme PATH or --config", file=sys.stderr)
        bench.link(seconds)
        bench.adam(seconds)
        bench.compute(seconds)
        if plan is not None:
            bench.io(plan, seconds)
        if save is not None:
            bench.save(save)


class _Bench:
    """Measures part after part."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def config(self, path: Path | None) -> Config:
        """The configuration, or defaults; PyTorch gets the threads that training would use."""
        from ..config import Config
        from ..training.ranks import Ranks, set_threads

        loaded = Config.load(path) if path is not None else Config.from_dict({})
        set_threads(loaded, Ranks())
        return loaded

    def io(self, plan: IoPlan, seconds: float | None) -> None:
        from ..profiling.bench.io import measure

        plan = replace(plan, seconds=seconds or _SECONDS["io"])
        host = self.results.link.host.median if self.results.link is not None else None
        with _progress("io") as progress:
            self.results = replace(self.results, io=measure(plan, progress, host))

    def adam(self, seconds: float | None) -> None:
        from ..profiling.bench.adam import measure
        from ..profiling.bench.names import cores

        with _progress("adam") as progress:
            self.results = replace(self.results, adam=measure(cores(), seconds or _SECONDS["adam"], progress))

    def link(self, seconds: float | None) -> None:
        from ..profiling.bench.link import measure

        with _progress("link") as progress:
            self.results = replace(self.results, link=measure(seconds or _SECONDS["link"], progress))

    def compute(self, seconds: float | None) -> None:
        from ..profiling.bench.compute import measure
        from ..training.ranks import Ranks, join

        with _progress("compute") as progress:
            found = measure(join(Ranks()), seconds or _SECONDS["compute"], progress)
            self.results = replace(self.results, compute=found)

    def save(self, path: Path) -> None:
        from ..profiling.bench.profile import machine_profile

        path.write_text(json.dumps(machine_profile(self.results).as_json(), indent=1) + "\n", encoding="utf-8")


@contextmanager
def _measuring(as_json: bool) -> Iterator[_Bench]:
    """Prints what was measured inside. Ctrl-C and SIGTERM end it at once, and files are removed."""
    with reported():
        from ..profiling.bench.report import Results, lines
        from ..training.stopping import StopSignals

        bench = _Bench(Results(datetime.now().astimezone().isoformat(timespec="seconds")))
        with StopSignals(quiet=True) as stop, stop.at_once():
            yield bench
        print(json.dumps(bench.results.as_json()) if as_json else "\n".join(lines(bench.results)))


def _plan(
    config: Config,
    nvme: list[Path] | None,
    blocks: Any,
    depths: Any,
    nbytes: int | None,
) -> IoPlan:
    """Raises ConfigError without a path."""
    from ..errors import ConfigError
    from ..profiling.bench.io import BLOCKS, DEPTHS, SIZE, IoPlan

    paths = tuple(nvme or config.tiers.nvme or ())
    if not paths:
        raise ConfigError("bench io: no path to measure; give --nvme PATH, or --config with tiers.nvme")
    used = (config.io.block_size, config.io.queue_depth)
    return IoPlan(
        paths,
        blocks if blocks else tuple(sorted({*BLOCKS, used[0]})),
        depths if depths else tuple(sorted({*DEPTHS, used[1]})),
        nbytes or SIZE,
        used=used,
    )


@contextmanager
def _progress(title: str) -> Iterator[Progress]:
    """A bar where standard error is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, done: bar.update(task, completed=done, description=what)
