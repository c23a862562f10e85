"""What a runtime has moved, and what it holds now and held at most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tierzero.runtime.state import UnitState
from tierzero.runtime.stats import Counters
from tierzero.tiers import Tier

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime

_DEVICE = ("device", "arena", "buckets")
"""The pools of device memory."""


def counters(runtime: Runtime) -> Counters:
    """Totals since the model was sharded."""
    comm = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    if runtime.collectives is not None:
        moved = runtime.collectives.bytes
        comm = {
            "all_gather": moved.all_gather,
            "reduce_scatter": moved.reduce_scatter,
            "all_reduce": moved.all_reduce,
        }
    engine, tried = runtime.engine, runtime.updater.speculation
    return Counters(
        engine.read_bytes,
        engine.write_bytes,
        comm,
        dict(runtime.stalls.seconds),
        redone_bytes=tried.lost_bytes,
        tried_bytes=tried.tried_bytes,
        kept_bytes=tried.kept_bytes,
        read_ahead_bytes=runtime.tile_io.read_ahead_bytes,
        cold_start_s=runtime.stalls.cold_start_s,
    )


def trained_bytes(units: Iterable[UnitState], only: Tier | None = None) -> int:
    """Bytes of the weights and optimizer state that updates of these units change, as filed; of one tier, or all."""
    tiles = [tile for unit in units for group in unit.groups for tile in group.tiles if tile.optimizer is not None]
    return sum(tile.state_bytes(only) for tile in tiles)


def first_units(runtime: Runtime) -> list[UnitState]:
    """Those that a step's forward waits for before it can run, as the last one used them: up to the first unit without
    others inside.
    """
    found = []
    for index in runtime.pager.trace.order():
        found.append(runtime.units[index])
        if index not in runtime.pager.outer:
            break
    return found


def tier_bytes(runtime: Runtime) -> dict[str, int]:
    """Bytes in use now: state, gathered units, gradients on their way and staging."""
    pools, copies = runtime.pools, runtime.offloading.bytes_of_copies()
    return {
        "device": sum(pools[name].used for name in _DEVICE),
        "host": pools["host"].used + copies.get("host", 0),
        "nvme": runtime.store.bytes_by_tier()[Tier.NVME] + copies.get("nvme", 0),
    }


def peak_tier_bytes(runtime: Runtime) -> dict[str, int]:
    """Most bytes in use at once."""
    pools = runtime.pools
    return {
        "device": sum(pools[name].peak for name in _DEVICE),
        "host": pools["host"].peak,
        "nvme": runtime.store.bytes_by_tier()[Tier.NVME],
    }
