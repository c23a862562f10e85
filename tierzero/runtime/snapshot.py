"""The state of all tiles as of one moment, copied out while the training goes on.

Two parties copy: workers that go through the tiles, and whoever is about to change a tile, who hands over
first what he has in memory. So an update waits for its own tile at most, and a tile that it has paged in anyway is not
read a second time. Between the moment and a tile's first change nobody writes to it, neither in memory nor in its
file, which is why workers may read without holding anything. For the same reason a tile that lies in the tier files may
be taken from there as it is (`Receiver.take_filed`), where that costs less than a copy.

States of a tile (`_Copy`) and who may change it:

========== ===================================================================
WAITING    whoever wants to change it copies it first
COPYING    nobody; the change waits for the end
COPIED     everybody
========== ===================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from tierzero.runtime.device import Device
from tierzero.runtime.state import GroupState, Home, Tile
from tierzero.runtime.tile_io import OpenTile, all_or_first_error
from tierzero.tiers import Buffer, IoEngine, MemoryPool, Priority, Tier, TieredStore, page_round

_WORKERS = 4
_MEMORY = 64 << 20
"""Bytes that the workers may hold, if that is two tiles at least."""


class _Copy(Enum):
    """See the module's docstring."""

    WAITING = "waiting"
    COPYING = "copying"
    COPIED = "copied"


@dataclass(frozen=True)
class TileCopy:
    """A tile's weights and optimizer state as they lie in a tier file: each in whole pages, zeros behind it.

    ``memory`` is the receiver's until it is done with it.
    """

    number: int
    group: GroupState
    tile: Tile
    memory: memoryview
    priority: Priority


class Receiver(Protocol):
    """Gets every tile once, in any order, several at once; on the engine's loop."""

    async def take_filed(self, number: int, tile: Tile) -> bool:
        """Takes the state of a tile from the tier files, where nobody changes it until this returns. False: it wants
        a copy.
        """

    async def receive(self, copy: TileCopy) -> None:
        """Takes a copy of a tile's state."""


@dataclass
class _Entry:
    number: int
    group: GroupState
    tile: Tile
    state: _Copy = _Copy.WAITING
    done: asyncio.Future[None] | None = None


class Snapshot:
    """Hands every tile of ``groups``, numbered in their order, to ``receiver``.

    Everything but the constructor, `begin` and `wait` runs on the engine's loop.
    """

    def __init__(
        self,
        engine: IoEngine,
        store: TieredStore,
        device: Device,
        groups: Sequence[GroupState],
        receiver: Receiver,
    ) -> None:
        self._engine, self._store, self._device, self._receiver = engine, store, device, receiver
        pairs = [(group, tile) for group in groups for tile in group.tiles]
        self._entries = {id(tile): _Entry(number, group, tile) for number, (group, tile) in enumerate(pairs)}
        largest = max((tile.state_bytes() for _, tile in pairs), default=0)
        self._memory = MemoryPool(Tier.HOST, max(_MEMORY, 2 * largest), device.host_allocator())
        self._failure: BaseException | None = None
        self._running: Future[None] | None = None

    def begin(self, priority: Priority) -> Future[None]:
        """Starts the workers. The future ends when every tile is copied, or with the first failure."""
        self._running = self._engine.submit(self._run(priority))
        return self._running

    def wait(self) -> None:
        """Until nothing of the state that is copied is needed any more. A failure is the future's."""
        if self._running is not None:
            wait([self._running])

    def cancel(self) -> None:
        """Ends it early; `wait` for the end."""
        if self._running is not None:
            self._running.cancel()

    async def secure(self, tile: Tile, opened: OpenTile | None) -> None:
        """Before ``tile`` changes: it is copied when this returns, or the snapshot has failed."""
        entry = self._entries.get(id(tile))
        if entry is None or entry.state is _Copy.COPIED or self._failure is not None:
            return
        if entry.state is _Copy.COPYING:
            assert entry.done is not None
            await asyncio.shield(entry.done)
            return
        await self._copy(entry, opened, Priority.DEMAND)

    async def _run(self, priority: Priority) -> None:
        # Updates come in the order of the forward: beside a training, workers begin at the other end.
        in_order = list(self._entries.values())
        entries = iter(in_order if priority is Priority.DEMAND else reversed(in_order))
        try:
            await all_or_first_error([self._work(entries, priority) for _ in range(_WORKERS)])
            for entry in self._entries.values():
                if entry.done is not None:
                    await entry.done
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            self._memory.close()
        if self._failure is not None:
            raise self._failure

    async def _work(self, entries: Iterator[_Entry], priority: Priority) -> None:
        for entry in entries:
            if self._failure is not None:
                return
            if entry.state is _Copy.WAITING:
                await self._copy(entry, None, priority)

    async def _copy(self, entry: _Entry, opened: OpenTile | None, priority: Priority) -> None:
        """A failure ends the snapshot, not who waits for the tile: training does not depend on it."""
        entry.state, entry.done = _Copy.COPYING, asyncio.get_running_loop().create_future()
        try:
            await self._hand_over(entry, opened, priority)
        except Exception as error:
            self._failure = self._failure or error
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            entry.state = _Copy.COPIED
            entry.done.set_result(None)

    async def _hand_over(self, entry: _Entry, opened: OpenTile | None, priority: Priority) -> None:
        if await self._receiver.take_filed(entry.number, entry.tile):
            return
        nbytes = entry.tile.state_bytes()
        staged = None if opened is None else _as_filed(opened, entry.tile)
        if staged is not None:
            await self._receiver.receive(TileCopy(entry.number, entry.group, entry.tile, staged, priority))
            return
        buffer = await self._memory.acquire(nbytes)
        try:
            await self._fill(buffer, entry.tile, opened, priority)
            memory = buffer.memory(0, nbytes)
            await self._receiver.receive(TileCopy(entry.number, entry.group, entry.tile, memory, priority))
        finally:
            self._memory.release(buffer)

    async def _fill(self, buffer: Buffer, tile: Tile, opened: OpenTile | None, priority: Priority) -> None:
        start = 0
        filed: list[tuple[int, Home]] = []
        for home in tile.state:
            if home.tier is Tier.NVME:
                filed.append((start, home))
            else:
                await self._from_memory(buffer.view(torch.uint8, home.nbytes, start), home)
            start += page_round(home.nbytes)
        if filed:
            await self._store.peek(
                [home.stored for _, home in filed],
                buffer.memory(filed[0][0], sum(page_round(home.nbytes) for _, home in filed)),
                priority,
            )
        _zero_tails(buffer.memory(0, start), tile)

    async def _from_memory(self, target: torch.Tensor, home: Home) -> None:
        source = home.tensor(torch.uint8, home.nbytes)
        if home.tier is Tier.DEVICE and not self._device.is_host:
            event = self._device.copy_out(target, source, self._device.now())
            await self._engine.call(event.synchronize)
        else:
            await self._engine.call(target.copy_, source)


def _as_filed(opened: OpenTile, tile: Tile) -> memoryview | None:
    """The open tile's staging memory, if all of the state lies there, which is then laid out as in a file."""
    if opened.staging is None or opened.mirrors or any(home.tier is not Tier.NVME for home in tile.state):
        return None
    memory = opened.staging.memory(0, tile.state_bytes())
    _zero_tails(memory, tile)
    return memory


def _zero_tails(memory: memoryview, tile: Tile) -> None:
    """What lies between the end of a home and its last page's: whatever the memory held before."""
    start = 0
    for home in tile.state:
        end = start + page_round(home.nbytes)
        memory[start + home.nbytes : end] = bytes(end - start - home.nbytes)
        start = end
