"""Memory that this process may still take: of the machine, of the control groups it is in (containers, batch systems),
and of its own resource limits. Whoever asks the machine alone is killed in a container, without a word.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class _Names:
    """The files of one version of control groups."""

    limit: str
    used: str
    cached: tuple[str, str]
    """Keys of ``memory.stat``: page cache, which the kernel takes back before it kills."""


_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_SECOND = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(processes: int = 1) -> int:
    """What each of ``processes`` alike on this machine can take without swapping and without being killed."""
    shared = int(psutil.virtual_memory().available)
    for folder, names in _groups():
        with suppress(OSError, ValueError):
            shared = min(shared, _left(folder, names))
    return max(0, min(shared // processes, *_own_limits()))


def total_bytes() -> int:
    """The machine's memory, or what its control groups allow of it."""
    total = int(psutil.virtual_memory().total)
    for folder, names in _groups():
        with suppress(OSError, ValueError):
            total = min(total, int((folder / names.limit).read_text()))
    return total


def _groups() -> Iterator[tuple[Path, _Names]]:
    """This process's memory groups and all above them, each of which may have a limit. In a container the paths may be
    those of the host: what exists counts, and the root, which is the container's own.
    """
    with suppress(OSError):
        for line in (PROCESS / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, names = GROUPS / "memory", _FIRST
            elif number == "0":
                root, names = GROUPS, _SECOND
            else:
                continue
            here = root / path.lstrip("/")
            yield from ((folder, names) for folder in (here, *here.parents) if folder.is_relative_to(root))


def _left(folder: Path, names: _Names) -> int:
    """Raises ValueError where there is no limit ("max")."""
    limit, used = int((folder / names.limit).read_text()), int((folder / names.used).read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return limit - used + sum(int(stat.get(key, 0)) for key in names.cached)


def _own_limits() -> Iterator[int]:
    yield 1 << 62
    with suppress(OSError):
        status = dict(line.split(":", 1) for line in (PROCESS / "status").read_text().splitlines())
        for limit, key in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft = resource.getrlimit(limit)[0]
            if soft != resource.RLIM_INFINITY and key in status:
                yield soft - int(status[key].split()[0]) * 1024
