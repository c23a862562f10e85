"""One logical file over several drives: preallocated, page-cache free where the file system allows it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierzero.errors import BudgetError, ConfigError, TierError
from tierzero.tiers.allocator import PAGE, page_round
from tierzero.tiers.directory import TierDirectory
from tierzero.tiers.file import BufferedPages, Direct, FileUsers, Piece
from tierzero.tiers.room import DriveRoom, rooms_of
from tierzero.tiers.stripes import StripePattern, equal_shares

_NAME = "state"

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)


class _Stripe:
    """The file on one path."""

    def __init__(self, directory: TierDirectory, size: int) -> None:
        self.directory = directory
        self.path = directory.file_path(_NAME)
        self.size = size
        self.direct = False
        self.fd = -1
        self.pages = BufferedPages()


class StripedFile:
    """A logical space of ``nbytes`` in blocks of ``block_size``, which lie on the paths in turn, or as often as
    ``shares`` says (a whole number for each path). All sizes in bytes.

    Files are preallocated, so a full disk is met here and not in the middle of a run. ``direct``: "auto" uses O_DIRECT
    where the file system takes it and warns once where not; True raises ConfigError where not; False never uses it.
    Raises BudgetError when ``limit`` or the free space of the paths is too small, before any file is made.

    ``existing``: takes the files that the directories hold; ConfigError where they are missing or of another size.
    """

    is_tier = True
    room_advice = "free space there, add a path to tiers.nvme or place less on nvme"

    def __init__(
        self,
        directories: Sequence[TierDirectory],
        nbytes: int,
        *,
        block_size: int,
        direct: Direct = "auto",
        limit: int | None = None,
        shares: Sequence[int] | None = None,
        existing: bool = False,
    ) -> None:
        if not directories:
            raise ConfigError("tiers.nvme: no path is given, but state is placed on nvme; set tiers.nvme")
        if block_size <= 0 or block_size % PAGE:
            raise ConfigError(f"io.block_size must be a multiple of {PAGE}, got {block_size}")
        nbytes = page_round(nbytes)
        self.nbytes = nbytes
        self.block_size = block_size
        self._users = FileUsers()
        if shares is not None and len(shares) != len(directories):
            raise ConfigError(
                f"tiers.nvme_shares = {list(shares)}: needs one number for each of the {len(directories)} tiers.nvme"
            )
        self._pattern = StripePattern(tuple(shares) if shares is not None else equal_shares(len(directories)))
        sizes = self._pattern.sizes(nbytes, block_size)
        if not existing:
            _check_room(directories, sizes, limit)
        self._stripes = [_Stripe(directory, size) for directory, size in zip(directories, sizes, strict=True)]
        try:
            self._create(direct, existing)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in the order of their index."""
        return tuple(stripe.path for stripe in self._stripes)

    @property
    def lanes(self) -> tuple[Path, ...]:
        """Every file has one of its own."""
        return self.paths

    @property
    def direct(self) -> tuple[bool, ...]:
        """For each path whether it bypasses the page cache."""
        return tuple(stripe.direct for stripe in self._stripes)

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Cuts a request into parts of at most ``block_size`` that lie in one file each. Raises ValueError outside the
        file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside a tier file of {self.nbytes} bytes")
        block, paths = self.block_size, len(self._stripes)
        if paths == 1:  # blocks are neighbours: cut from the request's own start, for the fewest pieces
            return [Piece(0, offset + start, start, min(block, nbytes - start)) for start in range(0, nbytes, block)]
        pieces = []
        start = 0
        while start < nbytes:
            index, within = divmod(offset + start, block)
            length = min(block - within, nbytes - start)
            path, place = self._pattern.locate(index)
            pieces.append(Piece(path, place * block + within, start, length))
            start += length
        return pieces

    @contextlib.contextmanager
    def using(self, path_index: int) -> Iterator[int]:
        """The descriptor of a file for one system call; `close` waits for its end. Raises TierError after `close`."""
        stripe = self._stripes[path_index]
        with self._users.one_more(stripe.path):
            yield stripe.fd

    def drop_cache(self, path_index: int, fd: int, offset: int, nbytes: int, *, written: bool) -> None:
        """Keeps buffered I/O from filling the page cache; nothing to do with O_DIRECT."""
        stripe = self._stripes[path_index]
        if not stripe.direct:
            stripe.pages.drop(fd, offset, nbytes, written=written)

    @property
    def shares(self) -> tuple[int, ...]:
        """How many blocks each path gets in turn."""
        return self._pattern.shares

    def sync(self) -> None:
        """What was written is on the drives when this returns. Raises TierError."""
        for index, stripe in enumerate(self._stripes):
            try:
                with self.using(index) as fd:
                    os.fdatasync(fd)
            except OSError as error:
                raise TierError(f"{stripe.path} cannot be flushed to its drive: {error.strerror}") from error

    def room_for(self, nbytes: int, ranks: int = 1) -> list[DriveRoom]:
        """Of every drive for a file of ``nbytes``: what it would take beside what it has, ``ranks`` times. OSError."""
        wanted: dict[Path, int] = {}
        for stripe, size in zip(self._stripes, self._pattern.sizes(page_round(nbytes), self.block_size), strict=True):
            wanted[stripe.directory.root] = wanted.get(stripe.directory.root, 0) + ranks * (size - stripe.size)
        return rooms_of(wanted)

    def resize(self, nbytes: int) -> None:
        """Makes the file longer or shorter; what is in it and stays keeps its place. Nothing may be on its way there.

        Raises BudgetError where a drive has no room for more; the file is then as it was.
        """
        nbytes = page_round(nbytes)
        before = [stripe.size for stripe in self._stripes]
        sizes = self._pattern.sizes(nbytes, self.block_size)
        for stripe, size in zip(self._stripes, sizes, strict=True):
            shorter, stripe.size = size < stripe.size, size
            try:
                if shorter:
                    os.ftruncate(stripe.fd, size)
                else:
                    _preallocate(stripe)
            except OSError as error:
                failure = _creation_error(stripe, error)
                for each, old in zip(self._stripes, before, strict=True):
                    os.ftruncate(each.fd, old)
                    each.size = old
                raise failure from error
        self.nbytes = nbytes

    def free_bytes(self, path_index: int) -> int:
        """Free space of the file system that the file lies on."""
        return self._stripes[path_index].directory.free_bytes()

    def close(self) -> None:
        """Closes and removes the files, after the system calls that are using them. Safe to call twice."""
        self._users.end()
        for stripe in self._stripes:
            if stripe.fd >= 0:
                os.close(stripe.fd)
                stripe.fd = -1
                if not stripe.directory.keep:
                    with contextlib.suppress(OSError):
                        stripe.directory.remove_file(_NAME)

    def _create(self, direct: Direct, existing: bool) -> None:
        refused = []
        for stripe in self._stripes:
            try:
                if existing:
                    _reopen(stripe)
                else:
                    stripe.fd = stripe.directory.create_file(_NAME)
                    _preallocate(stripe)
            except OSError as error:
                raise _creation_error(stripe, error) from error
            if direct is False:
                continue
            problem = _go_direct(stripe, existing)
            if problem is not None:
                refused.append(f"{stripe.directory.root} ({problem})")
        if not refused:
            return
        text = f"tiers.nvme: no O_DIRECT on {', '.join(refused)}"
        if direct is True:
            raise ConfigError(f'{text}, but io.direct = true; set io.direct = "auto" or use another file system')
        warnings.warn(f"{text}; using buffered I/O there, which is slower", RuntimeWarning, stacklevel=3)


