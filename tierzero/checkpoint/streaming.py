"""Tiles filled from a checkpoint through the I/O engine: whole checks are read in few requests, several tiles at once,
and verified before anything of them is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from tierzero.checkpoint.index import Check
from tierzero.checkpoint.reader import CheckpointReader, Place, RankFile, verify
from tierzero.optim.formats import AVERAGE, Segment, StateFormat
from tierzero.optim.moments import load_moments, store_moments
from tierzero.runtime.state import Piece, tile_pieces
from tierzero.runtime.tile_io import OpenTile, all_or_first_error
from tierzero.tiers import FlatFile, HostAllocator, IoEngine, MemoryPool, Priority, Tier, page_round
from tierzero.tiers.allocator import PAGE

_REQUEST = 8 << 20
"""Bytes that neighbouring checks are read in at once."""
_MEMORY = 64 << 20
"""Bytes that may be in flight, if that is the largest check at least."""


@dataclass(frozen=True)
class _Part:
    """Elements of an extent, from ``first`` on, that belong in ``into``."""

    place: Place
    first: int
    into: torch.Tensor


@dataclass(frozen=True)
class _Converted:
    """A parameter's part of a tile whose moments are ``saved`` otherwise than the tile has them: read into ``parts``,
    which begin at element ``start`` of the parameter.
    """

    piece: Piece
    saved: StateFormat
    start: int
    parts: dict[str, torch.Tensor]

    @classmethod
    def of(cls, piece: Piece, saved: StateFormat) -> _Converted:
        start = piece.of_parameter.start // saved.block * saved.block
        numel = piece.of_parameter.stop - start
        parts = {
            part.name: torch.empty(part.values(numel), dtype=part.dtype, device="cpu") for part in saved.moment_segments
        }
        return cls(piece, saved, start, parts)

    def store(self, opened: OpenTile) -> None:
        fmt, wanted = opened.group.fmt, self.piece.of_parameter
        assert fmt is not None
        m, v = load_moments(self.saved, self.parts, wanted.stop - self.start)
        before = wanted.start - self.start
        store_moments(fmt, m[before:], v[before:], opened.cut(self.piece.of_tile))


@dataclass(frozen=True)
class _Run:
    """Parts whose checks are neighbours in a file, in order: bytes ``[start, stop)``, whole pages."""

    rank: RankFile
    start: int
    stop: int
    parts: list[_Part]


class ExtentStream:
    """Fills open tiles from ``reader``'s files. Its coroutines run on the engine's loop; `close` when all is done."""

    def __init__(self, engine: IoEngine, reader: CheckpointReader) -> None:
        self._engine, self._reader = engine, reader
        self.has_averages = reader.has_averages
        largest = max((check.nbytes for rank in reader.ranks for check in rank.index.checks), default=0)
        self._memory = MemoryPool(Tier.HOST, max(_MEMORY, page_round(largest) + PAGE), HostAllocator())
        self._files: dict[Path, FlatFile] = {}
        self._open = ExitStack()

    async def fill(self, opened: OpenTile) -> None:
        """Every parameter's part of the tile; averages only where the checkpoint has them. Raises TierError when a read
        fails, CheckpointError for damage.
        """
        pieces = list(tile_pieces(opened.group, opened.tile))
        converted = {
            piece.slot.name: _Converted.of(piece, saved)
            for piece in pieces
            if opened.group.fmt is not None
            and (saved := self._reader.format_of(piece.slot.name)).moments != opened.group.fmt.moments
        }
        parts = self._parts_of(opened, pieces, converted)
        await all_or_first_error([self._read(run) for run in _runs(parts)])
        for each in converted.values():
            await self._engine.call(each.store, opened)

    def close(self) -> None:
        self._open.close()
        self._memory.close()

    def _parts_of(
        self, opened: OpenTile, pieces: Sequence[Piece], converted: Mapping[str, _Converted]
    ) -> Iterator[_Part]:
        own = opened.group.fmt.moment_segments if opened.group.fmt is not None else ()
        for piece in pieces:
            name, foreign = piece.slot.name, converted.get(piece.slot.name)
            for segment, values in opened.segments():
                if segment == AVERAGE and not self.has_averages:
                    continue
                if foreign is None or segment not in own:
                    start = segment.part(piece.of_parameter).start
                    yield from self._parts_in(name, segment, start, values[segment.part(piece.of_tile)])
            if foreign is None:
                continue
            for segment in foreign.saved.moment_segments:
                yield from self._parts_in(name, segment, foreign.start // segment.per, foreign.parts[segment.name])

    def _parts_in(self, name: str, segment: Segment, start: int, wanted: torch.Tensor) -> Iterator[_Part]:
        for place in self._reader.by_segment[(name, segment.name)]:
            begin, end = place.extent.start, place.extent.stop
            first, last = max(start, begin), min(start + wanted.numel(), end)
            if first < last:
                yield _Part(place, first - begin, wanted[first - start : last - start])

    async def _read(self, run: _Run) -> None:
        file = self._file(run.rank)
        stop = min(run.stop, file.nbytes)
        buffer = await self._memory.acquire(run.stop - run.start)
        try:
            await self._engine.read(file, run.start, buffer.memory(0, stop - run.start), Priority.DEMAND)
            await self._engine.call(_take, run, buffer.memory(0, run.stop - run.start))
        finally:
            self._memory.release(buffer)

    def _file(self, rank: RankFile) -> FlatFile:
        if rank.path not in self._files:
            file = self._files[rank.path] = FlatFile.open(rank.path)
            self._open.callback(file.close)
        return self._files[rank.path]


def _runs(parts: Iterator[_Part]) -> list[_Run]:
    found: list[_Run] = []
    for part in sorted(parts, key=lambda part: (part.place.rank.path, part.place.check.offset)):
        check, rank = part.place.check, part.place.rank
        last = found[-1] if found else None
        if last is not None and last.parts[-1].place.check is check:
            last.parts.append(part)
            continue
        start, stop = check.offset // PAGE * PAGE, page_round(check.end)
        near = last is not None and last.rank is rank and start <= last.stop + PAGE
        if last is not None and near and stop - last.start <= _REQUEST:
            found[-1] = _Run(last.rank, last.start, max(last.stop, stop), [*last.parts, part])
        else:
            found.append(_Run(rank, start, stop, [part]))
    return found


def _take(run: _Run, memory: memoryview) -> None:
    known: Check | None = None
    for part in run.parts:
        check = part.place.check
        raw = memory[check.offset - run.start : check.end - run.start]
        if check is not known:
            verify(raw, check, run.rank)
            known = check
        skip = part.place.within + part.first * part.into.element_size()
        part.into.view(torch.uint8).copy_(torch.frombuffer(raw[skip : skip + part.into.nbytes], dtype=torch.uint8))
