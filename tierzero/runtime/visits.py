"""Going through the tiles that hold parts of some parameters: each is opened once, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tierzero.runtime.state import GroupState, Piece, SlotState, Tile, piece_in
from tierzero.runtime.tile_io import OpenTile, Parts, all_or_first_error
from tierzero.tiers import Priority

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime

Act = Callable[[OpenTile, Piece], bool]
"""What is done with a part of a parameter in its open tile; True when the tile has changed."""

_AT_ONCE = 8
"""Tiles in flight. Each waits for its staging memory by itself, so more would only wait longer."""


def visit(runtime: Runtime, slots: Iterable[SlotState], parts: Parts, act: Act, whole: bool = False) -> None:
    """Opens the ``parts`` of every tile that holds something of ``slots`` and writes back what ``act`` has changed.

    ``act`` runs on the engine's compute threads, for different tiles at once. Raises TierError. ``whole``: some tiles
    changed and others not are no state to go on from, so that nobody can after a failure.
    """
    work = _tiles(slots)
    if work:
        visiting = _visit_all(runtime, work, parts, act)
        runtime.engine.run(runtime.updater.whole_or_failed(visiting) if whole else visiting)


def _tiles(slots: Iterable[SlotState]) -> list[tuple[GroupState, Tile, list[Piece]]]:
    by_group: dict[GroupState, list[SlotState]] = {}
    for slot in slots:
        by_group.setdefault(slot.group, []).append(slot)
    found = []
    for group, members in by_group.items():
        for tile in group.tiles:
            pieces = [piece for slot in members if (piece := piece_in(slot, tile)) is not None]
            if pieces:
                found.append((group, tile, pieces))
    return found


async def _visit_all(
    runtime: Runtime, work: Sequence[tuple[GroupState, Tile, list[Piece]]], parts: Parts, act: Act
) -> None:
    room = asyncio.Semaphore(_AT_ONCE)
    visit_tile = _visit_gradient if parts is Parts.GRADIENT else _visit_state

    async def one(group: GroupState, tile: Tile, pieces: list[Piece]) -> None:
        async with room:
            await visit_tile(runtime, group, tile, pieces, parts, act)

    await all_or_first_error([one(*each) for each in work])


async def _visit_state(
    runtime: Runtime, group: GroupState, tile: Tile, pieces: list[Piece], parts: Parts, act: Act
) -> None:
    opened = await runtime.tile_io.open(group, tile, parts, Priority.DEMAND)
    try:
        dirty = await runtime.engine.call(_act_on_all, opened, pieces, act)
    except BaseException:
        runtime.tile_io.close(opened)
        raise
    if dirty:
        await runtime.updater.whole_or_failed(runtime.tile_io.write_back(opened))
    else:
        runtime.tile_io.close(opened)


async def _visit_gradient(
    runtime: Runtime, group: GroupState, tile: Tile, pieces: list[Piece], parts: Parts, act: Act
) -> None:
    """A gradient's lease is for reading: a changed one is written anew, as the reduction writes it."""
    opened = await runtime.tile_io.open(group, tile, parts, Priority.DEMAND)
    try:
        dirty = await runtime.engine.call(_act_on_all, opened, pieces, act)
        assert opened.gradient is not None
        changed = opened.gradient.clone() if dirty else None
    finally:
        runtime.tile_io.close(opened)
    if changed is not None:
        async with runtime.tile_io.fresh(group, tile, parts) as new:
            assert new.gradient is not None
            await runtime.engine.call(new.gradient.copy_, changed)


def _act_on_all(opened: OpenTile, pieces: Sequence[Piece], act: Act) -> bool:
    changed = [act(opened, piece) for piece in pieces]
    return any(changed)
