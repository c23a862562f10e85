"""Stripes: where each byte lies, what is checked before a file is made, and what happens without O_DIRECT."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.errors import BudgetError, ConfigError, TierError
from tierzero.tiers import PAGE, StripedFile, TierDirectory, drive_rate
from tierzero.tiers import striped_file as module
from tierzero.tiers.drive_rate import measured_shares
from tierzero.tiers.stripes import StripePattern, equal_shares, shares_of

Directories = Callable[[int], list[TierDirectory]]


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[Directories]:
    opened: list[TierDirectory] = []

    def make(count: int) -> list[TierDirectory]:
        for index in range(count):
            (tmp_path / str(index)).mkdir()
            opened.append(TierDirectory.open(tmp_path / str(index), 0))
        return opened

    yield make
    for directory in opened:
        directory.close()


@given(shares=st.lists(st.integers(1, 9), min_size=1, max_size=4), blocks=st.integers(0, 200), rest=st.integers(0, 9))
def test_shares_are_met_at_every_point_and_no_two_blocks_share_a_place(
    shares: list[int], blocks: int, rest: int
) -> None:
    pattern, given_, seen = StripePattern(tuple(shares)), [0] * len(shares), set()
    for block in range(blocks):
        path, place = pattern.locate(block)
        assert place == given_[path], "a path's blocks follow one another"
        given_[path] += 1
        seen.add((path, place))
        for index, count in enumerate(given_):
            assert abs(count - shares[index] * (block + 1) / sum(shares)) < 1.5
    assert len(seen) == blocks
    sizes = pattern.sizes(blocks * 10 + rest, 10)
    assert sum(sizes) == blocks * 10 + rest
    wanted = [10 * count for count in given_]
    if rest:
        wanted[pattern.locate(blocks)[0]] += rest
    assert sizes == wanted


def test_shares_follow_the_rates_of_the_drives() -> None:
    assert shares_of([2.0e9, 2.2e9]) == (1, 1)
    assert shares_of([1e9, 2e9]) == (1, 2)
    assert shares_of([2e9, 3e9, 2e9]) == (2, 3, 2)
    assert shares_of([1e6, 9e9]) == (1, 8)


def test_drives_are_measured_and_leave_nothing_behind(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = directories(2)
    monkeypatch.setattr(drive_rate, "_SAMPLE", 32 << 20)
    assert measured_shares(opened) == (1, 1), "two folders of one file system are alike"
    assert [list(directory.path.iterdir()) for directory in opened] == [[], []]


def test_as_many_shares_as_paths(directories: Directories) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.nvme_shares = \[3, 1\]: needs one number for each of the 3"):
        StripedFile(directories(3), 8 * PAGE, block_size=PAGE, shares=[3, 1])


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without O_DIRECT does: the open succeeds, the transfer fails with EINVAL."""
    direct: set[int] = set()
    real_open, real_write = os.open, os.pwrite

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT, *args, **kwargs)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(fd, data, offset)

    monkeypatch.setattr(module.os, "open", open_)
    monkeypatch.setattr(module.os, "pwrite", pwrite)


@given(
    paths=st.integers(1, 4),
    block=st.integers(1, 3),
    pages=st.integers(1, 40),
    data=st.data(),
)
def test_pieces_cover_a_request_once_and_lie_where_the_stripes_say(
    paths: int, block: int, pages: int, data: st.DataObject
) -> None:
    file = object.__new__(StripedFile)  # the arithmetic alone, without files
    file.nbytes, file.block_size = pages * PAGE, block * PAGE
    file._stripes = [None] * paths  # type: ignore[list-item]
    file._pattern = StripePattern(equal_shares(paths))
    sizes = file._pattern.sizes(file.nbytes, file.block_size)
    assert sum(sizes) == file.nbytes
    first = data.draw(st.integers(0, pages))
    count = data.draw(st.integers(0, pages - first))
    position = 0
    for piece in file.pieces(first * PAGE, count * PAGE):
        assert piece.start == position
        assert 0 < piece.nbytes <= file.block_size
        for byte in range(0, piece.nbytes, PAGE):
            index, within = divmod(first * PAGE + piece.start + byte, file.block_size)
            assert piece.path_index == index % paths
            assert piece.file_offset + byte == index // paths * file.block_size + within
        assert piece.file_offset + piece.nbytes <= sizes[piece.path_index]
        position += piece.nbytes
    assert position == count * PAGE


