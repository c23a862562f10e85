"""Which tier each tile's weights, optimizer state and gradients live in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierzero.planner.shape import BYTES_OF, Budgets, GroupShape, ModelShape, PlanRequest, Split, TileHomes
from tierzero.sharding.stages import KINDS
from tierzero.tiers import Tier, page_round


def is_in_place(group: GroupShape, homes: Sequence[TileHomes], budgets: Budgets) -> bool:
    if "params" in group.whole:
        return True
    if group.layout.parts != 1 or len({home.weight for home in homes}) != 1:
        return False
    return homes[0].weight is Tier.DEVICE or (homes[0].weight is Tier.HOST and budgets.device_is_host)


class _Chooser:
    """Gives each tile of one kind a tier: by the configured fractions, spread evenly, or ("auto") the fastest that
    has room.
    """

    def __init__(self, split: Split, room: dict[Tier, int], nvme: bool) -> None:
        self._fractions = {Tier(name): part for name, part in split.items()} if isinstance(split, Mapping) else None
        self._room = room
        self._nvme = nvme
        self._given: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._total = 0

    def choose(self, nbytes: int, device_allowed: bool = True) -> Tier:
        fractions = self._fractions
        if fractions is not None:
            self._total += nbytes
            tier = max(fractions, key=lambda t: fractions[t] * self._total - self._given[t])
        else:
            memory = (Tier.DEVICE, Tier.HOST) if device_allowed else (Tier.HOST,)
            last = Tier.NVME if self._nvme else Tier.HOST
            tier = next((tier for tier in memory if self._room[tier] >= nbytes), last)
        self._given[tier] += nbytes
        if tier in self._room:
            self._room[tier] -= nbytes
        return tier


def place(
    shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int, room: dict[Tier, int]
) -> tuple[tuple[TileHomes, ...], ...]:
    """What is kept whole and explicit placements take their room first; then what is placed automatically, in the
    request's order.
    """
    tiles = [[span.numel for span in group.layout.tiles(tile)] for group in shape.groups]
    chosen: dict[str, list[list[Tier]]] = {}
    for kind in request.stage.whole:
        tier = budgets.compute_tier(getattr(request, kind))
        room[tier] -= sum(page_round(BYTES_OF[kind](group, group.elements(kind))) for group in shape.groups)
        chosen[kind] = [[tier] * len(numels) for numels in tiles]
    # A GPU updates what lies in its memory: optimizer state is only of use there beside the weights.
    with_weights = request.optimizer == "auto" and not budgets.device_is_host
    order = list(request.order)
    if with_weights and order.index("optimizer") < order.index("params"):
        order.remove("params")
        order.insert(order.index("optimizer"), "params")
    parts = [(kind, *part) for kind in order if kind not in chosen for part in request.splits(kind, shape)]
    for kind, split, indexes in sorted(parts, key=lambda part: part[1] == "auto"):
        chooser = _Chooser(split, room, budgets.nvme)
        homes = chosen.setdefault(kind, [[] for _ in shape.groups])
        for index in indexes:
            homes[index] = [
                chooser.choose(
                    page_round(BYTES_OF[kind](shape.groups[index], numel)),
                    device_allowed=kind != "optimizer"
                    or not with_weights
                    or chosen["params"][index][tile_index] is Tier.DEVICE,
                )
                for tile_index, numel in enumerate(tiles[index])
            ]
    return tuple(
        tuple(
            TileHomes(weight, optimizer if group.fmt else None, gradient if group.fmt else None)
            for weight, optimizer, gradient in zip(
                chosen["params"][index], chosen["optimizer"][index], chosen["gradients"][index], strict=True
            )
        )
        for index, group in enumerate(shape.groups)
    )


def totals_by_kind(shape: ModelShape, homes: Sequence[Sequence[TileHomes]], tile: int) -> dict[str, dict[Tier, int]]:
    """Persistent bytes of each kind of state per tier."""
    found = {kind: dict.fromkeys(Tier, 0) for kind in KINDS}
    for group, tiles in zip(shape.groups, homes, strict=True):
        for kind, field in zip(KINDS, ("weight", "gradient", "optimizer"), strict=True):
            size, totals = BYTES_OF[kind], found[kind]
            tiers = [getattr(home, field) for home in tiles]
            if tiers[0] is None:
                continue
            if kind in group.whole:
                totals[tiers[0]] += page_round(size(group, group.elements(kind)))
                continue
            for span, tier in zip(group.layout.tiles(tile), tiers, strict=True):
                totals[tier] += page_round(size(group, span.numel))
    return found


def totals_by_tier(shape: ModelShape, homes: Sequence[Sequence[TileHomes]], tile: int) -> dict[Tier, int]:
    """Persistent bytes per tier."""
    by_kind = totals_by_kind(shape, homes, tile).values()
    return {tier: sum(totals[tier] for totals in by_kind) for tier in Tier}
