"""From the model's shape, the placement and the budgets to every pool's size: decided, and checked, before anything is
allocated.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierzero.errors import BudgetError, ConfigError
from tierzero.planner.buffers import (
    FEWEST_STAGING_TILES,
    STAGING_TILES,
    all_gradient_bytes,
    arena_bytes,
    bucket_bytes,
    gathered_bytes,
    needs_buckets,
    staging_bytes,
    staging_tile_bytes,
    tile_count,
)
from tierzero.planner.placement import is_in_place, place, totals_by_tier
from tierzero.planner.shape import Budgets, GroupShape, MemoryPlan, ModelShape, PlanRequest
from tierzero.tiers import Tier

DEFAULT_TILE = 2 * 1024 * 1024
"""Elements. 28 MB of bf16 training state with its gradient: long enough for the drive, short enough to pipeline."""
SMALLEST_TILE = 64 * 1024
DEFAULT_PREFETCH = 2
MANY_TILES = 1 << 20
"""From here on placing them one by one takes minutes: whether all tiers together hold them is looked at first."""


def plan_memory(shape: ModelShape, request: PlanRequest, budgets: Budgets) -> MemoryPlan:
    """Places every tile and sizes every pool.

    Raises ConfigError for a placement that cannot be carried out and BudgetError, naming the bytes missing and the
    key, when a budget is too small.
    """
    _check_request(request, budgets)
    _check_total(shape, request, budgets)
    best: BudgetError | None = None
    for tile in _tile_sizes(shape, request):
        for prefetch in _prefetch_depths(request):
            plan = _plan(shape, request, budgets, tile, prefetch)
            try:
                _check_fits(shape, plan, budgets)
                return plan
            except BudgetError as error:
                best = error if best is None or error.missing < best.missing else best
        if not _tiles_matter(shape, request, budgets, plan):
            break
    assert best is not None
    raise best


def _tiles_matter(shape: ModelShape, request: PlanRequest, budgets: Budgets, plan: MemoryPlan) -> bool:
    """Whether smaller tiles than those of ``plan`` could fit. A huge model has very many of them to place: it is
    refused at once where its gathered units alone are too large.
    """
    device = budgets.device_free if budgets.device is None else budgets.device
    host = budgets.host_free if budgets.host is None else budgets.host
    if isinstance(request.params, Mapping) and request.params.get("nvme") == 1:
        return plan.arena <= device
    # Weights are gathered, or the device computes from where they lie.
    return max(group.weight_bytes(group.layout.numel) for group in shape.groups) <= max(device, host)


def _check_request(request: PlanRequest, budgets: Budgets) -> None:
    for kind in ("params", "optimizer", "gradients"):
        split = getattr(request, kind)
        if isinstance(split, Mapping) and split.get("nvme", 0) > 0 and not budgets.nvme:
            raise ConfigError(f"placement.{kind}: nvme is asked for, but tiers.nvme lists no path; add one")
    optimizer, params = request.optimizer, request.params
    on_device = isinstance(optimizer, Mapping) and optimizer.get("device", 0) > 0
    weights_too = isinstance(params, Mapping) and params.get("device", 0) == 1
    if on_device and not weights_too and not budgets.device_is_host:
        raise ConfigError("placement.optimizer: 'device' needs placement.params = 'device' as well, on a GPU")


def _check_total(shape: ModelShape, request: PlanRequest, budgets: Budgets) -> None:
    groups = shape.groups
    if sum(group.layout.shard_numel for group in groups) // _tile_sizes(shape, request)[0] < MANY_TILES:
        return
    sizes = (GroupShape.weight_bytes, GroupShape.optimizer_bytes, GroupShape.gradient_bytes)
    total = sum(size(group, group.layout.shard_numel) for size in sizes for group in groups)
    device = budgets.device_free if budgets.device is None else budgets.device
    host = budgets.host_free if budgets.host is None else budgets.host
    nvme = budgets.nvme_free if budgets.nvme else 0
    missing = total - device - host - nvme
    if missing > 0:
        raise BudgetError(
            f"the model's training state, {total:,} bytes per rank, does not fit in tiers.device ({device:,} bytes), "
            f"tiers.host ({host:,}) and tiers.nvme ({nvme:,}) together: {missing:,} bytes short; use a smaller model, "
            "more ranks or larger tiers",
            missing,
        )


def _tile_sizes(shape: ModelShape, request: PlanRequest) -> list[int]:
    """Tile sizes to try, in elements, the preferred first. Several tiles per large shard, so that overlap exists on
    small models too.
    """
    if request.tile is not None:
        return [-(-request.tile // 2048) * 2048]
    largest = max((group.layout.shard_numel for group in shape.groups), default=1)
    first = min(DEFAULT_TILE, max(SMALLEST_TILE, -(-largest // (4 * 2048)) * 2048))
    sizes = [first]
    while sizes[-1] > SMALLEST_TILE:
        sizes.append(max(SMALLEST_TILE, sizes[-1] // 2 // 2048 * 2048))
    return sizes


def _prefetch_depths(request: PlanRequest) -> list[int]:
    return [request.prefetch] if request.prefetch is not None else list(range(DEFAULT_PREFETCH, -1, -1))


def _plan(shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int, prefetch: int) -> MemoryPlan:
    buckets = bucket_bytes(shape)
    arena = arena_bytes(shape, prefetch, request.keep_gathered)
    staging_tile = staging_tile_bytes(shape, tile)
    # On a CPU the gathered units come out of the same memory as the host tier.
    shared = arena + buckets if budgets.device_is_host and budgets.host is None else 0
    device_room = _room(budgets.device, budgets.device_free, arena + buckets)
    room = {
        Tier.DEVICE: 0 if budgets.device_is_host and budgets.device is None else device_room,
        Tier.HOST: _room(budgets.host, budgets.host_free, _reserved_staging(budgets, staging_tile) + shared),
    }
    homes = place(shape, request, budgets, tile, room)
    in_place = tuple(is_in_place(group, tiles, budgets) for group, tiles in zip(shape.groups, homes, strict=True))
    totals = totals_by_tier(shape, homes, tile)
    arena = 0 if all(in_place) else arena_bytes(shape, prefetch, request.keep_gathered, in_place)
    staged = totals[Tier.NVME] > 0 or not budgets.device_is_host
    if not request.reduced and budgets.device_is_host and not any(map(needs_buckets, shape.groups, homes)):
        buckets = 0
    left = (budgets.device_free if budgets.device is None else budgets.device) - totals[Tier.DEVICE] - arena
    limit = max(buckets, min(left, all_gradient_bytes(shape))) if buckets else 0
    most = staging_bytes(budgets, totals[Tier.HOST], staging_tile, tile_count(homes)) if staged else 0
    return MemoryPlan(
        tile,
        prefetch,
        homes,
        totals[Tier.DEVICE],
        totals[Tier.HOST],
        totals[Tier.NVME],
        arena,
        buckets,
        most,
        staging_tile if staged else 0,
        limit,
        in_place,
    )


def _room(budget: int | None, free: int, reserved: int) -> int:
    return max(0, (free if budget is None else budget) - reserved)


def _reserved_staging(budgets: Budgets, staging_tile: int) -> int:
    """What "auto" leaves for tiles in flight: the usual number, but no more than a quarter of the budget for it."""
    budget = budgets.host_free if budgets.host is None else budgets.host
    return max(FEWEST_STAGING_TILES * staging_tile, min(STAGING_TILES * staging_tile, budget // 4))


def _check_fits(shape: ModelShape, plan: MemoryPlan, budgets: Budgets) -> None:
    sizes = gathered_bytes(shape, plan.in_place)
    largest = max(range(len(sizes)), key=lambda unit: sizes[unit]) if sizes else 0
    name = shape.unit_names[largest] if sizes else ""
    device_parts = (
        f"{plan.device_state:,} bytes of state, {plan.arena:,} for gathered units (the largest, {name}, takes "
        f"{sizes[largest]:,}) and {plan.buckets:,} for gradients on their way"
    )
    host_parts = (
        f"{plan.host_state:,} bytes of state and {plan.staging:,} of staging ({FEWEST_STAGING_TILES} or more tiles of "
        f"{plan.staging_tile:,})"
    )
    rows = (
        ("device", plan.device, budgets.device, budgets.device_free, device_parts),
        ("host", plan.host, budgets.host, budgets.host_free, host_parts),
    )
    for tier, needed, budget, free, parts in rows:
        limit = free if budget is None else budget
        if needed > limit:
            source = (
                f"tiers.{tier} = {budget:,} bytes per rank"
                if budget is not None
                else f"the {free:,} bytes of {tier} memory that are free"
            )
            raise BudgetError(
                f"{source}: {needed - limit:,} bytes short of the {needed:,} needed: {parts}; raise tiers.{tier} or "
                "place more on another tier",
                needed - limit,
            )
    needed = plan.host + (plan.device if budgets.device_is_host else 0)
    if needed > budgets.available:
        tiers = (
            "tiers.host and tiers.device (host memory too, without a GPU)" if budgets.device_is_host else "tiers.host"
        )
        raise BudgetError(
            f"{tiers} allow {needed:,} bytes to be used, {needed - budgets.available:,} more than the "
            f"{budgets.available:,} bytes of memory that this machine has free for a rank; lower them or place more on "
            "another tier",
            needed - budgets.available,
        )
