"""What the units of a plan have to move: the plain data that a simulated step works on. Bytes are those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierzero.planner.shape import GroupShape, MemoryPlan, ModelShape, TileHomes
from tierzero.tiers import Tier, page_round

_AVERAGED_COST = 1 + 12 / 26
"""An update with an average goes through 12 bytes of memory per element after the update's own 26."""
MOST_TILES = 1000
"""Of a simulated step. A larger model's are taken several as one."""


@dataclass(frozen=True)
class TileWork:
    """One tile: ``elements`` to update (more where averages move with them) and the bytes on nvme of each kind of its
    state; ``copied``: weights that a fetch copies from memory; ``staged``: bytes of staging while it is updated.
    """

    elements: int
    weights: int
    optimizer: int
    gradients: int
    copied: int
    staged: int
    trained: bool

    @property
    def state(self) -> int:
        """What an update reads and writes, gradients not counted."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class UnitWork:
    """One unit: ``arena`` bytes while it is gathered, ``gathered`` of them over the network, ``gradient`` the bytes of
    its whole gradients.
    """

    tiles: tuple[TileWork, ...]
    arena: int
    gathered: int
    gradient: int
    bucketed: bool


def unit_works(shape: ModelShape, plan: MemoryPlan, ranks: int, device_is_host: bool) -> list[UnitWork]:
    """Of every unit, tiles merged where there are too many to simulate one by one."""
    count = sum(len(tiles) for tiles in plan.homes)
    roomy = plan.staging // (4 * plan.staging_tile) if plan.staging_tile else count
    merged = max(1, min(-(-count // MOST_TILES), roomy))
    units = []
    for index in range(len(shape.unit_names)):
        members = [number for number, group in enumerate(shape.groups) if group.unit == index]
        tiles: list[TileWork] = []
        arena = gathered = gradient = 0
        bucketed = False
        for number in members:
            group, homes = shape.groups[number], plan.homes[number]
            in_place = plan.in_place[number]
            whole = group.weight_bytes(group.layout.numel)
            arena += 0 if in_place else page_round(whole)
            gathered += whole if group.layout.parts > 1 else 0
            gradient += group.gradient_bytes(group.layout.numel)
            bucketed |= group.fmt is not None and (ranks > 1 or any(home.gradient is Tier.NVME for home in homes))
            tiles += _merged(_tiles(group, homes, plan.tile, in_place, device_is_host), merged)
        units.append(UnitWork(tuple(tiles), arena, gathered, gradient, bucketed))
    return units


def _tiles(
    group: GroupShape, homes: Sequence[TileHomes], tile: int, in_place: bool, device_is_host: bool
) -> list[TileWork]:
    found = []
    for span, home in zip(group.layout.tiles(tile), homes, strict=True):
        sizes = {
            "weight": page_round(group.weight_bytes(span.numel)),
            "optimizer": page_round(group.optimizer_bytes(span.numel)),
            "gradient": page_round(group.gradient_bytes(span.numel)),
        }
        on_nvme = {kind: size if getattr(home, kind) is Tier.NVME else 0 for kind, size in sizes.items()}
        addressable = (Tier.HOST, Tier.DEVICE) if device_is_host else (Tier.HOST,)
        found.append(
            TileWork(
                round(span.numel * _update_cost(group)),
                on_nvme["weight"],
                on_nvme["optimizer"],
                on_nvme["gradient"],
                0 if in_place or home.weight is not Tier.HOST else sizes["weight"],
                sum(size for kind, size in sizes.items() if getattr(home, kind) not in (*addressable, None)),
                group.fmt is not None,
            )
        )
    return found


def _update_cost(group: GroupShape) -> float:
    """Of an element, in those of a plain update."""
    return _AVERAGED_COST if group.fmt is not None and group.fmt.is_averaged else 1.0


def _merged(tiles: Sequence[TileWork], count: int) -> list[TileWork]:
    parts = [tiles[start : start + count] for start in range(0, len(tiles), count)]
    fields = ("elements", "weights", "optimizer", "gradients", "copied", "staged")
    return [replace(part[0], **{name: sum(getattr(tile, name) for tile in part) for name in fields}) for part in parts]
