"""Opening a tile: its weights, optimizer state and gradient side by side in addressable memory, wherever they live.

An open tile owns at most one staging buffer. It takes everything it needs in one acquisition and waits for nothing
else while it holds it (but its own transfers), which is why tiles can never deadlock on the staging budget.

Tiles read ahead (`TileIO.read_ahead`) are open, and nobody's, until somebody opens them. They are the first ones of the
next step, read while the backward still runs, when the drive has little to do. They hold only memory that is free and
leave enough of it for others to go on without theirs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import reduce

import torch

from tierzero.errors import TierError
from tierzero.optim.formats import Segment
from tierzero.runtime.device import Device, Event
from tierzero.runtime.spans import Kind
from tierzero.runtime.state import GroupState, Home, Tile
from tierzero.runtime.stats import RoomClock
from tierzero.runtime.timeline import Timeline
from tierzero.tiers import Buffer, Lease, MemoryPool, Priority, Request, Residency, Tier, TieredStore, page_round


class Parts(Flag):
    """Which kinds of a tile's state to open."""

    WEIGHT = auto()
    OPTIMIZER = auto()
    GRADIENT = auto()
    STATE = WEIGHT | OPTIMIZER
    ALL = WEIGHT | OPTIMIZER | GRADIENT


@dataclass
class OpenTile:
    """Views of a tile's state, 1-D, of the tile's length or as many values as the segment has for it; None (or absent)
    for what was not opened.

    The views belong to the opener until `TileIO.close` or `TileIO.write_back` is called.
    """

    group: GroupState
    tile: Tile
    weight: torch.Tensor | None = None
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    staging: Buffer | None = None
    lease: Lease | None = None
    """Of the weight and optimizer objects that were paged in: what a write-back writes."""
    extra: Lease | None = None
    """Of a gradient that was paged in: read only."""
    mirrors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(device memory, staged copy) of homes on a device that the host cannot address."""

    def cut(self, inside: slice) -> dict[str, torch.Tensor]:
        """The optimizer segments of a range of the tile's elements, which begins where a parameter's part of it does
        or at a multiple of the format's block after that.
        """
        assert self.group.fmt is not None
        return self.group.fmt.cut(self.optimizer, inside)

    def segments(self) -> list[tuple[Segment, torch.Tensor]]:
        """Its state by segment, the weight first."""
        assert self.weight is not None
        found = [(Segment("weight", self.weight.dtype), self.weight)]
        fmt = self.group.fmt
        return found if fmt is None else found + [(part, self.optimizer[part.name]) for part in fmt.optimizer]


@dataclass(frozen=True)
class _Ahead:
    """A tile that is being read ahead, or has been; ``request`` makes the rest of the read urgent."""

    task: asyncio.Task[OpenTile]
    request: Request


class TileIO:
    """Opens, closes and writes back tiles. Its coroutines run on the engine's loop."""

    def __init__(
        self, store: TieredStore, staging: MemoryPool, device: Device, timeline: Timeline | None = None
    ) -> None:
        self.timeline = timeline or Timeline()
        self._store = store
        self.staging = staging
        self._device = device
        self.room = RoomClock()
        self.on_room: Callable[[], None] = lambda: None
        """Called on the loop when staging memory has come back."""
        self._ahead: dict[int, _Ahead] = {}
        """Tiles read ahead, by identity."""
        self.read_ahead_bytes = 0
        """Of state, begun to be read by `read_ahead`."""
        self._lent: dict[int, asyncio.Future[None]] = {}
        """Of these, whose weights are being copied: done when they are not any more."""
        self._in_use: Counter[int] = Counter()
        """Tiles that somebody is about to read or to write, whatever their residency still says: not to be read
        ahead.
        """

    async def open(self, group: GroupState, tile: Tile, parts: Parts, priority: Priority) -> OpenTile:
        """Pages in what is not in memory and returns views of it all. Raises TierError when a read fails."""
        with self._using(tile):
            return await self._open(group, tile, parts, priority)

    @contextmanager
    def _using(self, tile: Tile) -> Iterator[None]:
        self._in_use[id(tile)] += 1
        try:
            yield
        finally:
            self._in_use[id(tile)] -= 1

    async def _open(self, group: GroupState, tile: Tile, parts: Parts, priority: Priority) -> OpenTile:
        wanted = [(kind, home) for kind, home in self._homes(tile, parts) if home is not None]
        staged = [(kind, home) for kind, home in wanted if not self.addressable(home)]
        opened = await self._take_ahead(tile) if parts & Parts.STATE else None
        if opened is not None and parts is not Parts.ALL:
            self.close(opened)
            opened = None
        missing = staged if opened is None else [(kind, home) for kind, home in staged if not _is_ahead(kind, home)]
        opened = opened or OpenTile(group, tile)
        if staged and opened.staging is None:
            opened.staging = await self._acquire(sum(page_round(home.nbytes) for _, home in staged))
        try:
            places = self._lay_out([home for _, home in staged])
            await self._page_in(opened, missing, places, priority)
        except BaseException:
            self.close(opened)  # one of two reads may have succeeded: its lease must end too
            raise
        for kind, home in wanted:
            self._bind(group, opened, kind, home, places.get(id(home)))
        return opened

    def read_ahead(self, group: GroupState, tile: Tile, reserve: int) -> bool:
        """On the loop: begins to read what of the tile's state lies on nvme, laid out as for the whole tile. False when
        ``reserve`` bytes would not be left free.
        """
        staged = [(k, h) for k, h in self._homes(tile, Parts.ALL) if h is not None and not self.addressable(h)]
        state = [home for kind, home in staged if _is_ahead(kind, home)]
        if not state or id(tile) in self._ahead or self._in_use[id(tile)]:
            return True
        if any(home.stored.residency is not Residency.AT_HOME for home in state):
            return True
        nbytes = sum(page_round(home.nbytes) for _, home in staged)
        if self.staging.free < nbytes + reserve or (buffer := self.staging.try_allocate(nbytes)) is None:
            return False
        self.room.change(holding=1)
        request = Request(Priority.WRITE_BACK)  # after all that is more urgent
        places = self._lay_out([home for _, home in staged])
        work = self._read_ahead(OpenTile(group, tile, staging=buffer), state, places, request)
        self._ahead[id(tile)] = _Ahead(self._store.engine.spawn(work), request)
        self.read_ahead_bytes += sum(page_round(home.nbytes) for home in state)
        return True

    async def _read_ahead(
        self, opened: OpenTile, state: list[Home], places: dict[int, int], request: Request
    ) -> OpenTile:
        """A failure is the engine's, as that of a write-back, and of whoever opens the tile."""
        try:
            await self._read_state(opened, state, places, request.priority, request, Kind.READ_AHEAD)
        except BaseException:
            self.close(opened)
            raise
        return opened

    def is_wanted(self, tile: Tile) -> bool:
        """Somebody reads or writes it, or it was read ahead."""
        return id(tile) in self._ahead or self._in_use[id(tile)] > 0

    @asynccontextmanager
    async def weights_ahead(self, group: GroupState, tile: Tile) -> AsyncIterator[torch.Tensor | None]:
        """The weights of a tile that was read ahead, which stays so; None where it was not, and is not inside."""
        key = id(tile)
        while key in self._lent:
            await asyncio.shield(self._lent[key])
        if key not in self._ahead:
            with self._using(tile):
                yield None
            return
        returned = self._lent[key] = asyncio.get_running_loop().create_future()
        try:
            self._ahead[key].request.promote()
            opened = await asyncio.shield(self._ahead[key].task)
            assert opened.staging is not None
            yield opened.staging.view(group.layout.dtype, tile.span.numel)  # they come first in it
        finally:
            del self._lent[key]
            returned.set_result(None)

    async def discard_ahead(self, tile: Tile | None = None) -> None:
        """Gives back what was read ahead of a tile, or of all."""
        for key in list(self._ahead) if tile is None else [id(tile)]:
            with suppress(TierError):  # the engine has it
                opened = await self._take_ahead_by(key)
                if opened is not None:
                    self.close(opened)

    async def _take_ahead(self, tile: Tile) -> OpenTile | None:
        return await self._take_ahead_by(id(tile)) if self._ahead else None

    async def _take_ahead_by(self, key: int) -> OpenTile | None:
        while key in self._lent:
            await asyncio.shield(self._lent[key])
        ahead = self._ahead.pop(key, None)
        if ahead is None:
            return None
        ahead.request.promote()
        try:
            return await asyncio.shield(ahead.task)
        except BaseException:
            ahead.task.add_done_callback(self._close_forgotten)
            raise

    def _close_forgotten(self, task: asyncio.Task[OpenTile]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.close(task.result())

    @asynccontextmanager
    async def fresh(
        self, group: GroupState, tile: Tile, parts: Parts, priority: Priority = Priority.DEMAND
    ) -> AsyncIterator[OpenTile]:
        """Like `open`, but reads nothing: the block fills every byte, and at its end they are written home."""
        with self._using(tile):
            await self.discard_ahead(tile)
            homes = [(kind, home) for kind, home in self._homes(tile, parts) if home is not None]
            staged = [home for _, home in homes if not self.addressable(home)]
            opened = OpenTile(group, tile)
            if staged:
                opened.staging = await self._acquire(sum(page_round(home.nbytes) for home in staged))
            try:
                places = self._lay_out(staged)
                for kind, home in homes:
                    self._bind(group, opened, kind, home, places.get(id(home)))
                yield opened
                await self._store_fresh(opened, staged, places, priority)
            finally:
                self._release(opened)

    async def _store_fresh(
        self, opened: OpenTile, staged: list[Home], places: dict[int, int], priority: Priority
    ) -> None:
        for home in staged:
            assert opened.staging is not None
            if _on_device(home):
                copy = opened.staging.view(torch.uint8, home.nbytes, places[id(home)])
                event = self._device.copy_in(home.tensor(torch.uint8, home.nbytes), copy, self._device.now())
                await self.passed(event)
        files = [home for home in staged if not _on_device(home)]
        if files:
            assert opened.staging is not None
            start, length = places[id(files[0])], sum(page_round(home.nbytes) for home in files)
            with self.timing(Kind.PAGE_OUT, opened.group, opened.tile, length):
                await self._store.write([home.stored for home in files], opened.staging.memory(start, length), priority)

    def copy_mirrors(self, opened: OpenTile) -> list[Event]:
        """Begins to copy what was changed in staged copies of device memory back there. Compute and copies that are
        issued from now on come after it.
        """
        events = []
        for device_memory, copy in opened.mirrors:
            event = self._device.copy_in(device_memory, copy, self._device.now())
            self._device.wait(event)
            events.append(event)
        opened.mirrors.clear()
        return events

    async def passed(self, event: Event) -> None:
        """Waits for an event without holding up the loop."""
        if not self._device.is_host:
            await self._store.engine.call(event.synchronize)

    async def write_back(
        self, opened: OpenTile, copies: Sequence[Event] = (), priority: Priority = Priority.WRITE_BACK
    ) -> None:
        """Writes weight and optimizer state home where they were staged, then closes the tile. ``copies`` out of its
        staging memory are waited for before that is given back; they and the write only read it.
        """
        writing = int(opened.staging is not None)
        self.room.change(writing=writing)
        try:
            copies = [*copies, *self.copy_mirrors(opened)]
            try:
                if opened.lease is not None:
                    opened.lease.mark_dirty()
                    with self.timing(Kind.PAGE_OUT, opened.group, opened.tile, opened.tile.state_bytes(Tier.NVME)):
                        await self._store.page_out(opened.lease, priority)
                    opened.lease = None
            finally:
                for event in copies:
                    await self.passed(event)
        finally:
            # A failed write leaves the object DIRTY for good: the engine's failure ends the run.
            self.room.change(writing=-writing)
            self._release(opened)

    def close(self, opened: OpenTile) -> None:
        """Gives the staging buffer back without writing."""
        if opened.lease is not None:
            opened.lease.release()
            opened.lease = None
        self._release(opened)

    @staticmethod
    def release_gradient(opened: OpenTile) -> None:
        """Ends the lease of a gradient that was paged in, so that a new one may be written while the tile is still on
        its way home.
        """
        opened.gradient = None
        if opened.extra is not None:
            opened.extra.release()
            opened.extra = None

    def _release(self, opened: OpenTile) -> None:
        self.release_gradient(opened)
        opened.weight = None
        opened.optimizer.clear()
        opened.mirrors.clear()
        if opened.staging is not None:
            staging, opened.staging = opened.staging, None
            self.room.change(holding=-1)
            self.give_back(staging)

    def give_back(self, staging: Buffer) -> None:
        """Releases staging memory."""
        self.staging.release(staging)
        self.on_room()

    def timing(self, kind: Kind, group: GroupState, tile: Tile, nbytes: int) -> AbstractContextManager[object]:
        """Around something that is done with a tile, for the timeline."""
        return self.timeline.span(kind, group.unit.index, group.index, tile.span.index, nbytes)

    async def _acquire(self, nbytes: int) -> Buffer:
        self.room.change(waiting=1)
        taken = 0
        try:
            buffer = await self.staging.acquire(nbytes)
            taken = 1
        finally:
            self.room.change(waiting=-1, holding=taken)
        return buffer

    def addressable(self, home: Home) -> bool:
        """The host can read and write it where it lives."""
        buffer = home.stored.buffer
        return buffer is not None and (self._device.is_host or not _on_device(home))

    @staticmethod
    def _homes(tile: Tile, parts: Parts) -> list[tuple[Parts, Home | None]]:
        homes = ((Parts.WEIGHT, tile.weight), (Parts.OPTIMIZER, tile.optimizer), (Parts.GRADIENT, tile.gradient))
        return [(kind, home) for kind, home in homes if kind in parts]

    @staticmethod
    def _lay_out(homes: Sequence[Home]) -> dict[int, int]:
        """Start of each home in the staging buffer, in bytes: one after another, each on its own pages."""
        places: dict[int, int] = {}
        reduce(lambda at, home: places.setdefault(id(home), at) + page_round(home.nbytes), homes, 0)
        return places

    async def _page_in(
        self, opened: OpenTile, staged: Sequence[tuple[Parts, Home]], places: dict[int, int], priority: Priority
    ) -> None:
        state: list[Home] = []
        reads = []
        for kind, home in staged:
            assert opened.staging is not None
            if _on_device(home):
                copy = opened.staging.view(torch.uint8, home.nbytes, places[id(home)])
                source = home.tensor(torch.uint8, home.nbytes)
                await self.passed(self._device.copy_out(copy, source, self._device.now()))
                if kind is not Parts.GRADIENT:
                    opened.mirrors.append((source, copy))
            elif kind is Parts.GRADIENT:
                reads.append(self._read_gradient(opened, home, places[id(home)], priority))
            else:
                state.append(home)
        if state:
            reads.append(self._read_state(opened, state, places, priority))
        await all_or_first_error(reads)

    async def _read_state(
        self,
        opened: OpenTile,
        homes: list[Home],
        places: dict[int, int],
        priority: Priority,
        request: Request | None = None,
        kind: Kind = Kind.PAGE_IN,
    ) -> None:
        assert opened.staging is not None
        start = places[id(homes[0])]
        length = sum(page_round(home.nbytes) for home in homes)
        # The homes of one tile lie one after another in the file and in the staging buffer: this is one request.
        with self.timing(kind, opened.group, opened.tile, length):
            opened.lease = await self._store.page_in(
                [home.stored for home in homes], opened.staging.memory(start, length), priority, request
            )

    async def _read_gradient(self, opened: OpenTile, home: Home, start: int, priority: Priority) -> None:
        assert opened.staging is not None
        memory = opened.staging.memory(start, page_round(home.nbytes))
        with self.timing(Kind.PAGE_IN, opened.group, opened.tile, len(memory)):
            opened.extra = await self._store.page_in([home.stored], memory, priority)

    def _bind(self, group: GroupState, opened: OpenTile, kind: Parts, home: Home, place: int | None) -> None:
        numel = opened.tile.span.numel

        def view(dtype: torch.dtype, length: int = numel, skip: int = 0) -> torch.Tensor:
            if place is None:
                return home.tensor(dtype, length, skip)
            assert opened.staging is not None
            return opened.staging.view(dtype, length, place + skip)

        if kind is Parts.WEIGHT:
            opened.weight = view(group.layout.dtype)
        elif kind is Parts.GRADIENT:
            opened.gradient = view(group.grad_dtype)
        else:
            assert group.fmt is not None
            for segment, skip in group.fmt.places(numel):
                opened.optimizer[segment.name] = view(segment.dtype, segment.values(numel), skip)


def _is_ahead(kind: Parts, home: Home) -> bool:
    return kind in Parts.STATE and home.tier is Tier.NVME


def _on_device(home: Home) -> bool:
    return home.tier is Tier.DEVICE


async def all_or_first_error(coroutines: Sequence[object]) -> None:
    """Waits for all, even when one fails: nothing may still be writing into a buffer that is given back."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)  # type: ignore[call-overload]
    for result in results:
        if isinstance(result, BaseException):
            raise result
