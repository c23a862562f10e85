"""What a runtime is assembled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tierzero.planner.overlap import Overlap
from tierzero.planner.shape import MemoryPlan
from tierzero.runtime.device import Device
from tierzero.runtime.sealing import LastingFiles
from tierzero.sharding.collectives import Collectives, World
from tierzero.tiers import IoEngine, MemoryPool, TieredStore


class Unfinished(Protocol):
    """Work that goes on beside the training."""

    def end(self) -> None:
        """Finishes it or gives it up, without waiting for other ranks; raises nothing."""


@dataclass(frozen=True)
class Machinery:
    """What a runtime is assembled from; made by `tierzero.runtime.build`."""

    world: World
    device: Device
    plan: MemoryPlan
    engine: IoEngine
    store: TieredStore
    pools: Mapping[str, MemoryPool]
    """Memory pools by role: device, host, arena, buckets."""
    collectives: Collectives | None
    overlap: Overlap
    input_dtype: torch.dtype | None
    kept: frozenset[int] = frozenset()
    """Units that stay gathered from the forward to the update."""
    lasting: LastingFiles | None = None
    host_limit: int | None = None
    """The budget of this rank's host memory, in bytes, if there is one."""
    ema: float = 0.0
    """Decay of the averages of the weights."""
