"""The way of a unit's collected gradients home: reduced over the ranks, merged with what is there, put away."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from tierzero.optim.gradient import accumulate, sum_of_squares
from tierzero.runtime.device import Device, Event
from tierzero.runtime.spans import Kind
from tierzero.runtime.state import GroupState, SlotState, Tile, UnitState
from tierzero.runtime.tile_io import Parts, TileIO, all_or_first_error
from tierzero.sharding.collectives import Collectives
from tierzero.sharding.layout import Fragment, bucket_elements
from tierzero.tiers import PAGE, Buffer, IoEngine, MemoryPool, Priority, Tier, TieredStore, page_round


@dataclass
class Bucket:
    """Gradients of one group on their way; the training thread owns it until it is dispatched, then the lane or the
    engine. ``shard`` is this rank's part, at byte ``shard_offset`` of the buffer: a slice of ``flat``, or behind it
    where a reduce-scatter needs memory of its own for its result.
    """

    group: GroupState
    buffer: Buffer
    flat: torch.Tensor
    shard: torch.Tensor
    shard_offset: int
    kept: torch.Tensor | None = None
    """Where ``flat`` is the home of gradients kept whole: what had been accumulated in this rank's part of it."""
    arrived: set[int] = field(default_factory=set)

    def restore(self) -> None:
        """Gives this rank's part of a home kept whole back what was there."""
        if self.kept is not None:
            own = self.group.whole_home("gradient")
            assert own is not None
            own.copy_(self.kept)


def bucket_bytes(group: GroupState) -> int:
    return bucket_elements(group.layout, group.keeps_whole("gradient")) * group.grad_dtype.itemsize


def new_bucket(group: GroupState, buffer: Buffer) -> Bucket:
    """A bucket over ``buffer``, of `bucket_bytes`."""
    layout, dtype = group.layout, group.grad_dtype
    if group.keeps_whole("gradient"):
        kept = buffer.view(dtype, layout.shard_numel, layout.shard_numel * dtype.itemsize)
        own = group.whole_home("gradient")
        assert own is not None
        kept.copy_(own)
        shard = buffer.view(dtype, layout.shard_numel)
        return Bucket(group, buffer, group.whole_kept("gradient"), shard, 0, kept)
    flat = buffer.view(dtype, layout.numel)
    offset = layout.numel * dtype.itemsize if layout.parts > 1 else 0
    return Bucket(group, buffer, flat, buffer.view(dtype, layout.shard_numel, offset), offset)


@dataclass(frozen=True)
class Arrival:
    """A slot whose gradient a dispatch puts away; ``accumulate``: its home already holds a part of it, which clipping
    multiplied with ``factor``.
    """

    slot: SlotState
    accumulate: bool
    factor: float


Collected = list[tuple[Bucket, list[Arrival]]]
"""Buckets of one unit, each with the slots whose gradients are in it."""


