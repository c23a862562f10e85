"""Private directories for tier files: one owner each, emptied at the end and when a dead run's leavings are found."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
import time
import weakref
from datetime import datetime
from pathlib import Path

from tierzero.errors import ConfigError

_FOLDER = "tierzero"
_RANK = re.compile(r"rank-\d+(\.\d+)?")
_SUFFIX = ".tier"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIVE_OWNER_WAIT_S = 0.5
_SWEEP_WAIT_S = 20.0

_registry_lock = threading.Lock()
_owned: set[tuple[str, str]] = set()
"""(real path, name) of the directories that this process owns."""


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write below ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def lasting_name(lasting: str, rank: int) -> str:
    """Of the directory that keeps what `TierDirectory.open` calls lasting."""
    return f"{lasting}-rank-{rank}"


def lasting_folder(path: Path, lasting: str, rank: int) -> Path:
    """Where that directory is."""
    return path / _FOLDER / lasting_name(lasting, rank)


class TierDirectory:
    """``<path>/tierzero/rank-<r>``, owned by this process until `close`. Make one with `TierDirectory.open`.

    The owner holds an flock on ``rank-<r>.lock`` beside it; the kernel drops that lock when the process dies, however
    it dies. Files in it come from `create_file` alone, and nothing but them is ever deleted.
    """

    def __init__(self, path: Path, name: str, folder_fd: int, lock_fd: int, keep: bool = False) -> None:
        self.path = path / _FOLDER / name
        self.root = path
        """The path that the user gave."""
        self.keep = keep
        """The files outlive the owner."""
        self._name = name
        self._folder_fd = folder_fd
        self._lock_fd = lock_fd
        self._fd = -1
        self._pid = os.getpid()
        self._closed = False
        self._key = (os.path.realpath(path), name)

    @classmethod
    def open(cls, path: Path, rank: int, lasting: str | None = None, existing: bool = False) -> TierDirectory:
        """Takes ``rank-<rank>`` below ``path``, or ``rank-<rank>.1``, ``.2``... where this process owns it already.

        With ``lasting`` it is ``<lasting>-rank-<rank>`` (ConfigError where this process owns it), which no other run
        removes and which stays; ``existing`` leaves in it what is there.

        Removes what dead runs have left below ``path``. Raises ConfigError where the path is missing, not writable, or
        in use by another live process.
        """
        path = Path(path)
        folder_fd, name, lock_fd = _own(path, rank, lasting)
        directory = cls(path, name, folder_fd, lock_fd, lasting is not None)
        try:
            directory._prepare(existing)
        except OSError as error:
            directory.close()
            raise ConfigError(f"tiers.nvme: {directory.path} cannot be used: {error.strerror}") from error
        _live.add(directory)
        atexit.register(directory.close)
        return directory

    def _prepare(self, existing: bool) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._name, 0o700, dir_fd=self._folder_fd)
        self._fd = os.open(self._name, _OPEN_DIRECTORY, dir_fd=self._folder_fd)
        os.fchmod(self._fd, 0o700)
        if not existing:
            _remove_tier_files(self._fd)
        _sweep(self._folder_fd)

    def create_file(self, name: str) -> int:
        """A new empty file (0600), open for reading and writing; returns its descriptor. ``name`` gets the suffix
        ``.tier``.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name + _SUFFIX, flags, 0o600, dir_fd=self._fd)

    def reopen_file(self, name: str, flags: int) -> int:
        """Another descriptor of a file that `create_file` made, for reading and writing, with ``flags`` added."""
        return os.open(name + _SUFFIX, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=self._fd)

    def remove_file(self, name: str) -> None:
        """Removes a file that `create_file` made; its open descriptors stay valid."""
        os.unlink(name + _SUFFIX, dir_fd=self._fd)

    def file_path(self, name: str) -> Path:
        """Where the file is, for messages."""
        return self.path / (name + _SUFFIX)

    def free_bytes(self) -> int:
        """Bytes that can still be written here."""
        return free_bytes(self.root)

    def close(self) -> None:
        """Removes the tier files, the directory and the lock. Safe to call twice; does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._fd >= 0:
            if not self.keep:
                _remove_tier_files(self._fd)
            os.close(self._fd)
            # Somebody else's file in it keeps the directory.
            with contextlib.suppress(OSError):
                os.rmdir(self._name, dir_fd=self._folder_fd)
        with contextlib.suppress(OSError):
            os.unlink(self._name + ".lock", dir_fd=self._folder_fd)
        os.close(self._lock_fd)
        os.close(self._folder_fd)
        with contextlib.suppress(OSError):
            os.rmdir(self.root / _FOLDER)
        with _registry_lock:
            _owned.discard(self._key)


_live: weakref.WeakSet[TierDirectory] = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()  # another thread of the parent may have held it
    # An flock belongs to the open file, which a forked child shares: a child that outlives its parent would keep a dead
    # run's directory locked.
    for directory in list(_live):
        if not directory._closed:
            with contextlib.suppress(OSError):
                os.close(directory._lock_fd)
            directory._closed = True
    _owned.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def _own(path: Path, rank: int, lasting: str | None) -> tuple[int, str, int]:
    """(descriptor of the folder, name, descriptor of the lock) of a directory that is now this process's own."""
    for _ in range(100):
        try:
            folder_fd = _open_folder(path)
            try:
                return folder_fd, *_take_lock(path, folder_fd, rank, lasting)
            except BaseException:
                os.close(folder_fd)
                raise
        except FileNotFoundError:  # another rank's close has just removed the empty folder
            continue
    raise ConfigError(f"tiers.nvme: {path / _FOLDER} disappears as soon as it is made; name another path")