def test_one_path_cuts_from_the_start_of_the_request(directories: Directories) -> None:
    file = StripedFile(directories(1), 64 * PAGE, block_size=8 * PAGE)
    assert [piece.nbytes // PAGE for piece in file.pieces(3 * PAGE, 16 * PAGE)] == [8, 8]
    file.close()


def test_a_request_outside_the_file_is_refused(directories: Directories) -> None:
    file = StripedFile(directories(1), PAGE, block_size=PAGE)
    with pytest.raises(ValueError, match="outside"):
        file.pieces(0, 2 * PAGE)
    with pytest.raises(ValueError, match="outside"):
        file.pieces(-PAGE, PAGE)
    file.close()


def test_files_are_preallocated_private_and_removed(directories: Directories) -> None:
    opened = directories(3)
    file = StripedFile(opened, 10 * PAGE, block_size=2 * PAGE)
    sizes = [path.stat().st_size // PAGE for path in file.paths]
    assert sizes == [4, 4, 2]
    for path in file.paths:
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        assert path.stat().st_mode & 0o777 == 0o600
    file.close()
    file.close()
    assert not any(path.exists() for path in file.paths)
    with pytest.raises(TierError, match="is closed"), file.using(0):
        pytest.fail("a closed file was used")


def test_without_direct_io_there_is_one_notice_and_buffered_io(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = directories(2)
    refuse_direct(monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"no O_DIRECT on .*/0 \(Invalid argument\), .*/1 \(") as caught:
        file = StripedFile(opened, 8 * PAGE, block_size=PAGE)
    assert len(caught) == 1
    assert file.direct == (False, False)
    file.close()


def test_direct_io_that_is_demanded_but_refused_is_an_error(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = directories(1)
    refuse_direct(monkeypatch)
    with pytest.raises(ConfigError, match=r"no O_DIRECT on .* io\.direct = true"):
        StripedFile(opened, PAGE, block_size=PAGE, direct=True)
    assert list(opened[0].path.iterdir()) == []


def test_buffered_io_can_be_asked_for_without_a_notice(directories: Directories) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = StripedFile(directories(1), PAGE, block_size=PAGE, direct=False)
    assert file.direct == (False,)
    file.close()


def test_too_little_free_space_is_refused_before_any_file_is_made(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two paths share a file system: its space counts once."""
    opened = directories(2)
    monkeypatch.setattr(TierDirectory, "free_bytes", lambda self: 9 * PAGE)
    with pytest.raises(BudgetError, match=r"tiers\.nvme: .* has 36,864 bytes free, but 40,960 are needed") as caught:
        StripedFile(opened, 10 * PAGE, block_size=PAGE)
    assert caught.value.missing == PAGE
    assert not any(list(directory.path.iterdir()) for directory in opened)
    StripedFile(opened, 9 * PAGE, block_size=PAGE).close()


def test_the_limit_is_refused_before_any_file_is_made(directories: Directories) -> None:
    opened = directories(1)
    with pytest.raises(BudgetError, match=r"tiers\.nvme_limit") as caught:
        StripedFile(opened, 10 * PAGE, block_size=PAGE, limit=8 * PAGE)
    assert caught.value.missing == 2 * PAGE
    assert list(opened[0].path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = directories(2)
    calls: list[int] = []

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "posix_fallocate", fallocate)
    with pytest.raises(BudgetError, match=r"tiers\.nvme: 16,384 bytes could not be reserved in .*No space left"):
        StripedFile(opened, 8 * PAGE, block_size=PAGE)
    assert len(calls) == 2
    assert not any(list(directory.path.iterdir()) for directory in opened)


@pytest.mark.parametrize("block", [0, 100, -PAGE])
def test_a_block_size_that_is_not_whole_pages_is_refused(directories: Directories, block: int) -> None:
    with pytest.raises(ConfigError, match=r"io\.block_size"):
        StripedFile(directories(1), PAGE, block_size=block)
