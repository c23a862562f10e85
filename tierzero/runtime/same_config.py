"""What must be configured alike on all ranks, because they compute together."""

from __future__ import annotations

import torch.distributed as dist

from tierzero.config import Config
from tierzero.errors import RankMismatchError
from tierzero.sharding.collectives import World

_KEYS = {
    "train": ("precision", "grad_dtype", "compile"),
    "sharding": ("stage", "units", "reshard_after_forward", "min_unit"),
    "optimizer": ("overlap", "state_dtype", "ema"),
    "activations": ("recompute",),
    "checkpoint": ("durable",),
}
"""Budgets and placements may differ, as nodes do."""


def check_same_config(config: Config, world: World) -> None:
    """Raises RankMismatchError, on every rank, that names a key which ranks have set differently."""
    if world.size == 1:
        return
    mine = {
        f"{section}.{key}": getattr(getattr(config, section), key) for section, keys in _KEYS.items() for key in keys
    }
    found: list[dict[str, object]] = [{}] * world.size
    dist.all_gather_object(found, mine, group=world.group)
    for rank, theirs in enumerate(found):
        for key, value in found[0].items():
            if theirs[key] != value:
                raise RankMismatchError(
                    f"shard: {key} is {value!r} on rank 0 and {theirs[key]!r} on rank {rank}; all ranks need the same"
                )
