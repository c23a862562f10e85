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
from tierzero.planner.floor import check_capacity, floor_plan
from tierzero.planner.placement import is_in_place, place, totals_by_tier
from tierzero.planner.shape import Budgets, MemoryPlan, ModelShape, PlanRequest
from tierzero.planner.trial_memory import with_trials
from tierzero.sharding.stages import STAGES
from tierzero.tiers import Tier

DEFAULT_TILE = 1024 * 1024
"""Elements. 12 MB of bf16 training state: long enough for the drive, short enough to pipeline. Twice as many were no
faster, and cost twice the staging memory."""
SMALLEST_TILE = 64 * 1024
DEFAULT_PREFETCH = 2
MANY_TILES = 1 << 18
"""From here on placing them one by one only to name the shortage to the byte takes too long."""


def plan_memory(shape: ModelShape, request: PlanRequest, budgets: Budgets) -> MemoryPlan:
    """Places every tile and sizes every pool.

    Raises ConfigError for a placement that cannot be carried out and BudgetError, naming the bytes missing and the
    key, when a budget is too small: for the leanest plan, of the smallest tiles and no prefetch.
    """
    _check_request(request, budgets)
    shortage: BudgetError | None = None
    for tile in _tile_sizes(shape, request):
        for prefetch in _prefetch_depths(request):
            try:
                floor = floor_plan(shape, request, budgets, tile, prefetch)
                _check_fits(shape, floor, budgets)
                check_capacity(shape, request, budgets, floor)
            except BudgetError as error:
                shortage = error
                continue
            plan = _plan(shape, request, budgets, tile, prefetch)
            try:
                _check_fits(shape, plan, budgets)
            except BudgetError as error:
                shortage = error
            else:
                return with_trials(plan, shape, request, budgets)
    assert shortage is not None
    if sum(group.layout.shard_numel for group in shape.groups) // tile < MANY_TILES:
        _check_fits(shape, _plan(shape, request, budgets, tile, prefetch), budgets)
    raise shortage


def _check_request(request: PlanRequest, budgets: Budgets) -> None:
    for kind in ("params", "frozen", "optimizer", "gradients"):
        split = getattr(request, kind)
        if isinstance(split, Mapping) and split.get("nvme", 0) > 0 and not budgets.nvme:
            raise ConfigError(f"placement.{kind}: nvme is asked for, but tiers.nvme lists no path; add one")
    _check_whole(request, budgets)
    optimizer, params = request.optimizer, request.params
    on_device = isinstance(optimizer, Mapping) and optimizer.get("device", 0) > 0
    weights_too = isinstance(params, Mapping) and params.get("device", 0) == 1
    if on_device and not weights_too and not budgets.device_is_host:
        raise ConfigError("placement.optimizer: 'device' needs placement.params = 'device' as well, on a GPU")


def _check_whole(request: PlanRequest, budgets: Budgets) -> None:
    """What every rank keeps whole lies where it computes."""
    wanted = [{"device": 1.0}, {"host": 1.0}] if budgets.device_is_host else [{"device": 1.0}]
    for kind in sorted(request.stage.whole):
        split = getattr(request, kind)
        if isinstance(split, Mapping) and {tier: part for tier, part in split.items() if part} not in wanted:
            raise ConfigError(
                f"placement.{kind}: sharding.stage = {request.stage.number} keeps all {kind} of every rank in the "
                f"memory that it computes in, so that they cannot be placed elsewhere; use {_stage_for(kind)}, or "
                f'placement.{kind} = "device"'
            )
    if "params" in request.stage.whole and request.frozen not in (None, request.params):
        raise ConfigError(
            f"placement.frozen: sharding.stage = {request.stage.number} keeps all params of every rank together in "
            'the memory that it computes in; use stage 3, or leave placement.frozen on "params"'
        )


def _stage_for(kind: str) -> str:
    first = min(stage.number for stage in STAGES.values() if kind in stage.sharded)
    return f"stage {first} or more" if first < 3 else f"stage {first}"


