"""A checkpoint's arrays, read from whichever files hold their extents, every checksum verified."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from tierzero.checkpoint.manifest import Extent, extents_from, rank_stem, read_index
from tierzero.errors import CheckpointError


@dataclass
class RankFile:
    """One rank's data file, open, and its index."""

    path: Path
    index: dict[str, Any]
    file: BinaryIO


@dataclass
class CheckpointReader:
    """Extents of all ranks' files by parameter and segment; reads and verifies whole extents, keeping the last
    one of each segment.

    Raises CheckpointError when a file is missing, damaged or of another checkpoint.
    """

    folder: Path
    manifest: Mapping[str, Any]
    ranks: list[RankFile] = field(default_factory=list)
    by_segment: dict[tuple[str, str], list[tuple[Extent, RankFile]]] = field(default_factory=dict)
    _last: dict[str, tuple[Extent, bytes]] = field(default_factory=dict)

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
            found = RankFile(path, index, file)
            self.ranks.append(found)
            if size < index.get("nbytes", 0):
                raise CheckpointError(f"{path}: {size:,} bytes of {index['nbytes']:,}: the file was cut short")
            for extent in extents_from(index, self.folder / f"{stem}.json"):
                self.by_segment.setdefault((extent.parameter, extent.segment), []).append((extent, found))
        for entries in self.by_segment.values():
            entries.sort(key=lambda entry: entry[0].start)

    def check_covers(self, parameter: str, segment: str, numel: int) -> None:
        """Raises CheckpointError unless the extents of this array cover its ``numel`` elements without a gap."""
        position = 0
        for extent, _ in self.by_segment.get((parameter, segment), []):
            if extent.start > position:
                break
            position = max(position, extent.stop)
        if position < numel:
            raise CheckpointError(
                f"{self.folder}: {segment} of parameter {parameter!r} is incomplete from element {position:,}"
            )

    def read(self, parameter: str, segment: str, start: int, into: torch.Tensor) -> None:
        """Fills ``into`` with elements from ``start`` on."""
        stop = start + into.numel()
        for extent, rank in self.by_segment[(parameter, segment)]:
            first, last = max(start, extent.start), min(stop, extent.stop)
            if first < last:
                begin, end = ((at - extent.start) * into.element_size() for at in (first, last))
                raw = memoryview(self._extent(extent, rank))[begin:end]
                into[first - start : last - start].copy_(torch.frombuffer(bytearray(raw), dtype=into.dtype))

    def _extent(self, extent: Extent, rank: RankFile) -> bytes:
        last = self._last.get(extent.segment)
        if last is not None and last[0] is extent:
            return last[1]
        self._last.pop(extent.segment, None)
        del last  # the memory of one is given back before that of the next is taken
        rank.file.seek(extent.offset)
        raw = rank.file.read(extent.nbytes)
        verified(raw, extent, rank)
        os.posix_fadvise(rank.file.fileno(), extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)
        self._last[extent.segment] = (extent, raw)
        return raw

    def close(self) -> None:
        for rank in self.ranks:
            rank.file.close()


def verified(raw: bytes | memoryview, extent: Extent, rank: RankFile) -> None:
    """Raises CheckpointError unless ``raw`` is what was written as ``extent``."""
    if len(raw) != extent.nbytes or xxhash.xxh3_64_hexdigest(raw) != extent.xxh3:
        raise CheckpointError(
            f"{rank.path}: {extent.segment} of parameter {extent.parameter!r} at byte {extent.offset:,} does not "
            f"match its checksum: the file is damaged"
        )
