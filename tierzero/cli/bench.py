"""The commands that measure this machine: bench io, adam, link, collective, compute, all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    from ..training.ranks import Ranks

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


_Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs matplotlib.")]
_Fio = Annotated[bool, typer.Option("--fio", help="Measure fio beside the engine, in turns.")]
_Ranks = Annotated[int, typer.Option(min=2, help="Local ranks to start, where torchrun has started none.")]
_Messages = Annotated[
    Any, typer.Option("--sizes", parser=sizes, metavar="SIZES", help="Of messages; 64KiB to 64MiB by factors of 4.")
]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    bench = typer.Typer(no_args_is_help=True, help="Measure what this machine can do, as the runtime uses it.")
    for command in (io, adam, link, collective, compute):
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
    fio: _Fio = False,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Rates and latencies of tier files on drives, by block size and queue depth."""
    with _measuring(config, as_json, plot) as bench:
        bench.io(_plan(bench.config, nvme, blocks, depths, nbytes, fio), seconds)


def adam(config: _Config = None, seconds: _Seconds = None, plot: _Plot = None, as_json: _Json = False) -> None:
    """Parameters that the Adam kernel updates, by number of threads."""
    with _measuring(config, as_json, plot) as bench:
        bench.adam(seconds)


def link(config: _Config = None, seconds: _Seconds = None, plot: _Plot = None, as_json: _Json = False) -> None:
    """Copies between host and device memory; within host memory where devices have none of their own."""
    with _measuring(config, as_json, plot) as bench:
        bench.link(seconds)


def compute(config: _Config = None, seconds: _Seconds = None, plot: _Plot = None, as_json: _Json = False) -> None:
    """Matrix products, attention and elementwise operations, by data type."""
    with _measuring(config, as_json, plot) as bench:
        bench.compute(seconds)


def collective(
    ranks: _Ranks = 2,
    messages: _Messages = None,
    config: _Config = None,
    seconds: _Seconds = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """All-gather, reduce-scatter and all-reduce: among torchrun's ranks, or with gloo among local ones."""
    with _measuring(config, as_json, plot, together=True) as bench:
        bench.collective(ranks, messages, seconds)


def all_(
    nvme: _Nvme = None,
    config: _Config = None,
    blocks: _Blocks = None,
    depths: _Depths = None,
    nbytes: _Size = None,
    seconds: _Seconds = None,
    ranks: _Ranks = 2,
    messages: _Messages = None,
    save: Annotated[Path | None, typer.Option(metavar="PROFILE.json", help="Write a profile for planning.")] = None,
    fio: _Fio = False,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Everything. --save writes the machine profile that step times are predicted from."""
    with _measuring(config, as_json, plot, together=True) as bench:
        plan = None
        if nvme or bench.config.tiers.nvme:
            plan = _plan(bench.config, nvme, blocks, depths, nbytes, fio)
            plan.check()
        elif bench.ranks.first:
            print("tierzero: note: no drive is measured: give --nvme PATH or --config", file=sys.stderr)
        if save is not None:
            _check_writable(save)
        bench.collective(ranks, messages, seconds)
        if not bench.ranks.first:
            return
        bench.link(seconds)
        bench.adam(seconds)
        bench.compute(seconds)
        if plan is not None:
            bench.io(plan, seconds)
        if save is not None:
            bench.save(save)


class _Bench:
    """Measures part after part, with the threads that training would use."""

    def __init__(self, config: Config, ranks: Ranks, results: Results) -> None:
        self.config = config
        self.ranks = ranks
        self.results = results

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
        from ..runtime.device import choose_device

        device = choose_device(self.ranks.local_rank).torch_device
        with _progress("compute") as progress:
            self.results = replace(self.results, compute=measure(device, seconds or _SECONDS["compute"], progress))

    def collective(self, ranks: int, messages: tuple[int, ...] | None, seconds: float | None) -> None:
        from ..profiling.bench import collective, local_ranks
        from ..training.ranks import join, leave, set_threads

        plan = collective.CollectivePlan(messages or collective.SIZES, seconds or _SECONDS["collective"])
        with _progress("collective", self.ranks.first) as progress:
            if self.ranks.launched:
                with _own_cores_again():
                    join(self.ranks)
                    set_threads(self.config, self.ranks)
                    found = collective.on_group(plan, self.ranks, progress)
                    leave()
                _set_threads(self.config)
            else:
                found = local_ranks.measure(plan, ranks, progress)
        self.results = replace(self.results, collective=found)

    def save(self, path: Path) -> None:
        from ..profiling.bench.profile import machine_profile

        path.write_text(json.dumps(machine_profile(self.results).as_json(), indent=1) + "\n", encoding="utf-8")


@contextmanager
def _measuring(config: Path | None, as_json: bool, plot: Path | None, together: bool = False) -> Iterator[_Bench]:
    """Prints what was measured inside. Ctrl-C and SIGTERM end it at once, and files are removed.

    ``together``: torchrun's ranks all take part; else the first one measures alone.
    """
    with reported():
        from ..config import Config
        from ..profiling.bench.pictures import check_drawable, draw
        from ..profiling.bench.report import Results, lines
        from ..training.ranks import Ranks
        from ..training.stopping import StopSignals

        ranks = Ranks.from_environment()
        if not (ranks.first or together):
            raise SystemExit(0)
        if plot is not None:
            check_drawable(plot)
        loaded = Config.load(config) if config is not None else Config.from_dict({})
        _set_threads(loaded)
        bench = _Bench(loaded, ranks, Results(datetime.now().astimezone().isoformat(timespec="seconds")))
        with StopSignals(quiet=True) as stop, stop.at_once():
            yield bench
        if not ranks.first:
            return
        if plot is not None:
            draw(bench.results, plot)
        print(json.dumps(bench.results.as_json()) if as_json else "\n".join(lines(bench.results)))


def _set_threads(config: Config) -> None:
    """As for one rank that has the node for itself."""
    from ..training.ranks import Ranks, set_threads

    set_threads(config, Ranks())


@contextmanager
def _own_cores_again() -> Iterator[None]:
    """Undoes at the end that a rank was bound to its share of the cores, for the threads that there are by then."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        yield
    finally:
        if before is not None:
            for thread in os.listdir("/proc/self/task"):
                with suppress(OSError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread), before)


def _check_writable(path: Path) -> None:
    """Raises ConfigError before minutes of measuring are lost."""
    from ..errors import ConfigError

    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir():
        raise ConfigError(f"bench all: --save: {path} cannot be written; name a file in a folder that exists")


def _plan(
    config: Config,
    nvme: list[Path] | None,
    blocks: Any,
    depths: Any,
    nbytes: int | None,
    fio: bool,
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
        beside_fio=fio,
    )


@contextmanager
def _progress(title: str, wanted: bool = True) -> Iterator[Progress]:
    """A bar where standard error is a terminal, else nothing."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, done: bar.update(task, completed=done, description=what)
