"""A rank's data file of a checkpoint: tiles go in as they lie in a tier file, each at the place that is its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
import xxhash

from tierzero.checkpoint.manifest import Extent
from tierzero.errors import CheckpointError
from tierzero.runtime.snapshot import TileCopy, copied_bytes
from tierzero.runtime.state import GroupState, tile_pieces
from tierzero.tiers import FlatFile, HostAllocator, IoEngine, Priority, free_bytes, page_round

EXTENT_ELEMENTS = 1 << 22
"""Most elements of an extent: a reader takes whole ones, because a checksum is of the whole."""


class RankWriter:
    """Writes tiles of ``groups`` and module buffers to a new file at ``path``. Its coroutines run on the engine's loop.

    The file has its whole size from the start; CheckpointError when there is no room for it.
    """

    def __init__(
        self, engine: IoEngine, path: Path, groups: Sequence[GroupState], buffers: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        self._engine = engine
        self._buffers = buffers
        sizes = [copied_bytes(tile) for group in groups for tile in group.tiles]
        *self._offsets, self._tiles_end = accumulate(sizes, initial=0)
        self.nbytes = self._tiles_end + sum(page_round(values.nbytes) for _, values in buffers)
        self._extents: list[Extent] = []
        self._file = _created(path, self.nbytes)

    @property
    def extents(self) -> list[Extent]:
        """Of everything written so far, in order of their place."""
        return sorted(self._extents, key=lambda extent: extent.offset)

    async def receive(self, copy: TileCopy) -> None:
        """Writes one tile. TierError when that fails."""
        offset = self._offsets[copy.number]
        self._extents += await self._engine.call(_extents_of, copy, offset)
        await self._engine.write(self._file, offset, copy.memory, copy.priority)

    async def write_buffers(self, priority: Priority) -> None:
        """Writes the module buffers, behind the tiles."""
        if self.nbytes == self._tiles_end:
            self._extents += [_extent(name, "buffer", 0, values, self._tiles_end) for name, values in self._buffers]
            return
        allocator = HostAllocator()
        block = allocator.allocate(self.nbytes - self._tiles_end)
        try:
            start = 0
            for name, values in self._buffers:
                block[start : start + values.nbytes].copy_(values.view(torch.uint8))
                self._extents.append(_extent(name, "buffer", 0, values, self._tiles_end + start))
                start += page_round(values.nbytes)
            await self._engine.write(self._file, self._tiles_end, block.numpy().data, priority)
        finally:
            allocator.free(block)

    def sync(self) -> None:
        """What was written is on the drive when this returns."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _created(path: Path, nbytes: int) -> FlatFile:
    free = free_bytes(path.parent)
    if nbytes > free:
        raise CheckpointError(
            f"checkpoint {path.parent}: {nbytes:,} bytes are to be written there, {free:,} are free; free "
            f"{nbytes - free:,} bytes or choose another folder"
        )
    return FlatFile.create(path, nbytes)


def _extents_of(copy: TileCopy, offset: int) -> list[Extent]:
    """``offset``: of the tile in the file, in bytes."""
    found = []
    for segment, dtype, start in segment_places(copy.group, copy.tile.span.numel):
        values = torch.frombuffer(copy.memory, dtype=dtype, count=copy.tile.span.numel, offset=start)
        for piece in tile_pieces(copy.group, copy.tile):
            inside, first = piece.of_tile, piece.of_parameter.start
            for begin in range(inside.start, inside.stop, EXTENT_ELEMENTS):
                part = values[begin : min(begin + EXTENT_ELEMENTS, inside.stop)]
                place = offset + start + begin * dtype.itemsize
                found.append(_extent(piece.slot.name, segment, first + begin - inside.start, part, place))
    return found


def segment_places(group: GroupState, numel: int) -> list[tuple[str, torch.dtype, int]]:
    """(segment, dtype, first byte) of a tile of ``numel`` elements as `TileCopy` has it."""
    found, start = [("weight", group.layout.dtype, 0)], page_round(numel * group.layout.dtype.itemsize)
    for part in group.fmt.optimizer if group.fmt is not None else ():
        found.append((part.name, part.dtype, start))
        start += numel * part.itemsize
    return found


def _extent(parameter: str, segment: str, start: int, values: torch.Tensor, offset: int) -> Extent:
    raw = values.view(torch.uint8).numpy().data if values.numel() else b""
    digest = xxhash.xxh3_64_hexdigest(raw)
    return Extent(parameter, segment, start, start + values.numel(), offset, values.nbytes, digest)