class GradientHome:
    """Reduces buckets and puts them away; owns a bucket from `send` until its memory goes back to the pool."""

    def __init__(
        self,
        engine: IoEngine,
        store: TieredStore,
        tile_io: TileIO,
        device: Device,
        collectives: Collectives | None,
        buckets: MemoryPool,
        whole: Mapping[int, torch.Tensor | None],
    ) -> None:
        self._engine = engine
        self._store = store
        self._tile_io = tile_io
        self._device = device
        self._collectives = collectives
        self._pool = buckets
        self._whole = whole

    def send(self, unit: UnitState, work: Collected, filled: Event) -> Future[None]:
        """Starts the reduction and the way home; the future ends when all is there and the buckets are free again.
        ``filled`` is an event behind the compute that filled the buckets.
        """
        collectives = self._collectives
        if collectives is None:
            return self._engine.submit(self._put_away_all(work, filled))

        def reduce_and_put_away() -> None:
            try:
                self._device.wait(filled)
                for bucket, _ in work:
                    self._zero_gaps(bucket)
                    self._reduce(collectives, bucket)
                    bucket.restore()
            except BaseException:
                for bucket, _ in work:
                    bucket.restore()
                    self._pool.release(bucket.buffer)
                raise
            self._engine.run(self._put_away_all(work, self._device.now()))

        return collectives.submit_reduce(unit.index, reduce_and_put_away)

    def _reduce(self, collectives: Collectives, bucket: Bucket) -> None:
        group, alone = bucket.group, bucket.group.layout.parts == 1
        kind = Kind.ALL_REDUCE if alone else Kind.REDUCE_SCATTER
        with self._tile_io.timeline.span(kind, group.unit.index, group.index, nbytes=bucket.flat.nbytes):
            if alone:
                collectives.all_reduce_mean(bucket.flat)
            else:
                collectives.reduce_scatter_mean(bucket.shard, bucket.flat)

    @staticmethod
    def _zero_gaps(bucket: Bucket) -> None:
        """Padding and absent gradients are summed too: they must be numbers."""
        end = 0
        for slot in bucket.group.layout.slots:
            if slot.index in bucket.arrived:
                bucket.flat[end : slot.offset].zero_()
                end = slot.offset + slot.numel
        bucket.flat[end:].zero_()

    async def _put_away_all(self, work: Collected, ready: Event) -> None:
        try:
            self._device.wait(ready)
            for bucket, arrivals in work:
                nbytes, unit = bucket.shard.nbytes, bucket.group.unit.index
                with self._tile_io.timeline.span(Kind.GRADIENTS, unit, bucket.group.index, nbytes=nbytes):
                    await self._put_away(bucket, arrivals)
        finally:
            for bucket, _ in work:
                self._pool.release(bucket.buffer)

    async def _put_away(self, bucket: Bucket, arrivals: list[Arrival]) -> None:
        group = bucket.group
        whole = self._whole[id(group)]
        shard = bucket.shard
        fragments = {fragment.slot.index: fragment for fragment in group.layout.fragments(group.part)}
        mine = [
            (arrival, fragments[arrival.slot.slot.index])
            for arrival in arrivals
            if arrival.slot.slot.index in fragments
        ]
        if whole is not None and self._device.is_host:
            for arrival, fragment in mine:
                target = _cut(whole, fragment)
                if arrival.accumulate and arrival.factor != 1.0:
                    await self._engine.call(target.mul_, arrival.factor)
                add = self._engine.call(_accumulate, target, _cut(shard, fragment), not arrival.accumulate)
                arrival.slot.sum_of_squares = await add
            return
        await self._merge_old(group, shard, mine, fragments)
        for arrival, fragment in mine:
            arrival.slot.sum_of_squares = await self._engine.call(_squares, _cut(shard, fragment))
        await all_or_first_error([self._store_tile(bucket, tile, shard) for tile in group.tiles])

    async def _merge_old(
        self,
        group: GroupState,
        shard: torch.Tensor,
        mine: list[tuple[Arrival, Fragment]],
        fragments: dict[int, Fragment],
    ) -> None:
        """Adds what the home already holds to the shard: to arrived gradients that accumulate, and as it is where
        nothing arrived.
        """
        arrived = {arrival.slot.slot.index: arrival for arrival, _ in mine}
        kept: list[tuple[Fragment, bool, float]] = []
        for slot in group.slots:
            fragment = fragments.get(slot.slot.index)
            arrival = arrived.get(slot.slot.index)
            if fragment is not None and (arrival.accumulate if arrival else slot.has_grad):
                kept.append((fragment, arrival is None, arrival.factor if arrival else 1.0))
        if not kept:
            return
        for tile in group.tiles:
            opened = await self._tile_io.open(group, tile, Parts.GRADIENT, Priority.DEMAND)
            try:
                assert opened.gradient is not None
                old = opened.gradient.to(shard.device)
                for fragment, overwrite, factor in kept:
                    start = max(fragment.shard_offset, tile.span.start)
                    stop = min(fragment.shard_offset + fragment.numel, tile.span.stop)
                    if start < stop:
                        part = old[start - tile.span.start : stop - tile.span.start]
                        part = part if factor == 1.0 else part * factor
                        await self._engine.call(_accumulate, shard[start:stop], part, overwrite)
            finally:
                self._tile_io.close(opened)

    async def _store_tile(self, bucket: Bucket, tile: Tile, shard: torch.Tensor) -> None:
        home = tile.gradient
        assert home is not None
        group = bucket.group
        part = shard[tile.span.start : tile.span.stop]
        if home.tier is not Tier.NVME:
            event = self._device.copy_out(home.tensor(group.grad_dtype, tile.span.numel), part, self._device.now())
            await self._engine.call(event.synchronize)
            return
        begin = bucket.shard_offset + tile.span.start * group.grad_dtype.itemsize
        length = page_round(home.nbytes)
        if self._device.is_host and begin % PAGE == 0 and begin + length <= bucket.buffer.capacity:
            with self._tile_io.timing(Kind.PAGE_OUT, group, tile, length):
                await self._store.write([home.stored], bucket.buffer.memory(begin, length), Priority.WRITE_BACK)
            return
        staging = await self._tile_io.staging.acquire(length)
        try:
            event = self._device.copy_out(staging.view(group.grad_dtype, tile.span.numel), part, self._device.now())
            await self._engine.call(event.synchronize)
            with self._tile_io.timing(Kind.PAGE_OUT, group, tile, length):
                await self._store.write([home.stored], staging.memory(0, length), Priority.WRITE_BACK)
        finally:
            self._tile_io.give_back(staging)


def _cut(shard: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return shard.narrow(0, fragment.shard_offset, fragment.numel)


def _accumulate(target: torch.Tensor, values: torch.Tensor, overwrite: bool) -> float:
    if not target.is_cuda:
        return accumulate(target, values.contiguous(), overwrite=overwrite)
    if overwrite:
        target.copy_(values)
    else:
        target.add_(values)
    return _squares(target)


def _squares(values: torch.Tensor) -> float:
    if not values.is_cuda:
        return sum_of_squares(values)
    return float(values.double().square().sum())
