"""Memory that may still be taken: the least of what the machine, its control groups and resource limits leave."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil
import pytest

from tierzero.profiling.memory_cap import run_capped
from tierzero.tiers import free_memory
from tierzero.tiers.free_memory import available_bytes, total_bytes

MIB = 2**20
UNLIMITED = {1: str(2**63 - 4096), 2: "max"}
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


class Groups:
    """A tree of control groups of one version, of which this process is in ``/job/step``."""

    def __init__(self, root: Path, version: int) -> None:
        self.version = version
        self.top = root / "cgroup" / ("memory" if version == 1 else "")
        process = root / "process"
        process.mkdir()
        listed = "4:memory:/job/step\n5:cpu:/\n" if version == 1 else "0::/job/step\n"
        (process / "cgroup").write_text(listed)

    def write(self, group: str, limit: int | None, used: int = 0, cached: int = 0) -> None:
        folder = self.top / group
        folder.mkdir(parents=True, exist_ok=True)
        names = FILES[self.version]
        (folder / names[0]).write_text(UNLIMITED[self.version] if limit is None else f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


@pytest.fixture(params=[1, 2])
def groups(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(free_memory, "PROCESS", tmp_path / "process")
    return Groups(tmp_path, request.param)


def test_the_tightest_group_counts_without_its_page_cache(groups: Groups) -> None:
    groups.write("job/step", None, used=5 * MIB)
    groups.write("job", 64 * MIB, used=50 * MIB, cached=10 * MIB)
    assert available_bytes() == 24 * MIB
    assert available_bytes(processes=4) == 6 * MIB
    assert total_bytes() == 64 * MIB
    groups.write("job/step", 32 * MIB, used=20 * MIB)
    assert (available_bytes(), total_bytes()) == (12 * MIB, 32 * MIB)
    groups.write("job/step", 32 * MIB, used=33 * MIB)
    assert available_bytes() == 0


def test_in_a_container_the_root_is_its_own(groups: Groups) -> None:
    """The path is the host's, and does not exist here."""
    groups.write("", 16 * MIB, used=MIB)
    assert available_bytes() == 15 * MIB


def test_without_limits_it_is_the_machines(groups: Groups) -> None:
    groups.write("job/step", None)
    assert total_bytes() == psutil.virtual_memory().total
    assert available_bytes() > psutil.virtual_memory().available // 2


def test_resource_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().vms
    limits = {resource.RLIMIT_AS: used + 64 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(free_memory.resource, "getrlimit", lambda key: (limits[key], limits[key]))
    assert 32 * MIB < available_bytes() <= 64 * MIB


SHARD = """
import tierzero as tz
from torch import nn
with tz.empty_init():
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(16)))
try:
    tz.shard(model, tz.Config.from_dict({}))
except tz.BudgetError as error:
    print("refused", error)
"""


@pytest.mark.long
def test_a_model_too_large_for_its_container_is_refused_instead_of_killed() -> None:
    done = run_capped([sys.executable, "-c", SHARD], 1536 * MIB, dict(os.environ))
    assert (done.returncode, done.killed) == (0, False), done.stderr
    assert done.stdout.startswith("refused")
