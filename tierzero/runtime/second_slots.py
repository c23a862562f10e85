"""Opening the tiers of all ranks, and, for `optimizer.overlap = "auto"`, the second slots of tiles: every rank takes
them or none does, and a run that could do without never fails for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tierzero.config import Config
from tierzero.errors import BudgetError, TierError
from tierzero.planner.overlap import Overlap, fit, has_tried_tiles, resolved
from tierzero.planner.shape import MemoryPlan
from tierzero.sharding.collectives import World
from tierzero.tiers import TieredStore

T = TypeVar("T")


def open_tiers(
    open_store: Callable[[], None], store: TieredStore, config: Config, plan: MemoryPlan, world: World
) -> Overlap:
    """``open_store`` opens ``store``, with the first slots only where the overlap is not said. Returns the overlap that
    this run has, the same on all ranks; every rank must call it.

    Raises what ``open_store`` raises, and TierError where it failed on another rank.
    """
    _on_every_rank(open_store, world)
    overlap = config.optimizer.overlap
    if overlap != "auto":
        return overlap
    # All ranks have opened theirs: what is free now is free beside all first slots, and what killed runs left is gone.
    wishes = _everybody(_wish(store, config, plan, world), world)
    if "forward" in wishes or "both" not in wishes:
        return "forward"
    failed = False
    try:
        store.add_second_slots()
    except BudgetError:  # somebody else has filled the drive meanwhile
        failed = True
    if any(_everybody(failed, world)):
        store.drop_second_slots()
        return "forward"
    return "both"


def _wish(store: TieredStore, config: Config, plan: MemoryPlan, world: World) -> Overlap | None:
    """What this rank would have; None where it has nothing to try, and so needs no room either."""
    if not has_tried_tiles(plan):
        return None

    def has_room() -> bool:
        try:
            drives = store.room_for_second_slots(world.local_size)
        except OSError:
            return False
        return fit(plan, store.second_slot_bytes, config.tiers.nvme_limit, drives)

    return resolved("auto", plan, config.checkpoint.durable, has_room)


def _on_every_rank(work: Callable[[], None], world: World) -> None:
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    texts = _everybody(str(failure) if failure is not None else None, world)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise TierError(f"rank {rank} could not open its tiers: {text}")


def _everybody(mine: T, world: World) -> list[T]:
    """What each rank has to say."""
    found = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(found, mine, group=world.group)
    return found