def _open_folder(path: Path) -> int:
    """A descriptor of ``path/tierzero``, created (0700) where it is missing."""
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise ConfigError(f"tiers.nvme: {path} does not exist; create it or name another path") from None
    except OSError as error:  # a name that is too long, a folder above it that may not be entered
        raise ConfigError(f"tiers.nvme: {path} cannot be used: {error.strerror}; name another path") from error
    if not is_directory:
        raise ConfigError(f"tiers.nvme: {path} is not a directory; create it or name another path")
    folder = path / _FOLDER
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        return os.open(folder, _OPEN_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ConfigError(f"tiers.nvme: {folder} is a link or a file; remove it or name another path") from error
        raise ConfigError(f"tiers.nvme: {path} cannot be written to: {error.strerror}; name another path") from error


def _take_lock(path: Path, folder_fd: int, rank: int, lasting: str | None) -> tuple[str, int]:
    real = os.path.realpath(path)
    with _registry_lock:
        number = 0
        while True:
            name = lasting_name(lasting, rank) if lasting else f"rank-{rank}" + (f".{number}" if number else "")
            if (real, name) not in _owned:
                break
            if lasting:
                raise ConfigError(
                    f"tiers.nvme: {path / _FOLDER / name} is in use by another model of this process; close it first, "
                    "or give each a checkpoint.dir of its own"
                )
            number += 1
        lock_fd = _lock(path, folder_fd, name)
        _owned.add((real, name))
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()} {datetime.now().isoformat(timespec='seconds')}\n".encode(), 0)
    return name, lock_fd


def _lock(path: Path, folder_fd: int, name: str) -> int:
    """Locks ``name``; waits out another rank's clean-up, refuses a live owner."""
    start = time.monotonic()
    while True:
        try:
            fd = _try_lock(folder_fd, name, create=True)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(
                f"tiers.nvme: {path / _FOLDER} cannot be written to: {error.strerror}; name another path"
            ) from error
        if fd is not None:
            return fd
        pid, since = _owner(folder_fd, name)
        waited = time.monotonic() - start
        if waited > (_LIVE_OWNER_WAIT_S if _alive(pid) else _SWEEP_WAIT_S):
            raise ConfigError(
                f"tiers.nvme: {path / _FOLDER / name} is in use by process {pid or 'unknown'} "
                f"(since {since or 'unknown'}); end that run or name another path"
            )
        time.sleep(0.02)


def _try_lock(folder_fd: int, name: str, *, create: bool) -> int | None:
    """An exclusive lock's descriptor; None when another process holds it, or the lock file has just been replaced."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    fd = os.open(name + ".lock", flags, 0o600, dir_fd=folder_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # otherwise its last owner removed it after our open
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _owner(folder_fd: int, name: str) -> tuple[int, str]:
    """(pid, start time) in a lock file; (0, "") where it says nothing."""
    try:
        fd = os.open(name + ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError:
        return 0, ""
    try:
        pid, _, since = os.read(fd, 200).decode(errors="replace").strip().partition(" ")
    finally:
        os.close(fd)
    return (int(pid), since) if pid.isdigit() else (0, "")


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sweep(folder_fd: int) -> None:
    """Removes directories of dead runs: those whose lock is there and free."""
    for entry in sorted(os.listdir(folder_fd)):
        name = entry.removesuffix(".lock")
        if entry == name or not _RANK.fullmatch(name):
            continue
        try:
            lock_fd = _try_lock(folder_fd, name, create=False)
        except OSError:  # gone meanwhile, or another user's
            continue
        if lock_fd is None:
            continue
        with contextlib.suppress(OSError):
            _remove_dead(folder_fd, name)
        os.close(lock_fd)


def _remove_dead(folder_fd: int, name: str) -> None:
    try:
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=folder_fd)
    except FileNotFoundError:
        pass
    else:
        _remove_tier_files(fd)
        os.close(fd)
        os.rmdir(name, dir_fd=folder_fd)
    os.unlink(name + ".lock", dir_fd=folder_fd)


def _remove_tier_files(fd: int) -> None:
    for name in os.listdir(fd):
        with contextlib.suppress(OSError):
            if name.endswith(_SUFFIX) and stat.S_ISREG(os.lstat(name, dir_fd=fd).st_mode):
                os.unlink(name, dir_fd=fd)