def _check_room(directories: Sequence[TierDirectory], sizes: Sequence[int], limit: int | None) -> None:
    total = sum(sizes)
    if limit is not None and total > limit:
        raise BudgetError(
            f"tiers.nvme_limit: {total:,} bytes of state go to nvme, but the limit is {limit:,}; "
            f"raise it by {total - limit:,} or place less on nvme",
            total - limit,
        )
    needed: dict[int, int] = {}
    roots: dict[int, TierDirectory] = {}
    for directory, size in zip(directories, sizes, strict=True):
        device = os.stat(directory.root).st_dev  # two paths on one file system share its space
        needed[device] = needed.get(device, 0) + size
        roots.setdefault(device, directory)
    for device, need in needed.items():
        free = roots[device].free_bytes()
        if need > free:
            raise BudgetError(
                f"tiers.nvme: {roots[device].root} has {free:,} bytes free, but {need:,} are needed; "
                f"free {need - free:,} bytes, add a path or place less on nvme",
                need - free,
            )


def _reopen(stripe: _Stripe) -> None:
    try:
        stripe.fd = stripe.directory.reopen_file(_NAME, 0)
    except FileNotFoundError:
        raise ConfigError(f"tiers.nvme: {stripe.path} is missing, but its records speak of a sealed step") from None
    found = os.fstat(stripe.fd).st_size
    if found != stripe.size:
        raise ConfigError(
            f"tiers.nvme: {stripe.path} has {found:,} bytes, not the {stripe.size:,} of its records; it was cut short"
        )


def _preallocate(stripe: _Stripe) -> None:
    if stripe.size == 0:
        return
    try:
        os.posix_fallocate(stripe.fd, 0, stripe.size)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        os.ftruncate(stripe.fd, stripe.size)  # a file system without preallocation


def _creation_error(stripe: _Stripe, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = stripe.directory.free_bytes()
        return BudgetError(
            f"tiers.nvme: {stripe.size:,} bytes could not be reserved in {stripe.path}: {error.strerror} "
            f"({free:,} bytes free); free some, add a path or place less on nvme",
            max(stripe.size - free, 0),
        )
    return ConfigError(f"tiers.nvme: {stripe.path} cannot be created: {error.strerror}; name another path")


def _go_direct(stripe: _Stripe, existing: bool) -> str | None:
    """Replaces the descriptor by one with O_DIRECT if a real write and read through it work; else says why not."""
    if stripe.size == 0:
        return None
    fd = -1
    try:
        fd = stripe.directory.reopen_file(_NAME, os.O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:  # zeros, which the new file holds anyway
            if (not existing and os.pwrite(fd, page, 0) != PAGE) or os.preadv(fd, [page], 0) != PAGE:
                raise OSError(errno.EIO, "a page was not transferred whole")
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (*_REFUSALS, errno.EIO):
            return error.strerror or os.strerror(error.errno)
        raise ConfigError(
            f"tiers.nvme: {stripe.path} cannot be written to: {error.strerror}; name another path"
        ) from error
    os.close(stripe.fd)
    stripe.fd = fd
    stripe.direct = True
    return None
