"""A rank's data file of a checkpoint: tiles go in as they lie in a tier file, each at the place that is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from tierzero.checkpoint.index import Check, Extent, index_as_json
from tierzero.errors import CheckpointError
from tierzero.optim.formats import Segment
from tierzero.runtime.snapshot import TileCopy
from tierzero.runtime.state import GroupState, Tile, tile_pieces
from tierzero.tiers import Cloner, FlatFile, HostAllocator, IoEngine, Priority, TieredStore, free_bytes, page_round

EXTENT_ELEMENTS = 1 << 22
"""Most elements of an extent: a reader takes whole ones, because its checksum is of the whole."""


class RankWriter:
    """Writes tiles of ``groups`` and module buffers to a new file at ``path``. Its coroutines run on the engine's loop.

    Tiles whose bytes and checksums ``store`` has in its files are cloned from there, where the file system can. Nothing
    of their state may be on its way to the files when this is made.

    The file has its whole size from the start; CheckpointError when there is no room for it.
    """

    def __init__(
        self,
        engine: IoEngine,
        store: TieredStore,
        path: Path,
        groups: Sequence[GroupState],
        buffers: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        self._engine, self._store, self._buffers = engine, store, buffers
        self._tiles = [(group, tile) for group in groups for tile in group.tiles]
        *self._offsets, self._tiles_end = accumulate((tile.state_bytes() for _, tile in self._tiles), initial=0)
        self.nbytes = self._tiles_end + sum(page_round(values.nbytes) for _, values in buffers)
        self._extents: list[Extent] = []
        self._checks: list[Check] = []
        self._file = _created(path, self.nbytes)
        try:
            self._cloner = self._cloner_of(store)
            if self._cloner is None:
                self._file.reserve()
        except BaseException:
            self._file.close()
            raise

    def _cloner_of(self, store: TieredStore) -> Cloner | None:
        if store.file is None or not store.may_be_cloned or not self._tiles_end:
            return None
        cloner = Cloner(store.file, self._file)
        if not cloner.is_able:
            return None
        store.sync()  # a clone of what is on its way to the drive would be no less on its way
        return cloner

    def index(self, rng: Mapping[str, str]) -> dict[str, Any]:
        """Of everything written so far."""
        return index_as_json(self.nbytes, rng, self._extents, self._checks)

    async def take_filed(self, number: int, tile: Tile) -> bool:
        """Clones one tile, if it can."""
        homes = tile.state
        digests = self._store.filed_digests([home.stored for home in homes])
        if self._cloner is None or digests is None:
            return False
        offset, checks = self._offsets[number], []
        for home, digest in zip(homes, digests, strict=True):
            extent = home.stored.extent
            assert extent is not None
            if not await self._engine.call(self._cloner.clone, extent.offset, extent.nbytes, offset):
                return False
            checks.append(Check(offset, home.nbytes, f"{digest:016x}"))
            offset += extent.nbytes
        self._checks += [check for check in checks if check.nbytes]
        self._extents += _extents_of(*self._tiles[number], self._offsets[number])
        return True

    async def receive(self, copy: TileCopy) -> None:
        """Writes one tile. TierError when that fails."""
        offset = self._offsets[copy.number]
        extents = _extents_of(copy.group, copy.tile, offset)
        self._checks += await self._engine.call(_checks_of, extents, copy.memory, offset)
        self._extents += extents
        await self._engine.write(self._file, offset, copy.memory, copy.priority)

    async def write_buffers(self, priority: Priority) -> None:
        """Writes the module buffers, behind the tiles."""
        if self.nbytes == self._tiles_end:
            self._extents += [_buffer_extent(name, values, self._tiles_end) for name, values in self._buffers]
            return
        allocator = HostAllocator()
        block = allocator.allocate(self.nbytes - self._tiles_end)
        try:
            start = 0
            for name, values in self._buffers:
                block[start : start + values.nbytes].copy_(values.view(torch.uint8))
                self._extents.append(extent := _buffer_extent(name, values, self._tiles_end + start))
                self._checks += _checks_of([extent], block.numpy().data, self._tiles_end)
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
    if nbytes > free:  # clones too: the tier files take that room as they are written over
        raise CheckpointError(
            f"checkpoint {path.parent}: {nbytes:,} bytes are to be written there, {free:,} are free; free "
            f"{nbytes - free:,} bytes or choose another folder"
        )
    return FlatFile.create(path, nbytes)


def _extents_of(group: GroupState, tile: Tile, offset: int) -> list[Extent]:
    """``offset``: of the tile in the file, in bytes."""
    found = []
    for segment, start in segment_places(group, tile.span.numel):
        for piece in tile_pieces(group, tile):
            inside, first = segment.part(piece.of_tile), segment.part(piece.of_parameter).start
            for begin in range(inside.start, inside.stop, EXTENT_ELEMENTS):
                numel = min(EXTENT_ELEMENTS, inside.stop - begin)
                at, itemsize = first + begin - inside.start, segment.dtype.itemsize
                place, nbytes = offset + start + begin * itemsize, numel * itemsize
                found.append(Extent(piece.slot.name, segment.name, at, at + numel, place, nbytes))
    return found


def _checks_of(extents: Sequence[Extent], memory: memoryview, offset: int) -> list[Check]:
    """One for each extent, so that a reader of a part reads little else. ``memory`` is that of the file from byte
    ``offset`` on.
    """
    return [Check.of(e.offset, memory[e.offset - offset : e.end - offset]) for e in extents if e.nbytes]


def segment_places(group: GroupState, numel: int) -> list[tuple[Segment, int]]:
    """Each segment and its first byte in a tile of ``numel`` elements as `TileCopy` has it."""
    found, start = [(Segment("weight", group.layout.dtype), 0)], page_round(numel * group.layout.dtype.itemsize)
    if group.fmt is not None:
        found += [(segment, start + place) for segment, place in group.fmt.places(numel)]
    return found


def _buffer_extent(name: str, values: torch.Tensor, offset: int) -> Extent:
    return Extent(name, "buffer", 0, values.numel(), offset, values.nbytes)
