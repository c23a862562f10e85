"""A machine that nobody has measured: round figures of common hardware. Plans for it can be compared, not trusted."""

from __future__ import annotations

from tierzero.planner.machine import (
    Accelerator,
    AttentionRate,
    ComputeRates,
    Drive,
    Dtype,
    Host,
    MachineProfile,
    MatmulRate,
)

_FLOPS_OF_CORE: dict[Dtype, float] = {"bf16": 60e9, "fp16": 30e9, "fp32": 60e9}
_FLOPS_OF_DEVICE: dict[Dtype, float] = {"bf16": 80e12, "fp16": 80e12, "fp32": 20e12}


def generic_machine(
    cores: int, memory_bytes: int, device_memory: int | None = None, devices: int = 1
) -> MachineProfile:
    """With ``device_memory`` bytes on each of ``devices``; None: the cores compute."""
    flops = _FLOPS_OF_CORE if device_memory is None else _FLOPS_OF_DEVICE
    times = cores if device_memory is None else 1
    pointwise = 5e9 * min(cores, 8) if device_memory is None else 600e9
    return MachineProfile(
        name="a generic machine",
        date="not measured",
        source="round figures of common hardware; measure yours with tierzero bench all --save",
        host=Host(name="generic", cores=cores, memory_bytes=memory_bytes, copy_bytes=10e9),
        device=None
        if device_memory is None
        else Accelerator(
            name="generic",
            count=devices,
            memory_bytes=device_memory,
            to_device=20e9,
            to_host=20e9,
            both=30e9,
        ),
        compute={
            dtype: ComputeRates(
                matmul=(MatmulRate(rows=1024, width=2048, flops=rate * times),),
                attention=(AttentionRate(length=1024, flops=rate * times / 3),),
                pointwise_bytes=pointwise,
                operation_s=1e-5,
            )
            for dtype, rate in flops.items()
        },
        adam={1: 0.8e9, max(2, cores): 0.8e9 * min(max(2, cores), 4)},
        drives=(Drive(name="generic", read=2.5e9, write=2e9, mixed=2e9),),
    )
