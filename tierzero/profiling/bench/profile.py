"""The machine profile that planning reads, out of what was measured."""

from __future__ import annotations

import socket
from typing import get_args

import torch

from tierzero.planner.machine import (
    Accelerator,
    AttentionRate,
    CollectiveRate,
    ComputeRates,
    Drive,
    Dtype,
    Host,
    MachineProfile,
    MatmulRate,
    Network,
)
from tierzero.profiling.bench.collective import CollectiveReport
from tierzero.profiling.bench.compute import ComputeReport
from tierzero.profiling.bench.io import IoReport, IoTarget
from tierzero.profiling.bench.link import DeviceCopies
from tierzero.profiling.bench.names import cores, cpu_model, memory_bytes
from tierzero.profiling.bench.report import Results


def machine_profile(results: Results) -> MachineProfile:
    """Medians of everything; adam, link and compute must have been measured."""
    adam, link, compute = results.adam, results.link, results.compute
    assert adam is not None
    assert link is not None
    assert compute is not None
    drives, striped = _drives(results.io)
    return MachineProfile(
        name=socket.gethostname(),
        date=results.date,
        source=f"measured by tierzero bench all, PyTorch {torch.__version__}",
        host=Host(name=cpu_model(), cores=cores(), memory_bytes=memory_bytes(), copy_bytes=link.host.median),
        device=_device(link.device),
        compute=_compute(compute),
        adam={threads: spread.median for threads, spread in adam.by_threads.items()},
        gradients=adam.gradients.median,
        drives=drives,
        striped=striped,
        network=_network(results.collective),
    )


def _device(copies: DeviceCopies | None) -> Accelerator | None:
    if copies is None:
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Accelerator(
        name=found.name,
        count=torch.cuda.device_count(),
        memory_bytes=found.total_memory,
        to_device=copies.to_device.median,
        to_host=copies.to_host.median,
        both=copies.both.median,
        pageable=min(copies.pageable_to_device.median, copies.pageable_to_host.median),
    )


def _compute(report: ComputeReport) -> dict[Dtype, ComputeRates]:
    return {
        dtype: ComputeRates(
            matmul=tuple(MatmulRate(rows=f.rows, width=f.width, flops=f.flops.median) for f in figures.matmul),
            attention=tuple(AttentionRate(length=n, flops=spread.median) for n, spread in figures.attention.items()),
            pointwise_bytes=figures.pointwise_bytes.median,
            operation_s=1 / figures.operations.median,
        )
        for dtype in get_args(Dtype)
        if (figures := report.by_dtype.get(dtype)) is not None
    }


def _drives(report: IoReport | None) -> tuple[tuple[Drive, ...], Drive | None]:
    if report is None:
        return (), None
    found = [(target, _drive(target, report.used)) for target in report.targets]
    single = tuple(drive for target, drive in found if len(target.paths) == 1)
    striped = next((drive for target, drive in found if len(target.paths) > 1), None)
    return single, striped


def _drive(target: IoTarget, used: tuple[int, int]) -> Drive:
    """At the block size and queue depth that a run uses."""
    name = " + ".join(f"{device.title} at {path}" for path, device in zip(target.paths, target.devices, strict=True))
    read, write, mixed = (target.at(op, *used).rate.median for op in ("read", "write", "mixed"))
    return Drive(name=name, read=read, write=write, mixed=mixed)


def _network(report: CollectiveReport | None) -> Network | None:
    if report is None:
        return None

    def rates(op: str) -> tuple[CollectiveRate, ...]:
        return tuple(CollectiveRate(nbytes=n, rate=spread.median) for n, spread in report.by_size(op).items())

    return Network(
        backend=report.backend,
        ranks=report.ranks,
        all_gather=rates("all_gather"),
        reduce_scatter=rates("reduce_scatter"),
        all_reduce=rates("all_reduce"),
    )
