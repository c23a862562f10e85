"""What the machine and its parts call themselves, from /proc and /sys."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierzero.tiers.free_memory import total_bytes

_ESCAPED = re.compile(r"\\([0-7]{3})")
_VIRTUAL_MODELS = ("qemu", "virtual", "vmware", "msft", "google", "amazon", "persistentdisk")


@dataclass(frozen=True)
class BlockDevice:
    """What a path lies on. ``name``: of the device in /sys, or the source of the mount where it has none there."""

    name: str
    model: str
    kind: str
    file_system: str
    is_virtual: bool

    @property
    def title(self) -> str:
        return f"{self.model} ({self.name}, {self.file_system})" if self.model else f"{self.name} ({self.file_system})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cpu_model(cpuinfo: str | None = None) -> str:
    """``cpuinfo``: the text of /proc/cpuinfo."""
    if cpuinfo is None:
        cpuinfo = _read(Path("/proc/cpuinfo"))
    for key in ("model name", "Model", "Hardware", "cpu"):
        found = re.search(rf"^{key}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        if found is not None:
            return " ".join(found[1].split())
    return platform.processor() or platform.machine() or "unknown"


def memory_bytes() -> int:
    return total_bytes()


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def block_device(path: Path) -> BlockDevice:
    source, file_system = mount_of(os.path.realpath(path), _read(Path("/proc/mounts")))
    folder = _device_folder(path, source)
    if folder is None:
        return BlockDevice(source, "", "unknown", file_system, False)
    name, model = folder.name, " ".join(_read(folder / "device" / "model").split())
    rotates = _read(folder / "queue" / "rotational").strip() == "1"
    is_virtual = name.startswith(("vd", "xvd")) or model.lower().startswith(_VIRTUAL_MODELS)
    return BlockDevice(name, model, kind_of(name, rotates), file_system, is_virtual)


def kind_of(name: str, rotates: bool) -> str:
    if name.startswith("nvme"):
        return "NVMe drive"
    if name.startswith(("vd", "xvd")):
        return "virtual drive"
    if name.startswith("sd"):
        return "hard disk" if rotates else "SCSI or SATA drive"
    return "block device"


def mount_of(path: str, mounts: str) -> tuple[str, str]:
    """(source, type) of the file system that holds ``path``, from the text of /proc/mounts; the last one wins."""
    best, found = -1, ("unknown", "unknown")
    for line in mounts.splitlines():
        words = [_ESCAPED.sub(lambda digits: chr(int(digits[1], 8)), word) for word in line.split(" ")]
        if len(words) < 3:
            continue
        point = words[1].rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= best:
            best, found = len(point), (words[0], words[2])
    return found


def _device_folder(path: Path, source: str) -> Path | None:
    """Of the whole drive in /sys, not of a partition."""
    number = os.stat(path).st_dev
    candidates = [
        Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"),
        Path("/sys/class/block", Path(source).name),
    ]
    for candidate in candidates:
        if candidate.exists():
            folder = candidate.resolve()
            return folder.parent if (folder / "partition").exists() else folder
    return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
