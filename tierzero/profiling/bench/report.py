"""What was measured, together: as JSON and as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tierzero.profiling.bench.adam import AdamReport
from tierzero.profiling.bench.collective import OPS, CollectiveReport
from tierzero.profiling.bench.compute import ComputeReport
from tierzero.profiling.bench.io import IoReport, IoRow, IoTarget
from tierzero.profiling.bench.link import LinkReport
from tierzero.profiling.bench.names import cores, cpu_model, memory_bytes


class _Part(Protocol):
    @property
    def notes(self) -> tuple[str, ...]: ...

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Results:
    """Each part that was measured."""

    date: str
    io: IoReport | None = None
    adam: AdamReport | None = None
    link: LinkReport | None = None
    compute: ComputeReport | None = None
    collective: CollectiveReport | None = None

    @property
    def parts(self) -> dict[str, _Part]:
        found: dict[str, _Part | None] = {
            "io": self.io,
            "adam": self.adam,
            "link": self.link,
            "compute": self.compute,
            "collective": self.collective,
        }
        return {name: part for name, part in found.items() if part is not None}

    @property
    def notes(self) -> list[str]:
        return [note for part in self.parts.values() for note in part.notes]

    def as_json(self) -> dict[str, Any]:
        machine = {"cpu": cpu_model(), "cores": cores(), "memory_bytes": memory_bytes()}
        parts = {name: part.as_json() for name, part in self.parts.items()}
        return {"date": self.date, "machine": machine, **parts, "notes": self.notes}


def lines(results: Results) -> list[str]:
    """Tables of all parts, and what is to be said about them."""
    found = [f"machine  {cpu_model()}, {cores()} cores, {memory_bytes() / 1e9:.0f} GB of memory"]
    found += [*_io(results.io), *_adam(results.adam), *_link(results.link)]
    found += [*_compute(results.compute), *_collective(results.collective)]
    return found + ([""] + [f"note  {note}" for note in results.notes] if results.notes else [])


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table, the first row its titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def size(nbytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes:,} B"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def _io(report: IoReport | None) -> Iterator[str]:
    for target in report.targets if report is not None else ():
        yield ""
        yield f"io  {target.title}: {', '.join(device.title for device in target.devices)}; latencies in milliseconds"
        titles = ["block", "depth", "path", *[f"{op} {what}" for op in ("read", "write", "mixed") for what in _COLUMNS]]
        by_point: dict[Any, dict[str, IoRow]] = {}
        for row in target.rows:
            by_point.setdefault(row.point, {})[row.op] = row
        rows = [titles]
        for point, by_op in by_point.items():
            cells = [size(point.block), str(point.depth), "direct" if point.direct else "buffered"]
            for op in ("read", "write", "mixed"):
                row = by_op[op]
                cells += [_giga(row.rate.median), "/".join(f"{1e3 * seconds:.1f}" for seconds in row.latency)]
            rows.append(cells)
        yield from aligned(rows)
        yield from _beside_fio(target)


def _beside_fio(target: IoTarget) -> Iterator[str]:
    if target.beside_fio:
        rows = [["block", "depth", "", "fio GB/s", "engine GB/s", "engine / fio"]]
        for row in target.beside_fio:
            point, rates = row.point, (_giga(row.fio.median), _giga(row.engine.median), f"{row.ratio:.2f}")
            rows.append([size(point.block), str(point.depth), row.op, *rates])
        yield from aligned(rows)


_COLUMNS = ("GB/s", "p50/95/99")


def _adam(report: AdamReport | None) -> Iterator[str]:
    if report is None:
        return
    yield ""
    yield f"adam  bf16 training state of {report.numel / 1e6:.0f} M parameters"
    rows = [(str(n), _giga(spread.median)) for n, spread in report.by_threads.items()]
    yield from aligned([("threads", "Gparam/s"), *rows])
    yield f"gradients taken over at {_giga(report.gradients.median)} Gparam/s"


def _link(report: LinkReport | None) -> Iterator[str]:
    if report is None:
        return
    yield ""
    yield f"link  copies of {report.nbytes / 1e6:.0f} MB"
    rows = [("host to host", _giga(report.host.median))]
    if report.device is not None:
        rows += [(name.replace("_", " "), _giga(spread.median)) for name, spread in vars(report.device).items()]
    yield from aligned([("", "GB/s"), *rows])


def _compute(report: ComputeReport | None) -> Iterator[str]:
    for dtype, figures in report.by_dtype.items() if report is not None else ():
        assert report is not None
        yield ""
        where = f"{report.threads} threads" if report.device == "cpu" else report.device
        yield f"compute  {dtype} on {where}: rows through weights from width/2 to 2 width and back, Gflop/s"
        widths = sorted({figure.width for figure in figures.matmul})
        known = {(figure.rows, figure.width): f"{figure.flops.median / 1e9:,.0f}" for figure in figures.matmul}
        rows = [
            [str(r), *[known.get((r, width), "-") for width in widths]]
            for r in sorted({figure.rows for figure in figures.matmul})
        ]
        yield from aligned([["rows \\ width", *map(str, widths)], *rows])
        lengths = ", ".join(f"{spread.median / 1e9:,.0f} (length {n})" for n, spread in figures.attention.items())
        yield f"attention {lengths} Gflop/s; elementwise {_giga(figures.pointwise_bytes.median)} GB/s"
        yield f"no operation takes less than {1e6 / figures.operations.median:.1f} microseconds"


def _collective(report: CollectiveReport | None) -> Iterator[str]:
    if report is None:
        return
    yield ""
    yield f"collective  {report.backend}, {report.ranks} ranks; GB/s of the whole tensor"
    sizes = sorted({row.nbytes for row in report.rows})
    by_op = {op: report.by_size(op) for op in OPS}
    rows = [[size(nbytes), *[_giga(by_op[op][nbytes].median) for op in OPS]] for nbytes in sizes]
    yield from aligned([["message", *(op.replace("_", "-") for op in OPS)], *rows])
