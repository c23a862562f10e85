"""Copies between host and device as the runtime makes them, and from host memory to host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tierzero.profiling.bench.timing import Progress, Spread, rate
from tierzero.runtime.device import CudaDevice
from tierzero.tiers.free_memory import available_bytes

_MOST = 256 << 20
"""Bytes of a tensor: larger than the caches."""


@dataclass(frozen=True)
class DeviceCopies:
    """Bytes per second. ``both``: in the two directions together."""

    to_device: Spread
    to_host: Spread
    both: Spread
    pageable_to_device: Spread
    pageable_to_host: Spread


@dataclass(frozen=True)
class LinkReport:
    """``host``: bytes copied in host memory per second, read and written counted once. ``device`` is None where
    devices have no memory of their own.
    """

    nbytes: int
    threads: int
    host: Spread
    device: DeviceCopies | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        rows = {"host_copy": self.host}
        if self.device is not None:
            rows |= vars(self.device)
        return {
            "bytes": self.nbytes,
            "threads": self.threads,
            "bytes_per_s": {name: spread.as_json() for name, spread in rows.items()},
        }


def measure(seconds: float, progress: Progress) -> LinkReport:
    """Within about ``seconds``; the host's copy with PyTorch's threads as they are set now."""
    available = available_bytes()
    nbytes = max(1 << 20, min(_MOST, available // 8, int(seconds * (256 << 20)))) // 4096 * 4096
    has_device = torch.cuda.is_available()
    progress("host memory", 0.0)
    source = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(0)
    host = rate(lambda: target.copy_(source), nbytes, seconds / 6 if has_device else seconds)
    notes = (
        () if has_device else ("link: devices have no memory of their own here; this is host memory to host memory",)
    )
    device = _device_copies(source, seconds / 6, progress) if has_device else None
    return LinkReport(nbytes, torch.get_num_threads(), host, device, notes)


def _device_copies(pageable: torch.Tensor, seconds: float, progress: Progress) -> DeviceCopies:
    """Between pinned memory and the device on the runtime's two streams, then from memory that is not pinned."""
    device, nbytes = CudaDevice(torch.cuda.current_device()), pageable.numel()
    allocator = device.host_allocator()
    pinned = [allocator.allocate(nbytes).fill_(1) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]

    def inwards() -> None:
        device.copy_in(there[0], pinned[0], device.now())

    def outwards() -> None:
        device.copy_out(pinned[1], there[1], device.now())

    def at_once() -> None:
        now = device.now()
        device.copy_in(there[0], pinned[0], now)
        device.copy_out(pinned[1], there[1], now)

    ways: list[tuple[str, Callable[[], object], int]] = [
        ("to_device", inwards, 1),
        ("to_host", outwards, 1),
        ("both", at_once, 2),
        ("pageable_to_device", lambda: there[0].copy_(pageable), 1),
        ("pageable_to_host", lambda: pageable.copy_(there[0]), 1),
    ]
    found = {}
    try:
        for number, (name, way, tensors) in enumerate(ways):
            progress(name.replace("_", " "), (number + 1) / 6)
            found[name] = rate(way, tensors * nbytes, seconds, device.synchronize)
    finally:
        device.synchronize()
        for tensor in pinned:
            allocator.free(tensor)
    return DeviceCopies(**found)
