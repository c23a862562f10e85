"""The arithmetic of the ZeRO stages for one model: bytes per rank, tier and kind, and collective volume.

Sources: Rajbhandari et al., "ZeRO", 2020 (stages, memory, volume); Rajbhandari et al., "ZeRO-Infinity", 2021 (offload).
Bytes are those of the plan a run would make, padding included, so that they are what `tierzero.stats` then counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierzero.planner.buffers import STAGING_TILES
from tierzero.planner.floor import floor_plan
from tierzero.planner.memory_plan import DEFAULT_PREFETCH, preferred_tile
from tierzero.planner.shape import BYTES_OF, Budgets, ModelShape, PlanRequest
from tierzero.sharding.stages import KINDS, STAGES, Stage

OFFLOADS = ("none", "host", "nvme", "nvme+gradients")
"""Where what a stage shards is placed: nothing off the device; all on the host; gradients on the host and the rest on
nvme; all on nvme."""
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limits:
    """Bytes per rank that there are of each tier; None: not stated."""

    device: int | None = None
    host: int | None = None
    nvme: int | None = None


@dataclass(frozen=True)
class Estimate:
    """One stage with one kind of offload, per rank.

    ``state`` is persistent: bytes by tier and kind. ``gathered`` (weights of the units in use), ``buckets`` (gradients
    on their way) and ``activations`` are device memory, ``staging`` (tiles in flight) is host memory; each is what it
    may come to, and None where it depends on more than is known. ``volume`` is bytes per step by collective.
    """

    stage: int
    offload: str
    state: Mapping[str, Mapping[str, int]]
    gathered: int | None
    buckets: int | None
    activations: int | None
    staging: int
    volume: Mapping[str, int]
    fits: bool | None = None
    missing: Mapping[str, int] | None = None

    @property
    def totals(self) -> dict[str, int]:
        """Bytes per tier, as far as known."""
        totals = {tier: sum(kinds.values()) for tier, kinds in self.state.items()}
        totals["device"] += (self.gathered or 0) + (self.buckets or 0) + (self.activations or 0)
        totals["host"] += self.staging
        return totals

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "offload": self.offload,
            "state_bytes": {tier: dict(kinds) for tier, kinds in self.state.items()},
            "gathered_bytes": self.gathered,
            "bucket_bytes": self.buckets,
            "activation_bytes": self.activations,
            "staging_bytes": self.staging,
            "total_bytes": self.totals,
            "comm_bytes": dict(self.volume),
            "fits": self.fits,
            "missing_bytes": dict(self.missing) if self.missing is not None else None,
        }


@dataclass(frozen=True)
class Job:
    """What the stages are compared for. ``shape_of`` gives the model's groups under a stage; ``units_known``: they are
    the model's real units, so that buffers follow from them.
    """

    shape_of: Callable[[Stage], ModelShape]
    ranks: int
    micro_steps: int = 1
    activations: int | None = None
    units_known: bool = True
    kept: frozenset[int] = frozenset()
    """Units that stay gathered from the forward to the update."""
    segment: int = 0
    tile: int | None = None
    prefetch: int | None = None
    device_is_host: bool = False


def estimates(job: Job, limits: Limits) -> list[Estimate]:
    """Every stage with every offload that makes a difference to it."""
    rows = []
    for stage in STAGES.values():
        seen: list[dict[str, str]] = []
        for offload in OFFLOADS:
            placed = _placements(stage, offload)
            if placed not in seen and not (job.device_is_host and offload == "host"):
                seen.append(placed)
                rows.append(_estimate(job, stage, offload, limits))
    return rows


def cheapest(rows: Sequence[Estimate]) -> Estimate | None:
    """Of those that fit: the least offload, then the least volume, then the lowest stage."""
    fitting = [row for row in rows if row.fits]
    return min(
        fitting, key=lambda row: (OFFLOADS.index(row.offload), sum(row.volume.values()), row.stage), default=None
    )


def _placements(stage: Stage, offload: str) -> dict[str, str]:
    movable = stage.sharded or frozenset(KINDS)
    places = {"none": "device", "host": "host", "nvme": "nvme", "nvme+gradients": "nvme"}
    placed = {kind: places[offload] if kind in movable else "device" for kind in KINDS}
    if offload == "nvme" and "gradients" in movable:
        placed["gradients"] = "host"
    return placed


def _estimate(job: Job, stage: Stage, offload: str, limits: Limits) -> Estimate:
    shape = job.shape_of(stage)
    placed = _placements(stage, offload)
    request = PlanRequest(
        params={placed["params"]: 1.0},
        optimizer={placed["optimizer"]: 1.0},
        gradients={placed["gradients"]: 1.0},
        tile=job.tile,
        prefetch=job.prefetch,
        kept=job.kept,
        reduced=job.ranks > 1,
        stage=stage,
        segment=job.segment,
    )
    budgets = Budgets(None, None, _UNLIMITED, _UNLIMITED, job.device_is_host, nvme=True)
    prefetch = job.prefetch if job.prefetch is not None else DEFAULT_PREFETCH
    plan = floor_plan(shape, request, budgets, preferred_tile(shape, request), prefetch)
    state: dict[str, dict[str, int]] = {"device": {}, "host": {}, "nvme": {}}
    for kind, tier in placed.items():
        state[tier][kind] = sum(BYTES_OF[kind](group, group.elements(kind)) for group in shape.groups)
    row = Estimate(
        stage.number,
        offload,
        state,
        plan.arena if job.units_known else None,
        plan.buckets if job.units_known else None,
        job.activations,
        STAGING_TILES * plan.staging_tile,
        _volume(job, shape, stage),
    )
    stated = {tier: limit for tier in state if (limit := getattr(limits, tier)) is not None}
    if not stated:
        return row
    missing = {tier: row.totals[tier] - limit for tier, limit in stated.items() if row.totals[tier] > limit}
    return Estimate(**{**vars(row), "fits": not missing, "missing": missing})


def _volume(job: Job, shape: ModelShape, stage: Stage) -> dict[str, int]:
    """As `tierzero.sharding.collectives.CommBytes` counts: whole tensors, an all-reduce twice. Not subtracted: the
    units at the end of a forward that stage 3 still has when the backward begins.
    """
    volume = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    if job.ranks == 1:
        return volume
    weights = sum(group.weight_bytes(group.layout.numel) for group in shape.groups)
    trained = sum(group.weight_bytes(group.layout.numel) for group in shape.groups if group.fmt is not None)
    gradients = sum(group.gradient_bytes(group.layout.numel) for group in shape.groups)
    if not stage.sharded:
        volume["all_reduce"] = 2 * gradients * job.micro_steps
        return volume
    volume["reduce_scatter"] = gradients * job.micro_steps
    if "params" not in stage.sharded:
        volume["all_gather"] = trained
    else:
        kept = sum(g.weight_bytes(g.layout.numel) for g in shape.groups if g.unit in job.kept)
        volume["all_gather"] = kept + 2 * (weights - kept) * job.micro_steps
    return volume
