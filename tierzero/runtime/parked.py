"""Copies of what lies in memory, made to give that memory back for a while: in files of their own, or on the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal

import torch

from tierzero.runtime.device import Device
from tierzero.runtime.tile_io import all_or_first_error
from tierzero.tiers import Buffer, MemoryPool, Priority, StoredObject, Tier, TieredStore, page_round

To = Literal["nvme", "host"]

_PIECE = 16 << 20
"""Bytes that move as one."""
_AT_ONCE = 4
"""Pieces in flight; where the host cannot address the memory, each has a buffer of its own."""


class FileCopies:
    """In tier files beside those of ``store``, with a checksum of each piece."""

    def __init__(self, store: TieredStore, device: Device, objects: Sequence[StoredObject]) -> None:
        self._engine, self._device = store.engine, device
        self._files = store.beside()
        self._pieces = [
            (stored, start, self._files.add(f"{stored.name}/{start}", nbytes, Tier.NVME, about=stored.about))
            for stored in objects
            for start, nbytes in _cut(stored.nbytes)
        ]

    @property
    def nbytes(self) -> int:
        return self._files.bytes_by_tier()[Tier.NVME]

    def write(self) -> None:
        """Raises BudgetError or ConfigError before anything is written, TierError when a write fails."""
        self._files.open()
        self._engine.run(self._move(self._write_piece))

    def read(self) -> None:
        """Raises TierError for what cannot be read, or is not what was written."""
        self._engine.run(self._move(self._read_piece))

    def close(self) -> None:
        """The files are gone when this returns. Safe to call twice."""
        self._files.close()

    async def _move(
        self, move: Callable[[StoredObject, int, StoredObject, MemoryPool], Coroutine[Any, Any, None]]
    ) -> None:
        staging = MemoryPool(Tier.HOST, _AT_ONCE * _PIECE, self._device.host_allocator())
        try:
            await _few_at_once(move(stored, start, piece, staging) for stored, start, piece in self._pieces)
        finally:
            staging.close()

    async def _write_piece(self, stored: StoredObject, start: int, piece: StoredObject, staging: MemoryPool) -> None:
        buffer, length = stored.buffer, page_round(piece.nbytes)
        assert buffer is not None
        if self._addressable(stored):
            await self._files.write([piece], buffer.memory(start, length), Priority.DEMAND)
            return
        copy = await staging.acquire(length)
        try:
            event = self._device.copy_out(*_views(copy, buffer, start, piece.nbytes), self._device.now())
            await self._engine.call(event.synchronize)
            await self._files.write([piece], copy.memory(0, length), Priority.DEMAND)
        finally:
            staging.release(copy)

    async def _read_piece(self, stored: StoredObject, start: int, piece: StoredObject, staging: MemoryPool) -> None:
        buffer, length = stored.buffer, page_round(piece.nbytes)
        assert buffer is not None
        if self._addressable(stored):
            (await self._files.page_in([piece], buffer.memory(start, length), Priority.DEMAND)).release()
            return
        copy = await staging.acquire(length)
        try:
            (await self._files.page_in([piece], copy.memory(0, length), Priority.DEMAND)).release()
            target, source = reversed(_views(copy, buffer, start, piece.nbytes))
            event = self._device.copy_in(target, source, self._device.now())
            await self._engine.call(event.synchronize)
            self._device.wait(event)
        finally:
            staging.release(copy)

    def _addressable(self, stored: StoredObject) -> bool:
        return self._device.is_host or stored.home is Tier.HOST


class HostCopies:
    """Of device memory, in host memory."""

    def __init__(self, device: Device, objects: Sequence[StoredObject]) -> None:
        self.nbytes = sum(page_round(stored.nbytes) for stored in objects)
        self._device = device
        self._pool = MemoryPool(Tier.HOST, self.nbytes, device.host_allocator())
        self._objects = objects
        self._copies: list[Buffer] = []

    def write(self) -> None:
        for stored in self._objects:
            assert stored.buffer is not None
            copy = self._pool.allocate(stored.nbytes, stored.name)
            self._copies.append(copy)
            self._device.copy_out(*_views(copy, stored.buffer, 0, stored.nbytes), self._device.now()).synchronize()

    def read(self) -> None:
        for stored, copy in zip(self._objects, self._copies, strict=True):
            assert stored.buffer is not None
            target, source = reversed(_views(copy, stored.buffer, 0, stored.nbytes))
            event = self._device.copy_in(target, source, self._device.now())
            event.synchronize()
            self._device.wait(event)

    def close(self) -> None:
        """Safe to call twice."""
        while self._copies:
            self._pool.release(self._copies.pop())
        self._pool.close()


def _views(copy: Buffer, buffer: Buffer, start: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return copy.view(torch.uint8, nbytes), buffer.view(torch.uint8, nbytes, start)


def _cut(nbytes: int) -> Iterable[tuple[int, int]]:
    """(start, bytes) of each piece."""
    return ((start, min(_PIECE, nbytes - start)) for start in range(0, nbytes, _PIECE))


async def _few_at_once(moves: Iterable[Coroutine[Any, Any, None]]) -> None:
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(move: Coroutine[Any, Any, None]) -> None:
        async with room:
            await move

    await all_or_first_error([one(move) for move in moves])