def preferred_tile(shape: ModelShape, request: PlanRequest) -> int:
    """Elements of a tile where memory allows. Several tiles per large shard, so that overlap exists on small models
    too.
    """
    if request.tile is not None:
        return -(-request.tile // 2048) * 2048
    largest = max((group.layout.shard_numel for group in shape.groups), default=1)
    return min(DEFAULT_TILE, max(SMALLEST_TILE, -(-largest // (4 * 2048)) * 2048))


def _tile_sizes(shape: ModelShape, request: PlanRequest) -> list[int]:
    """Tile sizes to try, in elements, the preferred first."""
    sizes = [preferred_tile(shape, request)]
    while request.tile is None and sizes[-1] > SMALLEST_TILE:
        sizes.append(max(SMALLEST_TILE, sizes[-1] // 2 // 2048 * 2048))
    return sizes


def _prefetch_depths(request: PlanRequest) -> list[int]:
    return [request.prefetch] if request.prefetch is not None else list(range(DEFAULT_PREFETCH, -1, -1))


def _plan(shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int, prefetch: int) -> MemoryPlan:
    buckets = bucket_bytes(shape)
    whole = tuple("params" in group.whole for group in shape.groups)
    arena = arena_bytes(shape, prefetch, request.kept, whole)
    staging_tile = staging_tile_bytes(shape, tile)
    # On a CPU the gathered units come out of the same memory as the host tier.
    shared = arena + buckets if budgets.device_is_host and budgets.host is None else 0
    device_room = max(0, budgets.device_limit - arena - buckets)
    room = {
        Tier.DEVICE: 0 if budgets.device_is_host and budgets.device is None else device_room,
        Tier.HOST: max(0, budgets.host_limit - _reserved_staging(budgets, staging_tile) - shared),
    }
    homes = place(shape, request, budgets, tile, room)
    in_place = tuple(is_in_place(group, tiles, budgets) for group, tiles in zip(shape.groups, homes, strict=True))
    totals = totals_by_tier(shape, homes, tile)
    arena = 0 if all(in_place) else arena_bytes(shape, prefetch, request.kept, in_place)
    staged = totals[Tier.NVME] > 0 or not budgets.device_is_host
    if not request.reduced and budgets.device_is_host and not any(map(needs_buckets, shape.groups, homes)):
        buckets = 0
    most = staging_bytes(budgets, totals[Tier.HOST], staging_tile, tile_count(homes)) if staged else 0
    left = budgets.device_limit - totals[Tier.DEVICE] - arena - buckets
    if arena and request.segment > 1:
        spare = min(left, budgets.available - budgets.device_limit + left - totals[Tier.HOST] - most)
        wanted = arena_bytes(shape, request.segment + max(prefetch, 1) - 2, request.kept, in_place)
        more = max(0, min(wanted - arena, spare if budgets.device_is_host else left))
        arena, left = arena + more, left - more
    limit = max(buckets, min(left + buckets, all_gradient_bytes(shape))) if buckets else 0
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
        bucket_limit=limit,
        in_place=in_place,
    )


def _reserved_staging(budgets: Budgets, staging_tile: int) -> int:
    """What "auto" leaves for tiles in flight: the usual number, but no more than a quarter of the budget for it."""
    return max(FEWEST_STAGING_TILES * staging_tile, min(STAGING_TILES * staging_tile, budgets.host_limit // 4))


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
        ("device", plan.device, budgets.device, budgets.device_limit, device_parts),
        ("host", plan.host, budgets.host, budgets.host_limit, host_parts),
    )
    for tier, needed, budget, limit, parts in rows:
        if needed > limit:
            if budget is not None:
                source, advice = f"tiers.{tier} = {budget:,} bytes per rank", f"raise tiers.{tier}"
                if tier == "host" and budgets.sharers > 1:
                    ranks = budgets.sharers
                    source = f"tiers.host = {budget * ranks:,} bytes, {budget:,} for each of {ranks} ranks"
                    advice = f"raise it by {ranks} times that"
            else:
                source, advice = f"the {limit:,} bytes of {tier} memory that are free", "use more ranks, free some"
            raise BudgetError(
                f"{source}: {needed - limit:,} bytes short of the {needed:,} needed: {parts}; {advice} or place more "
                "on another tier",
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
