"""How large the pools must be: gathered units, gradients on their way, tiles in flight. Bytes throughout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierzero.planner.shape import Budgets, GroupShape, ModelShape, TileHomes
from tierzero.tiers import Tier, page_round

STAGING_TILES = 8
"""Tiles in flight where no budget is given: read, update and write at once, with some to spare."""
FEWEST_STAGING_TILES = 2


def gathered_bytes(shape: ModelShape, in_place: Sequence[bool] | None = None) -> list[int]:
    """Bytes of each unit's gathered buffers."""
    sizes = [0] * len(shape.unit_names)
    for index, group in enumerate(shape.groups):
        if in_place is None or not in_place[index]:
            sizes[group.unit] += page_round(group.weight_bytes(group.layout.numel))
    return sizes


def arena_bytes(shape: ModelShape, prefetch: int, kept: Collection[int], in_place: Sequence[bool] | None = None) -> int:
    """Room for the ``kept`` units, and for the unit in use with its ancestors, the one used before it, and
    ``prefetch`` more, wherever in the model that is.
    """
    sizes = gathered_bytes(shape, in_place)
    always = sum(sizes[unit] for unit in kept)
    sizes = [0 if unit in kept else size for unit, size in enumerate(sizes)]
    window = prefetch + 2
    most = 0
    for start in range(len(sizes)):
        inside = range(start, min(start + window, len(sizes)))
        held = {above for unit in inside for above in shape.ancestors[unit]} | set(inside)
        most = max(most, sum(sizes[unit] for unit in held))
    # The last units of the forward are followed by the first ones again, and the two largest must fit wherever they
    # stand.
    edge = set(range(max(0, len(sizes) - window + 1), len(sizes))) | {0, 1} & set(range(len(sizes)))
    around = {above for ancestors in shape.ancestors for above in ancestors}
    inner = sorted(set(range(len(sizes))) - around, key=lambda unit: sizes[unit])
    held = around | set(inner[-2:])
    return always + min(sum(sizes), max(most, sum(sizes[unit] for unit in edge), sum(sizes[unit] for unit in held)))


def _gradient_sizes(shape: ModelShape) -> list[int]:
    """Bytes of each unit's whole gradients."""
    sizes = [0] * len(shape.unit_names)
    for group in shape.groups:
        sizes[group.unit] += page_round(group.gradient_bytes(group.bucket_elements()))
    return sizes


def all_gradient_bytes(shape: ModelShape) -> int:
    return sum(_gradient_sizes(shape))


def bucket_bytes(shape: ModelShape) -> int:
    """Room for two units, one filling while the other is put away, beside those that stay open around them (their
    ancestors).
    """
    sizes = _gradient_sizes(shape)
    around = {above for ancestors in shape.ancestors for above in ancestors}
    inner = sorted(size for unit, size in enumerate(sizes) if unit not in around)
    return sum(sizes[unit] for unit in around) + sum(inner[-2:])


def needs_buckets(group: GroupShape, homes: Sequence[TileHomes]) -> bool:
    """On one rank, gradients whose shard is not one piece of memory are collected first."""
    return group.fmt is not None and (len({home.gradient for home in homes}) > 1 or homes[0].gradient is Tier.NVME)


def staging_tile_bytes(shape: ModelShape, tile: int) -> int:
    most = 0
    for group in shape.groups:
        elements = min(tile, group.layout.shard_numel)
        parts = (group.weight_bytes(elements), group.optimizer_bytes(elements), group.gradient_bytes(elements))
        most = max(most, sum(page_round(part) for part in parts))
    return most


def staging_bytes(budgets: Budgets, host_state: int, staging_tile: int, tiles: int) -> int:
    """All that a given budget leaves, up to every tile there is: what is read ahead in a backward, and written back
    behind a forward, is as much as finds room.
    """
    if budgets.host is None:
        return max(FEWEST_STAGING_TILES, min(STAGING_TILES, tiles)) * staging_tile
    wanted = max(FEWEST_STAGING_TILES, tiles) * staging_tile
    return max(FEWEST_STAGING_TILES * staging_tile, min(wanted, budgets.host - host_state))


def tile_count(homes: Sequence[Sequence[TileHomes]]) -> int:
    return sum(1 for tiles in homes for tile in tiles if Tier.NVME in (tile.weight, tile.optimizer, tile.gradient)) or 2
