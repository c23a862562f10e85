"""What a plan needs at least, from sums over the groups alone: a model that can never fit is refused without placing
its tiles one by one, which takes minutes where there are millions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierzero.errors import BudgetError
from tierzero.planner.buffers import FEWEST_STAGING_TILES, arena_bytes, bucket_bytes, staging_tile_bytes
from tierzero.planner.shape import BYTES_OF, Budgets, GroupShape, MemoryPlan, ModelShape, PlanRequest
from tierzero.tiers import Tier


def floor_plan(shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int, prefetch: int) -> MemoryPlan:
    """A plan without tiles, no pool of which is larger than that of the real one."""
    fixed = _fixed_bytes(shape, request, budgets, tile)
    in_place = tuple(_may_be_in_place(group, request, budgets) for group in shape.groups)
    staged = fixed[Tier.NVME] > 0 or not budgets.device_is_host
    staging_tile = staging_tile_bytes(shape, tile) if staged else 0
    return MemoryPlan(
        tile=tile,
        prefetch=prefetch,
        homes=(),
        device_state=fixed[Tier.DEVICE],
        host_state=fixed[Tier.HOST],
        nvme_state=fixed[Tier.NVME],
        arena=0 if all(in_place) else arena_bytes(shape, prefetch, request.kept, in_place),
        buckets=bucket_bytes(shape) if request.reduced or not budgets.device_is_host else 0,
        staging=FEWEST_STAGING_TILES * staging_tile,
        staging_tile=staging_tile,
        in_place=in_place,
    )


def check_capacity(shape: ModelShape, request: PlanRequest, budgets: Budgets, floor: MemoryPlan) -> None:
    """Raises BudgetError where the tiers cannot hold the state, wherever "auto" puts it."""
    device, host = budgets.device_limit, budgets.host_limit
    nvme = budgets.nvme_capacity if budgets.nvme else 0
    if floor.nvme_state > nvme:
        source = "tiers.nvme_limit allows" if budgets.nvme_limited else "tiers.nvme: the paths' file systems hold"
        raise BudgetError(
            f"{source} {nvme:,} bytes, {floor.nvme_state - nvme:,} short of the {floor.nvme_state:,} of state that are "
            "placed on nvme; use larger or more drives, raise the limit, use more ranks, or place less there",
            floor.nvme_state - nvme,
        )
    # Without a GPU and with no budget of its own, the device tier gets no state: its memory is the host's.
    room = 0 if budgets.device_is_host and budgets.device is None else max(0, device - floor.device)
    room += max(0, host - floor.host) + nvme - floor.nvme_state
    total = sum(_total(shape, kind) for kind in BYTES_OF)
    auto = sum(
        _total(shape, kind, groups)
        for kind in BYTES_OF
        if kind not in request.stage.whole
        for split, groups in request.splits(kind, shape)
        if split == "auto"
    )
    if auto > room:
        raise BudgetError(
            f"the model's training state, {total:,} bytes per rank, does not fit in tiers.device ({device:,} bytes), "
            f"tiers.host ({host:,}) and tiers.nvme ({nvme:,}) together: {auto - room:,} bytes short; use a smaller "
            "model, more ranks or larger tiers",
            auto - room,
        )


def _total(shape: ModelShape, kind: str, groups: Sequence[int] | None = None) -> int:
    chosen = shape.groups if groups is None else [shape.groups[index] for index in groups]
    return sum(BYTES_OF[kind](group, group.elements(kind)) for group in chosen)


def _fixed_bytes(shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int) -> dict[Tier, int]:
    """Bytes that go to each tier because they are kept whole there, or by configured fractions, which placing meets to
    within a tile.
    """
    fixed = dict.fromkeys(Tier, 0)
    for kind, size in BYTES_OF.items():
        if kind in request.stage.whole:
            fixed[budgets.compute_tier(getattr(request, kind))] += _total(shape, kind)
            continue
        for split, groups in request.splits(kind, shape):
            if not isinstance(split, Mapping):
                continue
            of_these = [shape.groups[index] for index in groups]
            slack = max((size(group, min(tile, group.layout.shard_numel)) for group in of_these), default=0)
            for name, part in split.items():
                share = int(part * _total(shape, kind, groups))
                fixed[Tier(name)] += share if part == 1 else max(0, share - slack)
    return fixed


def _may_be_in_place(group: GroupShape, request: PlanRequest, budgets: Budgets) -> bool:
    if "params" in group.whole:
        return True
    if group.layout.parts != 1:
        return False
    split = request.frozen if group.fmt is None and request.frozen is not None else request.params
    if isinstance(split, Mapping) and split.get("nvme") == 1:
        return False
    return group.weight_bytes(group.layout.numel) <= max(budgets.device_limit, budgets.host_limit)
