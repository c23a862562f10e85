"""Updates ahead of their step: in the backward, in the drive's idle time, without knowing whether clipping will act.

A unit whose gradients are complete is updated as if the step's factor on them were 1, tile by tile, beside its current
state, which stays untouched (`tierzero.runtime.trials`). The step then fixes the update as always. Where that is the
same one, to the last number, the tiles that are done change over to their new state, and the rest follows in the next
forward. Where it is not (clipping acts, a gradient is not finite, hyperparameters were changed), all tiles are updated
in the next forward, from what has been current all the time. So no result depends on what was tried.

States of a tile of a group that is tried, and who may touch its new state:

========= ===========================================================================================
WAITING   nobody, there is none; whoever needs the group ends the attempt here
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
from tierzero.runtime.state import GroupState, Tile, UpdateSpec
from tierzero.runtime.tile_io import OpenTile, Parts, TileIO, all_or_first_error
from tierzero.runtime.trials import StagingForTrials, Trial, Trials
from tierzero.tiers import IoEngine, Priority

_MOST = 4
"""Tiles that are tried at once: reading, updating and writing overlap, and the staging memory stays for others."""


@dataclass
class _Attempt:
    """What is tried for one group; ``spec`` is what the step has to fix for it to count."""

    group: GroupState
    spec: UpdateSpec
    waiting: deque[Tile]
    ready: bool = False
    """The gradients are there."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    done: dict[int, Trial] = field(default_factory=dict)
    ended: bool = False
    """No tile that waits is begun any more."""
    decided: bool = False
    """Somebody keeps or forgets it, once its last tile is done; nobody else does."""


