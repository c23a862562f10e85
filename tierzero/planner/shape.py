"""What the planner works on and what it decides, as plain data. All sizes are bytes unless a name says elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierzero.optim.formats import StateFormat
from tierzero.sharding.layout import FlatLayout, bucket_elements
from tierzero.sharding.stages import KINDS, STAGES, Stage
from tierzero.tiers import Tier

Split = Mapping[str, float] | str
"""A placement as configured: "auto", or the fraction of the bytes in each tier."""


@dataclass(frozen=True)
class GroupShape:
    """One flat group as the planner sees it; ``fmt`` is None for frozen groups."""

    unit: int
    layout: FlatLayout
    fmt: StateFormat | None
    grad_itemsize: int
    whole: frozenset[str] = frozenset()
    """Kinds of state that the rank keeps whole; see `tierzero.sharding.stages`."""

    def elements(self, kind: str) -> int:
        """Elements of this kind that the rank keeps, padding included."""
        return self.layout.numel if kind in self.whole else self.layout.shard_numel

    def bucket_elements(self) -> int:
        return bucket_elements(self.layout, "gradients" in self.whole)

    def weight_bytes(self, elements: int) -> int:
        return elements * self.layout.dtype.itemsize

    def optimizer_bytes(self, elements: int) -> int:
        return self.fmt.optimizer_bytes(elements) if self.fmt else 0

    def gradient_bytes(self, elements: int) -> int:
        return elements * self.grad_itemsize if self.fmt else 0


BYTES_OF = {
    "params": GroupShape.weight_bytes,
    "optimizer": GroupShape.optimizer_bytes,
    "gradients": GroupShape.gradient_bytes,
}
"""Bytes of a number of elements of a group, for each kind of state as placements name it."""


@dataclass(frozen=True)
class ModelShape:
    """The groups of all units, and for each unit the units that are gathered while it runs (its ancestors)."""

    groups: tuple[GroupShape, ...]
    unit_names: tuple[str, ...]
    ancestors: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Budgets:
    """What the user allows per rank. None: as much as the plan needs, up to ``free`` bytes of that memory.

    ``available`` is what this rank can have of the machine's memory at all, whatever the budgets say;
    ``nvme_capacity`` what the nvme paths could take if nothing else lay on them, ``nvme_free`` what is free there now,
    for all ranks of the node together.
    """

    device: int | None
    host: int | None
    device_free: int
    host_free: int
    device_is_host: bool
    nvme: bool
    sharers: int = 1
    """Ranks on this node: the ``host`` that was configured is theirs together."""
    available: int = 1 << 62
    nvme_capacity: int = 1 << 62
    nvme_limited: bool = False
    """``nvme_capacity`` is less than the drives would hold, because the user says so."""
    nvme_free: int = 1 << 62
    nvme_in_memory: bool = False
    """A path lies in a file system that keeps its files in host memory."""

    @property
    def device_limit(self) -> int:
        return self.device_free if self.device is None else self.device

    @property
    def host_limit(self) -> int:
        return self.host_free if self.host is None else self.host

    def compute_tier(self, split: Split) -> Tier:
        """The tier of what the device computes from, for state placed as ``split``."""
        return Tier.HOST if self.device_is_host and split != {"device": 1.0} else Tier.DEVICE


@dataclass(frozen=True)
class PlanRequest:
    """The configured choices that the plan has to carry out."""

    params: Split
    optimizer: Split
    gradients: Split
    tile: int | None = None
    prefetch: int | None = None
    frozen: Split | None = None
    """Of the weights of frozen groups; None: as ``params``."""
    kept: frozenset[int] = frozenset()
    """Units that stay gathered from the forward to the update."""
    reduced: bool = False
    """Gradients are reduced over several ranks, and so pass through buckets."""
    stage: Stage = STAGES[3]
    segment: int = 0
    """Units that are run again together in the backward, if memory allows while all of them are gathered."""
    overlap: str = "forward"
    order: tuple[str, ...] = KINDS
    """Kinds of state that are placed automatically, the first of which gets the fastest memory. Weights move most
    often per byte, and gradients come before the update that they wait for.
    """

    def splits(self, kind: str, shape: ModelShape) -> list[tuple[Split, tuple[int, ...]]]:
        """How this kind of state is placed: each split, with the numbers of the groups that it is about, in the order
        in which they get memory. What is trained comes first where memory is short: it is written as well as read.
        """
        split: Split = getattr(self, kind)
        everything = tuple(range(len(shape.groups)))
        trained = tuple(index for index in everything if shape.groups[index].fmt is not None)
        frozen = tuple(index for index in everything if shape.groups[index].fmt is None)
        if kind == "params" and self.frozen is not None:
            return [part for part in ((split, trained), (self.frozen, frozen)) if part[1]]
        return [(split, trained + frozen if split == "auto" else everything)]


@dataclass(frozen=True)
class TileHomes:
    """Home tiers of one tile; optimizer and gradient are None for frozen weights."""

    weight: Tier
    optimizer: Tier | None
    gradient: Tier | None


@dataclass(frozen=True)
class MemoryPlan:
    """The placement and the size of every pool.

    ``homes[g][t]`` belongs to tile ``t`` of group ``g``. Device memory is the sum of ``device_state``, ``arena``
    (gathered units) and ``buckets`` (gradients on their way); host memory of ``host_state`` and ``staging`` (tiles in
    flight, ``staging_tile`` each).
    """

    tile: int
    prefetch: int
    homes: tuple[tuple[TileHomes, ...], ...]
    device_state: int
    host_state: int
    nvme_state: int
    arena: int
    buckets: int
    staging: int
    staging_tile: int
    trials: int = 0
    """Of ``staging``, what the new state of tiles that live in memory may take while it is not known whether it
    counts.
    """
    bucket_limit: int = 0
    """What gradients on their way may take when units' gradients arrive in an unusual order: all that the device
    budget leaves.
    """
    in_place: tuple[bool, ...] = field(default=())
    """For each group: its shard is the whole flat buffer and lies in memory that the device computes from, so a
    gather is no copy.
    """

    @property
    def device(self) -> int:
        return self.device_state + self.arena + self.buckets

    @property
    def host(self) -> int:
        return self.host_state + self.staging
