"""Pictures of what was measured; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tierzero.errors import ConfigError
from tierzero.profiling.bench.adam import AdamReport
from tierzero.profiling.bench.collective import OPS, CollectiveReport
from tierzero.profiling.bench.compute import ComputeReport
from tierzero.profiling.bench.io import IoTarget
from tierzero.profiling.bench.link import LinkReport
from tierzero.profiling.bench.report import Results, size

_WIDTH, _HEIGHT = 5.5, 3.6
_Draw = Callable[[Any], None]
"""Takes matplotlib's axes."""


def check_drawable(path: Path) -> None:
    """Raises ConfigError where a picture cannot be drawn, or not into ``path``."""
    if find_spec("matplotlib") is None:
        raise ConfigError("bench: --plot needs matplotlib: pip install 'tierzero[plot]'")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"bench: --plot: {path.absolute().parent} does not exist; create it or name another file")


def draw(results: Results, path: Path) -> None:
    """All parts in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(results)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained", squeeze=False
    )
    for axis, panel in zip(grid.flat, panels, strict=False):
        panel(axis)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"bench: --plot: {path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _panels(results: Results) -> list[_Draw]:
    found: list[_Draw] = []
    for target in results.io.targets if results.io is not None else ():
        found += [partial(_io_rates, target), partial(_io_latencies, target)]
    if results.adam is not None:
        found.append(partial(_adam, results.adam))
    if results.link is not None:
        found.append(partial(_link, results.link))
    if results.compute is not None:
        found += [partial(_compute, results.compute, dtype) for dtype in results.compute.by_dtype]
    if results.collective is not None:
        found.append(partial(_collective, results.collective))
    return found


def _io_rates(target: IoTarget, axis: Any) -> None:
    """By size of block at the largest depth, every direction; buffered dashed."""
    depth = max(row.point.depth for row in target.rows)
    for op in ("read", "write", "mixed"):
        for direct in (True, False):
            rows = [r for r in target.rows if (r.op, r.point.direct, r.point.depth) == (op, direct, depth)]
            if rows:
                style = "-" if direct else "--"
                label = op if direct else f"{op}, buffered"
                rates = [row.rate.median / 1e9 for row in rows]
                axis.plot([size(row.point.block) for row in rows], rates, style, marker="o", label=label)
    axis.set(title=f"{target.title}, {depth} in flight", xlabel="block", ylabel="GB/s", ylim=(0, None))
    axis.legend(frameon=False, fontsize="small")


def _io_latencies(target: IoTarget, axis: Any) -> None:
    """Of reads by depth for every size of block: the median, and up to the 99th percentile."""
    direct = any(row.point.direct for row in target.rows)
    rows = [row for row in target.rows if row.op == "read" and row.point.direct == direct]
    for block in sorted({row.point.block for row in rows}):
        own = [row for row in rows if row.point.block == block]
        middle = [1e3 * row.latency[0] for row in own]
        above = [1e3 * (row.latency[2] - row.latency[0]) for row in own]
        depths = [str(row.point.depth) for row in own]
        axis.errorbar(depths, middle, yerr=[[0.0] * len(own), above], marker="o", capsize=3, label=size(block))
    axis.set(title="a read, median to p99", xlabel="in flight", ylabel="ms", yscale="log")
    axis.legend(frameon=False, fontsize="small")


def _adam(report: AdamReport, axis: Any) -> None:
    bars = axis.bar([str(n) for n in report.by_threads], [s.median / 1e9 for s in report.by_threads.values()])
    axis.bar_label(bars, fmt="%.2f", padding=3)
    axis.set(title="Adam, bf16 training state", xlabel="threads", ylabel="Gparam/s")


def _link(report: LinkReport, axis: Any) -> None:
    rows = {"host to host": report.host} | (vars(report.device) if report.device is not None else {})
    bars = axis.barh([name.replace("_", " ") for name in rows], [spread.median / 1e9 for spread in rows.values()])
    axis.bar_label(bars, fmt="%.1f", padding=3)
    axis.set(title="copies", xlabel="GB/s")


def _compute(report: ComputeReport, dtype: str, axis: Any) -> None:
    figures = report.by_dtype[dtype]
    for width in sorted({figure.width for figure in figures.matmul}):
        own = sorted((f.rows, f.flops.median / 1e12) for f in figures.matmul if f.width == width)
        axis.plot([str(rows) for rows, _ in own], [rate for _, rate in own], marker="o", label=f"width {width}")
    axis.set(title=f"products in {dtype}", xlabel="rows", ylabel="Tflop/s", ylim=(0, None))
    axis.legend(frameon=False, fontsize="small")


def _collective(report: CollectiveReport, axis: Any) -> None:
    for op in OPS:
        by_size = report.by_size(op)
        rates = [spread.median / 1e9 for spread in by_size.values()]
        axis.plot([size(nbytes) for nbytes in by_size], rates, marker="o", label=op.replace("_", "-"))
    axis.set(title=f"{report.backend}, {report.ranks} ranks", xlabel="message", ylabel="GB/s", ylim=(0, None))
    axis.legend(frameon=False, fontsize="small")
