"""Tier directories: private, one live owner, emptied at the end, cleared of dead runs; all else is left alone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierzero.errors import ConfigError
from tierzero.tiers import TierDirectory
from tierzero.tiers import directory as module

OWNER = """
import sys, time
from pathlib import Path
from tierzero.tiers import StripedFile, TierDirectory
directories = [TierDirectory.open(Path(sys.argv[1]), int(rank)) for rank in sys.argv[2].split(",")]
files = [StripedFile([directory], 1 << 20, block_size=4096) for directory in directories]
print("ready", flush=True)
{end}
"""
WAIT = "time.sleep(600)"


@contextlib.contextmanager
def owner(path: Path, ranks: str = "0", end: str = WAIT) -> Iterator[subprocess.Popen[str]]:
    """A process that owns directories with files below ``path``."""
    command = [sys.executable, "-c", OWNER.format(end=end), str(path), ranks]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def below(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def test_it_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    directory = TierDirectory.open(tmp_path, 3)
    fd = directory.create_file("state")
    assert below(tmp_path) == {"tierzero", "tierzero/rank-3", "tierzero/rank-3.lock", "tierzero/rank-3/state.tier"}
    assert directory.path == tmp_path / "tierzero" / "rank-3"
    for found in (directory.path, directory.path.parent):
        assert stat.S_IMODE(found.stat().st_mode) == 0o700
    for file in (directory.file_path("state"), tmp_path / "tierzero/rank-3.lock"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (tmp_path / "tierzero/rank-3.lock").read_text().split()[0] == str(os.getpid())
    os.close(fd)
    directory.close()
    directory.close()
    assert below(tmp_path) == set()


def test_a_second_owner_in_the_process_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    directories = [TierDirectory.open(tmp_path, 0) for _ in range(3)]
    assert [directory.path.name for directory in directories] == ["rank-0", "rank-0.1", "rank-0.2"]
    os.close(directories[2].create_file("state"))
    directories[1].close()
    assert directories[2].file_path("state").exists()
    again = TierDirectory.open(tmp_path, 0)
    assert again.path.name == "rank-0.1"
    for directory in (*directories, again):
        directory.close()
    assert below(tmp_path) == set()


def test_a_live_owner_is_named_and_left_alone(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        before = below(tmp_path)
        with pytest.raises(ConfigError, match=rf"tiers\.nvme: .*rank-0 is in use by process {process.pid} \(since 20"):
            TierDirectory.open(tmp_path, 0)
        other = TierDirectory.open(tmp_path, 1)  # another rank beside it
        other.close()
        assert below(tmp_path) == before


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    with owner(tmp_path, "0,0,1,5") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = {f"tierzero/{name}/state.tier" for name in ("rank-0", "rank-0.1", "rank-1", "rank-5")}
    assert left < below(tmp_path)
    directory = TierDirectory.open(tmp_path, 0)
    assert below(tmp_path) == {"tierzero", "tierzero/rank-0", "tierzero/rank-0.lock"}
    directory.close()
    assert below(tmp_path) == set()


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise ValueError('an error of the user')"])
def test_a_process_that_ends_by_itself_cleans_up(tmp_path: Path, end: str) -> None:
    with owner(tmp_path, end=end) as process:
        process.wait(60)
    assert below(tmp_path) == set()


def test_a_forked_child_neither_cleans_nor_keeps_the_lock(tmp_path: Path) -> None:
    """The child outlives its killed parent; the next run must find the directory free."""
    end = "import os\nif os.fork() == 0:\n    directories[0].close()\n    time.sleep(600)\n    os._exit(0)\n" + WAIT
    command = [sys.executable, "-W", "ignore", "-c", OWNER.format(end=end), str(tmp_path), "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while not (child := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert (tmp_path / "tierzero/rank-0/state.tier").exists()
        process.kill()
        process.wait()
        os.kill(int(child[0]), 0)  # still there
        TierDirectory.open(tmp_path, 0).close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.nvme: .*nowhere does not exist"):
        TierDirectory.open(tmp_path / "nowhere", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        TierDirectory.open(tmp_path / "file", 0)
    with pytest.raises(ConfigError, match="cannot be used: File name too long"):
        TierDirectory.open(tmp_path / ("n" * 300), 0)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_path_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module.os, "mkdir", refuse)  # root may write anywhere: let the system call refuse
    with pytest.raises(ConfigError, match=rf"tiers\.nvme: .*cannot be written to: {os.strerror(code)}"):
        TierDirectory.open(tmp_path, 0)
    assert below(tmp_path) == set()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "rank-0").mkdir(parents=True)
    (outside / "rank-0" / "precious.tier").write_text("precious")
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    (nvme / "tierzero").symlink_to(outside)
    with pytest.raises(ConfigError, match="link"):
        TierDirectory.open(nvme, 0)
    (nvme / "tierzero").unlink()
    (nvme / "tierzero").mkdir()
    (nvme / "tierzero" / "rank-0").symlink_to(outside / "rank-0")
    with pytest.raises(ConfigError, match=r"tiers\.nvme"):
        TierDirectory.open(nvme, 0)
    (nvme / "tierzero" / "rank-1").symlink_to(outside / "rank-0")
    (nvme / "tierzero" / "rank-1.lock").touch()
    TierDirectory.open(nvme, 2).close()
    assert (outside / "rank-0" / "precious.tier").read_text() == "precious"


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tierzero").mkdir()
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "tierzero" / "rank-0.lock").symlink_to(target)
    with pytest.raises(ConfigError, match=r"tiers\.nvme"):
        TierDirectory.open(tmp_path, 0)
    assert target.read_text() == "precious"


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """Also in a directory that looks like ours, whether a run's own or a dead one's."""
    kept = []
    for name in ("rank-0", "rank-7", "notes"):
        folder = tmp_path / "tierzero" / name
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("precious")
        kept.append(folder / "notes.txt")
    (tmp_path / "tierzero" / "rank-7.lock").touch()
    directory = TierDirectory.open(tmp_path, 0)
    os.close(directory.create_file("state"))
    directory.close()
    assert all(path.read_text() == "precious" for path in kept)
    assert not (tmp_path / "tierzero/rank-0/state.tier").exists()


def test_closing_one_run_while_another_starts_is_safe(tmp_path: Path) -> None:
    """Two processes take turns on the same path many times: the lock, the folder and its removal race."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tierzero.tiers import TierDirectory\n"
        "for _ in range(200):\n    TierDirectory.open(Path(sys.argv[1]), int(sys.argv[2])).close()\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(rank)]) for rank in (0, 1)]
    assert [racer.wait(120) for racer in racers] == [0, 0]
    assert below(tmp_path) == set()


def test_free_space_is_that_of_the_file_system(tmp_path: Path) -> None:
    directory = TierDirectory.open(tmp_path, 0)
    found = os.statvfs(tmp_path)
    assert abs(directory.free_bytes() - found.f_bavail * found.f_frsize) < 1 << 30
    directory.close()
