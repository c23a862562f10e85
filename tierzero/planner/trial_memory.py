"""Memory for updates ahead of their step, where the state lives in memory: what the budget leaves, for it is no use but
speed."""

from __future__ import annotations

from dataclasses import replace

from tierzero.planner.buffers import FEWEST_STAGING_TILES
from tierzero.planner.shape import Budgets, MemoryPlan, ModelShape, PlanRequest
from tierzero.tiers import Tier, page_round

_SHARE = 4
"""Of free memory nobody has spoken of, and of a budget that tiles on nvme want too: one in so many bytes."""


def with_trials(plan: MemoryPlan, shape: ModelShape, request: PlanRequest, budgets: Budgets) -> MemoryPlan:
    """A plan that fits, with memory for trials: never so much that it would not fit any more."""
    wanted = _wanted(plan, shape) if _tries(request, budgets) else 0
    room = budgets.host_limit - plan.host_state
    if budgets.device_is_host:
        room = min(room, budgets.available - plan.device - plan.host_state)
    left = room - plan.staging
    if not wanted or left < 0:
        return plan
    if budgets.host is None:
        trials, staging = min(wanted, left // _SHARE), plan.staging
    else:
        fewest = FEWEST_STAGING_TILES * plan.staging_tile
        trials = min(wanted, max(left, min(room // _SHARE, room - fewest)))
        staging = min(plan.staging, room - trials)
    return replace(plan, staging=staging + trials, trials=trials)


def _tries(request: PlanRequest, budgets: Budgets) -> bool:
    """Where the host computes it has no time that an update could be hidden in: only for whoever asks for it."""
    return request.overlap == "both" or (request.overlap == "auto" and not budgets.device_is_host)


def _wanted(plan: MemoryPlan, shape: ModelShape) -> int:
    """Bytes of the state in memory of all tiles that may be tried."""
    total = 0
    for group, tiles in zip(shape.groups, plan.homes, strict=True):
        for span, home in zip(group.layout.tiles(plan.tile), tiles, strict=True):
            if home.optimizer in (Tier.HOST, Tier.NVME):  # else the device updates it in place
                total += page_round(group.weight_bytes(span.numel)) * (home.weight is not Tier.NVME)
                total += page_round(group.optimizer_bytes(span.numel)) * (home.optimizer is not Tier.NVME)
    return total
