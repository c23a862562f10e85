"""How much room the file systems under tier files have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierzero.tiers.directory import free_bytes

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class DriveRoom:
    """One file system: bytes ``free``, and bytes ``wanted`` of it. ``in_memory``: what is written there takes host
    memory.
    """

    free: int
    wanted: int
    in_memory: bool = False


def rooms_of(wanted: Mapping[Path, int]) -> list[DriveRoom]:
    """Of the file systems of these paths, each with the bytes that are wanted there; paths on one share its room.
    Raises OSError.
    """
    totals: dict[int, int] = {}
    paths: dict[int, Path] = {}
    for path, nbytes in wanted.items():
        device = os.stat(path).st_dev
        totals[device] = totals.get(device, 0) + nbytes
        paths.setdefault(device, path)
    return [DriveRoom(free_bytes(path), totals[device], lies_in_memory(path)) for device, path in paths.items()]


def lies_in_memory(path: Path) -> bool:
    """Whether the path's file system is known to keep its files in host memory."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    for mount in mounts:
        fields, _, after = mount.partition(" - ")
        if fields.split()[2:3] == [wanted]:
            return after.split()[0] in _IN_MEMORY
    return False
