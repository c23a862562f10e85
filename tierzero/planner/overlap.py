"""What `optimizer.overlap = "auto"` comes to: both halves of the step where there are tiles that the backward can try
and plenty of room for their second slots, else the next forward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tierzero.errors import ConfigError
from tierzero.planner.placement import totals_by_kind
from tierzero.planner.shape import BYTES_OF, Budgets, MemoryPlan, ModelShape, TileHomes
from tierzero.tiers import Tier, page_round
from tierzero.tiers.room import DriveRoom

Overlap = Literal["both", "forward", "backward", "none"]

_PART = 0.5
"""Of what is free with all first slots on the drives, what second slots that nobody asked for may take: the rest is for
checkpoints and for whoever else writes there."""


def resolved(
    overlap: Literal["auto"] | Overlap, plan: MemoryPlan, durable: bool, has_room: Callable[[], bool]
) -> Overlap:
    """``has_room``: whether second slots fit, see `fit`; asked for "auto" only where there is something to try, and
    where durable tiers do not have them anyway.
    """
    if overlap != "auto":
        return overlap
    return "both" if has_tried_tiles(plan) and (durable or has_room()) else "forward"


def may_be_tried(home: TileHomes, plan: MemoryPlan) -> bool:
    """Whether a tile can be updated beside its current state before its step: into second slots of what lies on nvme,
    into memory that is planned for it (see `tierzero.planner.trial_memory`) of all else.
    """
    in_memory = Tier.HOST in (home.weight, home.optimizer) or home.weight is Tier.DEVICE
    return home.optimizer in (Tier.HOST, Tier.NVME) and (plan.trials > 0 or not in_memory)


def has_tried_tiles(plan: MemoryPlan) -> bool:
    return any(may_be_tried(home, plan) for homes in plan.homes for home in homes)


def check_both(plan: MemoryPlan) -> None:
    """Raises ConfigError where there is nothing to try."""
    if has_tried_tiles(plan):
        return
    if any(home.optimizer is Tier.HOST for homes in plan.homes for home in homes):
        raise ConfigError(
            'optimizer.overlap = "both": needs memory for updated state beside the current one, of which tiers.host '
            'leaves none; raise it, or use overlap = "forward"'
        )
    raise ConfigError(
        'optimizer.overlap = "both": works on optimizer state on the host or on nvme, and here none lies there; use '
        'overlap = "forward", or set placement.optimizer'
    )


def second_slot_bytes(shape: ModelShape, plan: MemoryPlan, durable: bool) -> int:
    """Of tier files: what second slots take beside the first, with "both" or for durable tiers, which have them of all
    state.
    """
    if durable:
        totals = totals_by_kind(shape, plan.homes, plan.tile)
        return totals["params"][Tier.NVME] + totals["optimizer"][Tier.NVME]
    return sum(
        page_round(BYTES_OF[kind](group, span.numel))
        for group, homes in zip(shape.groups, plan.homes, strict=True)
        for span, home in zip(group.layout.tiles(plan.tile), homes, strict=True)
        for kind, tier in (("params", home.weight), ("optimizer", home.optimizer))
        if tier is Tier.NVME and may_be_tried(home, plan)
    )


def fit(plan: MemoryPlan, second: int, limit: int | None, drives: Sequence[DriveRoom]) -> bool:
    """Whether ``second`` bytes of second slots fit within ``limit``, the rank's, and on the drives, which have the
    first slots and ``wanted`` by all ranks, with a rest that is as large.

    The limit also has to hold a copy of what lies in memory: `tierzero.offload` needs it.
    """
    if not second:
        return True
    if limit is not None and plan.nvme_state + second + plan.host_state + plan.device_state > limit:
        return False
    return all(not drive.in_memory and drive.wanted <= _PART * drive.free for drive in drives)


def planned_overlap(
    overlap: Literal["auto"] | Overlap, shape: ModelShape, plan: MemoryPlan, budgets: Budgets, durable: bool
) -> Overlap:
    """What a run would make of it that finds as much room on its drives as ``budgets`` has."""

    def has_room() -> bool:
        second = second_slot_bytes(shape, plan, durable)
        limit = budgets.nvme_capacity if budgets.nvme_limited else None
        left = budgets.nvme_free - plan.nvme_state * budgets.sharers
        return fit(plan, second, limit, [DriveRoom(left, second * budgets.sharers, budgets.nvme_in_memory)])

    return resolved(overlap, plan, durable, has_room)
