"""Updates ahead of their step: in the backward, in the drive's idle time, without knowing whether clipping will act.

A unit whose gradients are complete is updated as if the step's factor on them were 1, tile by tile, into the spare
slots of its tiles (`tierzero.tiers.objects.StoredObject`); what is current stays untouched. The step then fixes the
update as always. Where that is the same one, to the last number, the tiles that are done change their slots, and the
rest follows in the next forward. Where it is not (clipping acts, a gradient is not finite, hyperparameters were
changed), all tiles are updated in the next forward, from what has been current all the time. So no result depends on
what was tried.

States of a tile of a group that is tried, and who may touch its spare slot:

========= ===========================================================================================
WAITING   nobody; whoever needs the group ends the attempt here
RUNNING   the speculation, which has the tile open: others wait for its end
DONE      nobody; `Speculation.take` makes it current, anything else forgets it
========= ===========================================================================================
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tierzero.runtime.spans import Kind
from tierzero.runtime.state import GroupState, Home, Tile, UpdateSpec
from tierzero.runtime.tile_io import OpenTile, Parts, TileIO
from tierzero.tiers import IoEngine, Priority, Residency, Tier, TieredStore, page_round

_MOST = 4
"""Tiles that are tried at once: reading, updating and writing overlap, and the staging memory stays for others."""
_LONGEST_PAUSE = 64
"""Steps."""


@dataclass
class _Attempt:
    """What is tried for one group; ``spec`` is what the step has to fix for it to count."""

    group: GroupState
    spec: UpdateSpec
    waiting: deque[Tile] = field(default_factory=deque)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    done: dict[int, Tile] = field(default_factory=dict)
    ended: bool = False


class Speculation:
    """``change`` updates an open tile in memory. Attempts are added and looked up from the training thread; all else
    happens on the engine's loop.
    """

    def __init__(
        self,
        engine: IoEngine,
        store: TieredStore,
        tile_io: TileIO,
        change: Callable[[OpenTile, UpdateSpec, Kind], Awaitable[None]],
        reserve: int,
    ) -> None:
        self._engine, self._store, self._tile_io = engine, store, tile_io
        self._change = change
        self._reserve = reserve
        """Bytes of staging memory that stay free for others."""
        self._attempts: dict[int, _Attempt] = {}
        self.kept = self.lost = 0
        """Tiles."""
        self.tried_bytes = self.kept_bytes = self.lost_bytes = 0
        """Of state: written to spare slots, made current there, and written in vain."""

    # From the training thread.

    def begin(self, group: GroupState, spec: UpdateSpec, after: Sequence[Future[Any]]) -> None:
        """Tries the update of a group, once all of ``after`` are done."""
        tiles = [tile for tile in group.tiles if _may_be_tried(tile) and _is_changed(tile, spec)]
        if tiles and not self.has(group):
            attempt = self._attempts[id(group)] = _Attempt(group, spec)
            self._engine.submit(self._begin(attempt, tiles, after))

    def has(self, group: GroupState) -> bool:
        return id(group) in self._attempts

    def is_right(self) -> bool | None:
        """After a step: whether all that is tried is what it has fixed; None where nothing is tried."""
        tried = list(self._attempts.values())
        return all(attempt.spec == attempt.group.pending for attempt in tried) if tried else None

    def stop(self) -> None:
        """No tile that waits is tried any more."""
        if self._attempts:
            self._engine.submit(self._stop())

    def drop(self, groups: Iterable[GroupState]) -> None:
        """Forgets what was tried for ``groups``; nobody reads their gradients when this returns."""
        tried = [group for group in groups if self.has(group)]
        if tried:
            self._engine.run(self._drop(tried))

    # On the loop.

    def holds(self, tile: Tile) -> bool:
        """What is current of the tile is being read, or may not stay so."""
        return any(id(tile) in attempt.running or id(tile) in attempt.done for attempt in list(self._attempts.values()))

    async def take(self, group: GroupState, spec: UpdateSpec) -> frozenset[int]:
        """Ends the attempt for a group whose update is ``spec``; the tiles (by identity) that have it now."""
        attempt = self._attempts.get(id(group))
        if attempt is None:
            return frozenset()
        await self._end(attempt)
        self._attempts.pop(id(group), None)
        if attempt.spec != spec:
            self._lose(attempt)
            return frozenset()
        for tile in attempt.done.values():
            with self._tile_io.timing(Kind.KEPT, group, tile, _nbytes(tile)):
                self._store.adopt_spare([home.stored for home in _state(tile)])
                self.kept_bytes += _nbytes(tile)
        self.kept += len(attempt.done)
        return frozenset(attempt.done)

    async def leave(self, group: GroupState) -> None:
        """Somebody is about to read tiles of the group: none is open when this returns."""
        attempt = self._attempts.get(id(group))
        if attempt is not None:
            await self._end(attempt)

    async def _begin(self, attempt: _Attempt, tiles: list[Tile], after: Sequence[Future[Any]]) -> None:
        for future in after:
            await asyncio.shield(asyncio.wrap_future(future))
        if not attempt.ended:
            attempt.waiting.extend(tiles)
            self._pump()

    async def _stop(self) -> None:
        for attempt in list(self._attempts.values()):
            attempt.ended = True
            attempt.waiting.clear()

    async def _drop(self, groups: list[GroupState]) -> None:
        for group in groups:
            attempt = self._attempts.get(id(group))
            if attempt is not None:
                await self._end(attempt)
                self._attempts.pop(id(group), None)
                self._lose(attempt)

    async def _end(self, attempt: _Attempt) -> None:
        attempt.ended = True
        attempt.waiting.clear()
        while attempt.running:
            await asyncio.wait(list(attempt.running.values()))

    def _lose(self, attempt: _Attempt) -> None:
        for tile in attempt.done.values():
            with self._tile_io.timing(Kind.LOST, attempt.group, tile, _nbytes(tile)):
                self.lost += 1
                self.lost_bytes += _nbytes(tile)

    def _pump(self) -> None:
        for attempt in list(self._attempts.values()):
            while attempt.waiting:
                if not self._room_for(attempt.waiting[0]):
                    return
                self._start(attempt, attempt.waiting.popleft())

    def _room_for(self, tile: Tile) -> bool:
        running = sum(len(attempt.running) for attempt in self._attempts.values())
        nbytes = _nbytes(tile) + (page_round(tile.gradient.nbytes) if tile.gradient is not None else 0)
        return running < _MOST and self._tile_io.staging.free >= nbytes + self._reserve

    def _start(self, attempt: _Attempt, tile: Tile) -> None:
        state = [home.stored for home in _state(tile)]
        at_home = all(stored.residency is Residency.AT_HOME and stored.spare_is_free for stored in state)
        # What was read ahead is about to be updated from memory, which is cheaper.
        if at_home and not self._tile_io.is_wanted(tile):
            task = self._engine.spawn(self._try(attempt, tile))
            attempt.running[id(tile)] = task
            task.add_done_callback(lambda _: self._ended(attempt, tile))

    def _ended(self, attempt: _Attempt, tile: Tile) -> None:
        attempt.running.pop(id(tile), None)
        if self._engine.failure is None:
            self._pump()

    async def _try(self, attempt: _Attempt, tile: Tile) -> None:
        opened = await self._tile_io.open(attempt.group, tile, Parts.ALL, Priority.WRITE_BACK)
        try:
            if attempt.ended:
                return
            await self._change(opened, attempt.spec, Kind.TRIED)
            assert opened.lease is not None
            with self._tile_io.timing(Kind.PAGE_OUT, attempt.group, tile, _nbytes(tile)):
                await self._store.write_spare(opened.lease, Priority.WRITE_BACK)
            attempt.done[id(tile)] = tile
            self.tried_bytes += _nbytes(tile)
        finally:
            self._tile_io.close(opened)


class Habit:
    """Whether trying pays: not where it was lost lately, and only in the backward that the step usually follows.

    After a lost step, 1, 2, 4 and up to 64 steps go without, as often as it is lost again; a step in which it would
    have been kept starts that anew. So a run that clips in every step tries in one of 64.
    """

    def __init__(self) -> None:
        self._usual = self._backwards = 0
        self._pause = self._left = 0
        self.left_out = False
        """The step that runs goes without, because of an earlier one."""

    def tries(self) -> bool:
        """Called in a backward."""
        self.left_out = self._left > 0
        return self._left == 0 and self._backwards + 1 == self._usual

    def backward_ended(self) -> None:
        self._backwards += 1

    def step_ended(self, factor_was_one: bool) -> None:
        """``factor_was_one``: what was tried, if anything, was right."""
        self._usual, self._backwards, self.left_out = self._backwards, 0, False
        if factor_was_one:
            self._pause = self._left = 0
        elif self._left:
            self._left -= 1
        else:
            self._pause = min(_LONGEST_PAUSE, max(1, 2 * self._pause))
            self._left = self._pause


def _state(tile: Tile) -> list[Home]:
    return [home for home in (tile.weight, tile.optimizer) if home is not None]


def _nbytes(tile: Tile) -> int:
    """Of its state as it is filed."""
    return sum(page_round(home.nbytes) for home in _state(tile))


def _may_be_tried(tile: Tile) -> bool:
    homes = _state(tile)
    return len(homes) == 2 and all(home.tier is Tier.NVME and home.stored.twofold for home in homes)


def _is_changed(tile: Tile, spec: UpdateSpec) -> bool:
    return any(segment.start < tile.span.stop and tile.span.start < segment.stop for segment in spec.segments)
