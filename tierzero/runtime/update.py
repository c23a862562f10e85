"""The update pipeline: pending updates applied to tiles, several in flight, feeding the gathers from memory.

`Updater.bring` is the one way by which a shard's weights reach the memory a gather starts from: a tile with a pending
update is paged in whole, updated, its new weights copied out, and written back behind; a tile without is read
(weights only), straight into place where alignment allows. Thus the update's read is the forward's read. Everything
here runs on the engine's loop but the kernel, which runs on its compute threads.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tierzero.optim.average import move_average, move_average_reference, rate_of
from tierzero.optim.kernel import update as update_on_host
from tierzero.optim.reference import update_reference
from tierzero.planner.buffers import FEWEST_STAGING_TILES
from tierzero.runtime.device import Device, Event
from tierzero.runtime.spans import Kind
from tierzero.runtime.speculation import Speculation
from tierzero.runtime.state import GroupState, Home, Tile, UpdateSpec
from tierzero.runtime.stats import RoomClock
from tierzero.runtime.tile_io import OpenTile, Parts, TileIO
from tierzero.runtime.trials import StagingForTrials, Trials
from tierzero.tiers import PAGE, Buffer, IoEngine, Priority, Tier, TieredStore, page_round

T = TypeVar("T")


@dataclass(frozen=True)
class Destination:
    """Where a shard's weights are wanted: in ``buffer`` (device memory) from byte ``offset``; ``after`` is the last
    compute that reads what was there.
    """

    buffer: Buffer
    offset: int
    after: Event

    def tensor(self, dtype: torch.dtype, numel: int, start: int) -> torch.Tensor:
        return self.buffer.view(dtype, numel, self.offset + start * dtype.itemsize)


class Updater:
    """Applies pending updates and brings weights. ``kernel_seconds`` and ``updated`` (elements) count what the kernel
    did. ``ema`` is the decay of averages of the weights, of formats that have them.
    """

    def __init__(
        self,
        engine: IoEngine,
        store: TieredStore,
        tile_io: TileIO,
        device: Device,
        staging_tile: int = 0,
        ema: float = 0.0,
        for_trials: StagingForTrials | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._tile_io = tile_io
        self._device = device
        self._average_rate = rate_of(ema)
        self._reserve = FEWEST_STAGING_TILES * staging_tile
        """Bytes of staging that reading ahead leaves free: with so many every update gets on."""
        self._writing: set[asyncio.Task[None]] = set()
        self._under_way: set[asyncio.Future[Any]] = set()
        """Updates that somebody has asked for, until all tiles have them in memory."""
        trials = Trials(engine, store, tile_io, device)
        for_trials = for_trials or StagingForTrials()
        self.speculation = Speculation(engine, tile_io, trials, self._change, self._reserve, for_trials)
        self.before_change: Callable[[Tile, OpenTile | None], Awaitable[None]] | None = None
        """Awaited before a tile is updated, with what is in memory of it; see `tierzero.runtime.snapshot`."""
        self.kernel_seconds = 0.0
        self.updated = 0

    @property
    def room(self) -> RoomClock:
        return self._tile_io.room

    async def bring(
        self, group: GroupState, spec: UpdateSpec | None, destination: Destination | None, priority: Priority
    ) -> list[Event]:
        """Applies ``spec`` (if any) to the group's shard and puts its weights at ``destination`` (if any).

        Returns the events after which the destination is complete. Write-back of updated tiles goes on behind it.
        """
        with self._asked_for(spec):
            updating = group.updating
            if updating is not None:
                await asyncio.wrap_future(updating)
            work = self._bring_all(group, spec, destination, priority)
            return await (work if spec is None else self.whole_or_failed(work))

    async def apply(self, group: GroupState, spec: UpdateSpec, priority: Priority) -> None:
        """Updates the shard in its home only; unlike `bring` it does not wait for ``group.updating``, which it is."""
        await self._bring_all(group, spec, None, priority)

    async def whole_or_failed(self, update: Coroutine[Any, Any, T]) -> T:
        """Runs an update that nothing can take back: if it fails half-way, tiles of one shard are at different steps.
        The engine then keeps the error, so that nobody goes on from them. An interrupt of whoever waits does not reach
        it.
        """
        task = self._engine.spawn(update)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    @contextmanager
    def _asked_for(self, spec: UpdateSpec | None) -> Iterator[None]:
        if spec is None:
            yield
            return
        ended = asyncio.get_running_loop().create_future()
        self._under_way.add(ended)
        try:
            yield
        finally:
            self._under_way.discard(ended)
            ended.set_result(None)

    async def _bring_all(
        self, group: GroupState, spec: UpdateSpec | None, destination: Destination | None, priority: Priority
    ) -> list[Event]:
        if spec is None:
            await self.speculation.leave(group)
        updated = frozenset() if spec is None else await self.speculation.take(group, spec)
        work = [
            self._bring_tile(group, tile, None if id(tile) in updated else spec, destination, priority)
            for tile in group.tiles
        ]
        group.applying = spec
        results = await asyncio.gather(*work, return_exceptions=True)
        group.applying = None
        events: list[Event] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            events.extend(result)
        return events

    def read_ahead(self, groups: Sequence[GroupState]) -> None:
        """Begins to read the first tiles of the next step, as many as find room. ``groups`` are in the order of use."""
        self._engine.submit(self._read_ahead(groups))

    async def _read_ahead(self, groups: Sequence[GroupState]) -> None:
        for group in groups:
            for tile in group.tiles if group.fmt is not None else ():
                if self.speculation.holds(tile):
                    continue
                if not self._tile_io.read_ahead(group, tile, self._reserve + self.speculation.claims):
                    return

    async def written(self) -> None:
        """Every update that was submitted to the loop before this is applied and written; raises what failed.

        Each is known from its first moment on the loop, and the loop begins what it is given in order.
        """
        while self._under_way:
            await asyncio.wait(tuple(self._under_way))
        await self.drain()
        self._engine.check()

    async def drain(self) -> None:
        """Waits for every write-back begun so far; raises the first failure. Cancelled, it leaves them alone."""
        while self._writing:
            done, _ = await asyncio.wait(tuple(self._writing))
            for written in done:
                written.result()

    async def _bring_tile(
        self,
        group: GroupState,
        tile: Tile,
        spec: UpdateSpec | None,
        destination: Destination | None,
        priority: Priority,
    ) -> list[Event]:
        segments = _clip_segments(tile, spec)
        if spec is not None and segments:
            return await self._update_tile(group, tile, spec, segments, destination, priority)
        return await self._read_weights(group, tile, destination, priority) if destination is not None else []

    async def _update_tile(
        self,
        group: GroupState,
        tile: Tile,
        spec: UpdateSpec,
        segments: list[tuple[int, int, int]],
        destination: Destination | None,
        priority: Priority,
    ) -> list[Event]:
        assert tile.optimizer is not None
        if tile.optimizer.tier is Tier.DEVICE and not self._device.is_host:
            return await self._update_on_device(group, tile, spec, segments, destination)
        opened = await self._tile_io.open(group, tile, Parts.ALL, priority)
        try:
            await self._change(opened, spec)
            self._tile_io.release_gradient(opened)
            events = self._tile_io.copy_mirrors(opened)
            if destination is not None:
                assert opened.weight is not None
                target = destination.tensor(group.layout.dtype, tile.span.numel, tile.span.start)
                events.append(self._device.copy_in(target, opened.weight, destination.after))
        except BaseException:
            self._tile_io.close(opened)
            raise
        self._write_behind(opened, events)
        return events

    async def _change(self, opened: OpenTile, spec: UpdateSpec, kind: Kind = Kind.UPDATE) -> None:
        """Updates an open tile in memory."""
        segments = _clip_segments(opened.tile, spec)
        await self._secure(opened.tile, opened)
        started = time.perf_counter()
        await self._engine.call(self._run_kernel, opened, spec, segments, kind)
        self.kernel_seconds += time.perf_counter() - started
        self.updated += sum(stop - start for start, stop, _ in segments)

    def _run_kernel(self, opened: OpenTile, spec: UpdateSpec, segments: list[tuple[int, int, int]], kind: Kind) -> None:
        moved = sum(part.nbytes for _, part in opened.segments())
        with self._tile_io.timing(kind, opened.group, opened.tile, moved):
            _run_kernel(opened.group, opened, spec, segments, self._average_rate)

    async def _secure(self, tile: Tile, opened: OpenTile | None) -> None:
        if self.before_change is not None:
            await self.before_change(tile, opened)

    def _write_behind(self, opened: OpenTile, events: list[Event]) -> None:
        """Starts the write-back. It begins before anything else of the loop, and so before whoever waits for this
        update could want the tile again.
        """
        written = self._engine.spawn(self._tile_io.write_back(opened, events))
        self._writing.add(written)
        written.add_done_callback(self._writing.discard)

    async def _update_on_device(
        self,
        group: GroupState,
        tile: Tile,
        spec: UpdateSpec,
        segments: list[tuple[int, int, int]],
        destination: Destination | None,
    ) -> list[Event]:
        """State in device memory is updated there, by PyTorch operations of the same arithmetic."""
        assert tile.optimizer is not None
        assert group.fmt is not None
        await self._secure(tile, None)
        if destination is not None:
            self._device.wait(destination.after)
        numel = tile.span.numel
        weight = tile.weight.tensor(group.layout.dtype, numel)
        optimizer = {
            part.name: tile.optimizer.tensor(part.dtype, part.values(numel), skip)
            for part, skip in group.fmt.places(numel)
        }
        gradient = await self._gradient_on_device(group, tile)
        with self._tile_io.timing(Kind.UPDATE, group, tile, tile.weight.nbytes + tile.optimizer.nbytes):
            for start, stop, index in segments:
                parts = group.fmt.cut(optimizer, slice(start, stop))
                segment = spec.segments[index]
                update_reference(
                    group.fmt, weight[start:stop], parts, gradient[start:stop], segment.hyper, segment.grad_scale
                )
                if group.fmt.is_averaged:
                    move_average_reference(group.fmt, weight[start:stop], parts, self._average_rate)
        self.updated += sum(stop - start for start, stop, _ in segments)
        if destination is not None:
            destination.tensor(group.layout.dtype, numel, tile.span.start).copy_(weight)
        return [self._device.now()]

    async def _gradient_on_device(self, group: GroupState, tile: Tile) -> torch.Tensor:
        home = tile.gradient
        assert home is not None
        if home.tier is Tier.DEVICE:
            return home.tensor(group.grad_dtype, tile.span.numel)
        opened = await self._tile_io.open(group, tile, Parts.GRADIENT, Priority.DEMAND)
        try:
            assert opened.gradient is not None
            copy = functools.partial(opened.gradient.to, self._device.torch_device, copy=True)
            copied: torch.Tensor = await self._engine.call(copy)
            return copied
        finally:
            self._tile_io.close(opened)

    async def _read_weights(
        self, group: GroupState, tile: Tile, destination: Destination, priority: Priority
    ) -> list[Event]:
        home = tile.weight
        target = destination.tensor(group.layout.dtype, tile.span.numel, tile.span.start)
        if home.tier is not Tier.NVME:
            return [self._device.copy_in(target, home.tensor(group.layout.dtype, tile.span.numel), destination.after)]
        async with self._tile_io.weights_ahead(group, tile) as ahead:
            if ahead is None:
                return await self._read_weights_from_file(group, tile, destination, target, priority)
            event = self._device.copy_in(target, ahead, destination.after)
            await self._tile_io.passed(event)
            return [event]

    async def _read_weights_from_file(
        self, group: GroupState, tile: Tile, destination: Destination, target: torch.Tensor, priority: Priority
    ) -> list[Event]:
        home = tile.weight
        begin = destination.offset + tile.span.start * group.layout.dtype.itemsize
        if self._fits_directly(destination, begin, home):
            memory = destination.buffer.memory(begin, page_round(home.nbytes))
            with self._tile_io.timing(Kind.PAGE_IN, group, tile, len(memory)):
                lease = await self._store.page_in([home.stored], memory, priority)
            lease.release()
            return []
        opened = await self._tile_io.open(group, tile, Parts.WEIGHT, priority)
        try:
            assert opened.weight is not None
            event = self._device.copy_in(target, opened.weight, destination.after)
            await self._tile_io.passed(event)
        finally:
            self._tile_io.close(opened)
        return [event]

    def _fits_directly(self, destination: Destination, begin: int, home: Home) -> bool:
        """A file can be read straight into the gathered buffer: host memory, page-aligned, and the rounded-up tail
        spoils nothing.

        The tail may reach into what a later tile or another rank's shard fills, so only whole pages are read in
        place, or the very end of the buffer.
        """
        if not self._device.is_host or begin % PAGE:
            return False
        return home.nbytes % PAGE == 0 or begin + page_round(home.nbytes) == destination.buffer.capacity


def _clip_segments(tile: Tile, spec: UpdateSpec | None) -> list[tuple[int, int, int]]:
    """(start, stop, index of the segment) inside the tile, relative to its start, for every segment that touches it."""
    if spec is None:
        return []
    found = []
    for index, segment in enumerate(spec.segments):
        start, stop = max(segment.start, tile.span.start), min(segment.stop, tile.span.stop)
        if start < stop:
            found.append((start - tile.span.start, stop - tile.span.start, index))
    return found


def _run_kernel(
    group: GroupState, opened: OpenTile, spec: UpdateSpec, segments: list[tuple[int, int, int]], average_rate: float
) -> None:
    assert opened.weight is not None
    assert opened.gradient is not None
    assert group.fmt is not None
    for start, stop, index in segments:
        weight, parts = opened.weight[start:stop], opened.cut(slice(start, stop))
        segment = spec.segments[index]
        update_on_host(group.fmt, weight, parts, opened.gradient[start:stop], segment.hyper, segment.grad_scale)
        if group.fmt.is_averaged:
            move_average(group.fmt, weight, parts, average_rate)
