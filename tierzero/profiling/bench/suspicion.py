"""When a drive's figure is not the drive's: a cache answered, or the figure is above what its kind can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierzero.profiling.bench.names import BlockDevice

_CACHED = 1.5
"""Times the rate that is known to be the drive's."""
_SLOWED = 0.6
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_CEILINGS = {"hard disk": 0.6e9, "SCSI or SATA drive": 2.4e9, "NVMe drive": 16e9}
"""Bytes per second beyond which no single drive of the kind goes: a hard disk's outer tracks with room to spare, two
lanes of SAS-3, four lanes of PCIe 5.0."""


def of_file_system(path: str, device: BlockDevice) -> str | None:
    if device.file_system not in _MEMORY_FILE_SYSTEMS:
        return None
    return f"{path}: {device.file_system} lies in memory: these rates are no drive's; name a path on one"


def of_shared_drive(names: Sequence[str]) -> str | None:
    """``names``: of the device behind each path."""
    shared = sorted({name for name in names if names.count(name) > 1})
    if not shared:
        return None
    return f"several paths lie on {', '.join(shared)}: striping over them adds nothing; give one path per drive"


def of_page_cache(path: str, buffered_read: float, direct_read: float) -> str | None:
    """Both at the same block size and depth."""
    if buffered_read <= _CACHED * direct_read:
        return None
    return (
        f"{path}: buffered reads came at {_gb(buffered_read)}, with O_DIRECT at {_gb(direct_read)}: the page cache "
        "answered part of them; rely on the latter"
    )


@dataclass(frozen=True)
class Reread:
    """Bytes per second of reading ``small_bytes`` over and over, and of going through all of ``whole_bytes``."""

    small_bytes: int
    small: float
    whole_bytes: int
    whole: float


def of_rereading(path: str, found: Reread) -> str | None:
    if found.small <= _CACHED * found.whole or found.small_bytes >= found.whole_bytes:
        return None
    return (
        f"{path}: {found.small_bytes / 1e6:,.0f} MB read over and over come at {_gb(found.small)}, all "
        f"{found.whole_bytes / 1e6:,.0f} MB at {_gb(found.whole)}: a cache in the drive or the hypervisor keeps what "
        "was touched last; state larger than that cache sees the lower rate"
    )


def of_ceiling(path: str, device: BlockDevice, op: str, rate: float) -> str | None:
    """The ceilings hold for drives that are what they seem, not for a hypervisor's."""
    ceiling = None if device.is_virtual else _CEILINGS.get(device.kind)
    if ceiling is None or rate <= ceiling:
        return None
    return (
        f"{path}: {op} at {_gb(rate)} is more than one {device.kind} can do ({_gb(ceiling)}): a cache answers, or "
        f"{device.name} is several drives"
    )


def of_memory(path: str, device: BlockDevice, op: str, rate: float, host_copy: float | None) -> str | None:
    """``host_copy``: what the host copies in its own memory, where known."""
    if not device.is_virtual or host_copy is None or rate <= host_copy:
        return None
    return (
        f"{path}: {op} at {_gb(rate)} is more than this host copies in its memory ({_gb(host_copy)}): the hypervisor's "
        "memory answers, not a drive"
    )


def of_slowing(path: str, first: float, last: float) -> str | None:
    """The rate of writes in the first and in the last round."""
    if last >= _SLOWED * first:
        return None
    return (
        f"{path}: writes began at {_gb(first)} and ended at {_gb(last)}: the drive's write cache is used up, or "
        "something else uses the drive; a long run sees the lower rate: measure with more --seconds and a larger --size"
    )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