class Speculation:
    """``change`` updates an open tile in memory. Attempts are added and looked up from the training thread; all else
    happens on the engine's loop.
    """

    def __init__(
        self,
        engine: IoEngine,
        tile_io: TileIO,
        trials: Trials,
        change: Callable[[OpenTile, UpdateSpec, Kind], Awaitable[None]],
        reserve: int,
        staging: StagingForTrials,
    ) -> None:
        self._engine, self._tile_io, self._trials = engine, tile_io, trials
        self._change = change
        self._reserve = reserve
        """Bytes of staging memory that stay free for others."""
        self._staging = staging
        tile_io.on_room = self._pump_soon
        self._attempts: dict[int, _Attempt] = {}
        self._left = 0
        """Elements that may still be tried."""
        self._more_come = False
        """A backward is expected, or runs, that adds attempts."""
        self.kept = self.lost = 0
        """Tiles."""
        self.ahead = 0
        """Elements that were updated ahead of their step and kept."""
        self.tried_bytes = self.kept_bytes = self.lost_bytes = 0
        """Of state: made beside what is current, made current, and made in vain."""

    # From the training thread.

    def allow(self, elements: int) -> None:
        """So many elements may be tried in the backward to come."""
        self._left, self._more_come = elements, True

    def all_begun(self) -> None:
        """No attempts are added any more."""
        self._more_come = False

    def begin(self, group: GroupState, spec: UpdateSpec, after: Sequence[Future[Any]]) -> None:
        """Tries the update of a group, once all of ``after`` are done."""
        tiles = [tile for tile in group.tiles if self._trials.possible(tile) and _is_changed(tile, spec)]
        if tiles and not self.has(group):
            attempt = self._attempts[id(group)] = _Attempt(group, spec, deque(tiles))
            self._engine.submit(self._begin(attempt, after))

    def has(self, group: GroupState) -> bool:
        return id(group) in self._attempts

    def is_right(self) -> bool | None:
        """After a step: whether all that is tried is what it has fixed; None where nothing is tried."""
        tried = [attempt for attempt in list(self._attempts.values()) if attempt.running or attempt.done]
        return all(attempt.spec == attempt.group.pending for attempt in tried) if tried else None

    @property
    def claims(self) -> int:
        """Bytes of staging memory that reading ahead leaves to it: it is there for both, but not all for the first to
        come.
        """
        attempts = list(self._attempts.values())
        more = self._left > 0 and (self._more_come or any(attempt.waiting for attempt in attempts))
        if more or any(attempt.running for attempt in attempts):
            return self._staging.moving + self._staging.held - self._trials.held
        return 0

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
        if attempt is None or not await self._decide(attempt):
            return frozenset()
        if attempt.spec != spec:
            self._lose(attempt)
            return frozenset()
        await all_or_first_error([self._keep(trial) for trial in attempt.done.values()])
        self.kept += len(attempt.done)
        self.ahead += sum(trial.tile.span.numel for trial in attempt.done.values())
        return frozenset(attempt.done)

    async def _keep(self, trial: Trial) -> None:
        with self._tile_io.timing(Kind.KEPT, trial.group, trial.tile, trial.nbytes):
            await self._trials.keep(trial)
            self.kept_bytes += trial.nbytes

    async def leave(self, group: GroupState) -> None:
        """Somebody is about to read tiles of the group: none is open when this returns."""
        attempt = self._attempts.get(id(group))
        if attempt is not None:
            await self._end(attempt)

    async def _begin(self, attempt: _Attempt, after: Sequence[Future[Any]]) -> None:
        for future in after:
            await asyncio.shield(asyncio.wrap_future(future))
        attempt.ready = True
        self._pump()

    async def _stop(self) -> None:
        for attempt in list(self._attempts.values()):
            attempt.ended = True
            attempt.waiting.clear()

    async def _drop(self, groups: list[GroupState]) -> None:
        for group in groups:
            attempt = self._attempts.get(id(group))
            if attempt is not None and await self._decide(attempt):
                self._lose(attempt)

    async def _decide(self, attempt: _Attempt) -> bool:
        """Ends an attempt; whether it is the caller's to keep or to forget. A step may fetch its first units, and so
        take what was tried for them, while the next optimizer's step drops what it has not fixed.
        """
        mine, attempt.decided = not attempt.decided, True
        await self._end(attempt)
        if mine:
            del self._attempts[id(attempt.group)]
        return mine

    async def _end(self, attempt: _Attempt) -> None:
        attempt.ended = True
        attempt.waiting.clear()
        while attempt.running:
            await asyncio.wait(list(attempt.running.values()))

    def close(self) -> None:
        """After the end of the loop: memory of what nobody has decided about goes back."""
        self._tile_io.on_room = lambda: None
        for attempt in self._attempts.values():
            for trial in attempt.done.values():
                self._trials.forget(trial)
        self._attempts.clear()

    def _lose(self, attempt: _Attempt) -> None:
        for trial in attempt.done.values():
            with self._tile_io.timing(Kind.LOST, trial.group, trial.tile, trial.nbytes):
                self._trials.forget(trial)
                self.lost += 1
                self.lost_bytes += trial.nbytes

    def _pump_soon(self) -> None:
        if any(attempt.waiting for attempt in self._attempts.values()):
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        if self._engine.failure is not None:
            return
        for attempt in list(self._attempts.values()):
            while attempt.ready and attempt.waiting:
                if self._left <= 0 or not self._room_for(attempt.waiting[0]):
                    return
                if not self._start(attempt, attempt.waiting.popleft()):
                    return

    def _room_for(self, tile: Tile) -> bool:
        running = sum(len(attempt.running) for attempt in self._attempts.values())
        staged, held = self._trials.staged_bytes(tile), self._trials.held_bytes(tile)
        return (
            running < _MOST
            and self._tile_io.staging.free >= staged + self._reserve
            and (not held or self._trials.held + held <= self._staging.held)
        )

    def _start(self, attempt: _Attempt, tile: Tile) -> bool:
        """False where others stand in line for the memory that it would take."""
        # What was read ahead is about to be updated from memory, which is cheaper.
        if not self._trials.is_free(tile) or self._tile_io.is_wanted(tile):
            return True
        trial = self._trials.begin(attempt.group, tile)
        if trial is None:
            attempt.waiting.appendleft(tile)
            return False
        self._left -= tile.span.numel
        task = self._engine.spawn(self._try(attempt, trial))
        attempt.running[id(tile)] = task
        task.add_done_callback(lambda _: self._ended(attempt, tile))
        return True

    def _ended(self, attempt: _Attempt, tile: Tile) -> None:
        attempt.running.pop(id(tile), None)
        self._pump()

    async def _try(self, attempt: _Attempt, trial: Trial) -> None:
        group, tile = attempt.group, trial.tile
        try:
            opened = await self._tile_io.open(group, tile, Parts.ALL, Priority.WRITE_BACK)
            try:
                if not attempt.ended:
                    await self._trials.set_apart(opened, trial)
                    await self._change(opened, attempt.spec, Kind.TRIED)
                    await self._trials.file(opened, trial)
                    attempt.done[id(tile)] = trial
                    self.tried_bytes += trial.nbytes
            finally:
                self._tile_io.close(opened)
        finally:
            if id(tile) not in attempt.done:
                self._trials.forget(trial)


def _is_changed(tile: Tile, spec: UpdateSpec) -> bool:
    return any(segment.start < tile.span.stop and tile.span.start < segment.stop for segment in spec.segments)
