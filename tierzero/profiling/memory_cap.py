"""A limit on a command's memory that the kernel enforces: a control group where that is allowed, else a resource
limit."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Capped:
    """How a capped command ended. ``peak`` is what the kernel counted (bytes), None where only a resource limit held
    it.
    """

    returncode: int
    stdout: str
    stderr: str
    peak: int | None
    killed: bool


def run_capped(command: Sequence[str], limit: int, env: dict[str, str] | None = None) -> Capped:
    """Runs ``command`` with at most ``limit`` bytes of memory, page cache included under a control group."""
    group = _make_group(limit)
    if group is None:
        return _run(
            command, env, lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)), lambda: (None, False)
        )
    try:
        return _run(command, env, lambda: _join(group), lambda: _counted(group))
    finally:
        _remove(group)


def enforced_by() -> str:
    """What `run_capped` uses here, in words."""
    group = _make_group(1 << 30)
    if group is None:
        return "RLIMIT_DATA"
    _remove(group)
    return "memory control group"


def _run(
    command: Sequence[str],
    env: dict[str, str] | None,
    enter: Callable[[], None],
    count: Callable[[], tuple[int | None, bool]],
) -> Capped:
    done = subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=enter, check=False)
    peak, killed = count()
    return Capped(done.returncode, done.stdout, done.stderr, peak, killed)


def _make_group(limit: int) -> Path | None:
    for parent, key in _own_groups():
        group = parent / f"tierzero-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / key).write_text(str(limit))
            except OSError:
                group.rmdir()
                continue
            return group
    return None


def _own_groups() -> list[tuple[Path, str]]:
    """This process's memory group in the first and second version of the hierarchy, with the name of the limit."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append((_ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
            elif number == "0":
                found.append((_ROOT / path.lstrip("/"), "memory.max"))
    return found


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _counted(group: Path) -> tuple[int | None, bool]:
    peak = None
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with suppress(OSError, ValueError):
            peak = int((group / name).read_text())
    killed = False
    for name in ("memory.oom_control", "memory.events"):
        with suppress(OSError):
            lines = dict(line.split() for line in (group / name).read_text().splitlines())
            killed = killed or int(lines.get("oom_kill", 0)) > 0
    return peak, killed


def _remove(group: Path) -> None:
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
