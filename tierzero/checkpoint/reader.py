"""A checkpoint's arrays, read from whichever files hold their extents, every checksum verified."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tierzero.checkpoint.index import Check, Extent, RankIndex, arrays_of, named
from tierzero.checkpoint.manifest import rank_stem, read_index, saved_format, step_of
from tierzero.errors import CheckpointError
from tierzero.optim.formats import StateFormat


@dataclass
class RankFile:
    """One rank's data file, open, and its index."""

    path: Path
    index: RankIndex
    file: BinaryIO
    step: int
    """Of the checkpoint."""


@dataclass(frozen=True)
class Place:
    """An extent, the check that it lies in, and the file that both are of."""

    extent: Extent
    check: Check
    rank: RankFile

    @property
    def within(self) -> int:
        """First byte of the extent in its check."""
        return self.extent.offset - self.check.offset


@dataclass
class CheckpointReader:
    """Extents of all ranks' files by parameter and segment; reads and verifies whole checks, keeping the last
    one of each segment.

    Raises CheckpointError when a file is missing, damaged or of another checkpoint.
    """

    folder: Path
    manifest: Mapping[str, Any]
    ranks: list[RankFile] = field(default_factory=list)
    by_segment: dict[tuple[str, str], list[Place]] = field(default_factory=dict)
    _last: dict[str, tuple[Check, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def _open_all(self) -> None:
        for rank in range(int(self.manifest["world_size"])):
            stem = rank_stem(rank)
            index = read_index(self.folder, rank, self.manifest)
            path = self.folder / f"{stem}.bin"
            try:
                size = path.stat().st_size
                file = path.open("rb")
            except OSError as error:
                raise CheckpointError(f"{path}: the data of rank {rank} cannot be read: {error}") from None
            found = RankFile(path, index, file, step_of(self.manifest))
            self.ranks.append(found)
            if size < index.nbytes:
                raise CheckpointError(f"{path}: {size:,} bytes of {index.nbytes:,}: the file was cut short")
            for extent in index.extents:
                place = Place(extent, index.check_of(extent), found)
                self.by_segment.setdefault((extent.parameter, extent.segment), []).append(place)
        for places in self.by_segment.values():
            places.sort(key=lambda place: place.extent.start)

    @cached_property
    def has_averages(self) -> bool:
        """Of the trained weights, all of them."""
        return any(segment == "ema" for _, segment in self.by_segment)

    def format_of(self, parameter: str) -> StateFormat:
        """How the state of a trained parameter is stored."""
        return saved_format(parameter, self.manifest["parameters"][parameter], self.folder)

    def check_covers(self, parameter: str, segment: str, numel: int) -> None:
        """Raises CheckpointError unless the extents of this array cover its ``numel`` elements without a gap."""
        position = 0
        for place in self.by_segment.get((parameter, segment), []):
            if place.extent.start > position:
                break
            position = max(position, place.extent.stop)
        if position < numel:
            raise CheckpointError(
                f"{self.folder}: {segment} of parameter {parameter!r} is incomplete from element {position:,}"
            )

    def read(self, parameter: str, segment: str, start: int, into: torch.Tensor) -> None:
        """Fills ``into`` with elements from ``start`` on."""
        stop = start + into.numel()
        for place in self.by_segment[(parameter, segment)]:
            extent = place.extent
            first, last = max(start, extent.start), min(stop, extent.stop)
            if first < last:
                begin, end = (place.within + (at - extent.start) * into.element_size() for at in (first, last))
                raw = memoryview(self._checked(place))[begin:end]
                into[first - start : last - start].copy_(torch.frombuffer(bytearray(raw), dtype=into.dtype))

    def _checked(self, place: Place) -> bytes:
        """The bytes of its check."""
        check, rank = place.check, place.rank
        last = self._last.get(place.extent.segment)
        if last is not None and last[0] is check:
            return last[1]
        self._last.pop(place.extent.segment, None)
        del last  # the memory of one is given back before that of the next is taken
        rank.file.seek(check.offset)
        raw = rank.file.read(check.nbytes)
        verify(raw, check, rank)
        os.posix_fadvise(rank.file.fileno(), check.offset, check.nbytes, os.POSIX_FADV_DONTNEED)
        self._last[place.extent.segment] = (check, raw)
        return raw

    def close(self) -> None:
        for rank in self.ranks:
            rank.file.close()


def verify(raw: bytes | memoryview, check: Check, rank: RankFile) -> None:
    """Raises CheckpointError unless ``raw`` is what was written there."""
    if not check.matches(raw):
        what = named(*arrays_of(rank.index.inside(check)))
        raise CheckpointError(
            f"{rank.path}: {what} at bytes {check.offset:,} to {check.end:,} does not match its checksum: the file, of "
            f"step {rank.step}, is damaged"
        )
