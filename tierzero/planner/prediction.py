"""The predicted time of a step, what bounds it, and the most bytes of every tier: from a plan, the model's work and a
machine profile. Allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierzero.errors import ConfigError
from tierzero.planner.fluid import Shared
from tierzero.planner.machine import CollectiveRate, Dtype, MachineProfile, rate_at
from tierzero.planner.shape import MemoryPlan, ModelShape
from tierzero.planner.simulated_step import SimulatedStep
from tierzero.planner.step_case import Access, Phases, Speeds, StepCase
from tierzero.planner.step_units import unit_works
from tierzero.planner.work import ModelWork, OperationCounts
from tierzero.sharding.stages import Stage

TILE_S = 3e-4
"""Seconds of the drive that a tile costs beside its bytes."""
TILE_READ_S, TILE_WRITE_S = 8e-4, 4e-4
"""Seconds of the processor that a tile's way costs beside its bytes: the I/O thread is Python, as the model's is."""
UNIT_S = 5e-4
"""Seconds that hooks and waits cost the model's thread for each use of a unit."""
_TRIED = (0.25, 0.5, 0.75, 1.0)
"""Parts of the tiles."""
_PAYS = 0.002
"""More is tried where the step is shorter by this part at least."""
BOUND = 0.85
"""A resource that is busy for so much of the step bounds it."""


@dataclass(frozen=True)
class Ranks:
    """``size`` in all, ``local`` of them on each node."""

    size: int = 1
    local: int = 1


@dataclass(frozen=True)
class Workload:
    """What is trained: ``shape`` as the ranks share it, the ``work`` of one micro-batch of a rank; ``recomputed`` units
    run again in the backward, ``segment`` at a time.
    """

    shape: ModelShape
    work: ModelWork
    dtype: Dtype
    stage: Stage
    ranks: Ranks
    micro_steps: int
    overlap: str
    recomputed: Sequence[int] = ()
    segment: int = 0
    kept: frozenset[int] = frozenset()
    requests: int = 8
    """In flight on the drives."""
    block: int = 8 << 20
    """Bytes of a request at most."""


@dataclass(frozen=True)
class Prediction:
    """One rank's step. ``bound_by``: compute, nvme, link, network, or memory where none of them is busy enough."""

    phases: Phases
    bound_by: str

    @property
    def step_s(self) -> float:
        return self.phases.step


def predict(load: Workload, plan: MemoryPlan, machine: MachineProfile) -> Prediction:
    """Raises RuntimeError where the plan's memory would not do for the step."""
    phases = _fastest(step_case(load, plan, machine))
    shares = {BOUND_NAMES[name]: busy / phases.step for name, busy in phases.busy.items()}
    bound = max(shares, key=lambda name: shares[name])
    return Prediction(phases, bound if shares[bound] >= BOUND else "memory")


def _fastest(case: StepCase) -> Phases:
    """With as much tried in the backward as pays."""
    if case.overlap != "both":
        return SimulatedStep(case).run()
    best = SimulatedStep(case).run()
    for part in _TRIED:
        more = SimulatedStep(replace(case, tried=part)).run()
        if more.step < best.step * (1 - _PAYS):
            best = more
    return best


BOUND_NAMES = {"processor": "compute", "drive": "nvme", "link": "link", "network": "network"}


def step_case(load: Workload, plan: MemoryPlan, machine: MachineProfile) -> StepCase:
    """What is simulated for ``plan``."""
    if load.dtype not in machine.compute:
        raise ConfigError(
            f"plan: the machine profile {machine.name!r} has no rates for {load.dtype}; measure again with "
            "tierzero bench all --save"
        )
    if plan.nvme_state and machine.all_drives() is None:
        raise ConfigError(
            f"plan: state is placed on nvme, but the machine profile {machine.name!r} has no drive; measure it with "
            "tierzero bench all --nvme PATH --save"
        )
    units = unit_works(load.shape, plan, load.ranks.size, machine.device is None)
    gather, reduce = _collective_seconds(load, machine, [u.gathered for u in units], [u.gradient for u in units])
    forward, backward = _accesses(load, machine)
    around = frozenset(above for ancestors in load.shape.ancestors for above in ancestors)
    return StepCase(
        units=units,
        forward=forward,
        backward=backward,
        speeds=_speeds(load, plan, machine),
        overlap=load.overlap,
        prefetch=plan.prefetch,
        arena=plan.arena,
        staging=plan.staging,
        staging_tile=plan.staging_tile,
        buckets=max(plan.bucket_limit, plan.buckets),
        gather_s=gather,
        reduce_s=reduce,
        held=load.kept | around,
        micro_steps=load.micro_steps,
    )


def _speeds(load: Workload, plan: MemoryPlan, machine: MachineProfile) -> Speeds:
    share = 1 / load.ranks.local
    drive = machine.all_drives()
    alone = machine.device is None
    return Speeds(
        # Where the cores compute and update, each gets half of them while both have work.
        processor=Shared.halves(1.0, 1.0, 1.0) if alone else Shared(1.0, 1.0, 1.0, 1.0),
        drive=Shared.halves(drive.read * share, drive.write * share, drive.mixed * share)
        if drive is not None
        else Shared.halves(1.0, 1.0, 1.0),
        link=Shared.halves(machine.device.to_device, machine.device.to_host, machine.device.both)
        if machine.device is not None
        else None,
        adam=machine.adam_rate(machine.host.cores) * share,
        gradient_copy=_gradient_bytes(load, machine) * (share if alone else 1),
        host_copy=machine.host.copy_bytes * share,
        tiles_at_once=max(1, load.requests // max(1, -(-plan.staging_tile // load.block))),
        tile_s=TILE_S,
        tile_read_s=TILE_READ_S if alone else 0.0,
        tile_write_s=TILE_WRITE_S if alone else 0.0,
        unit_s=UNIT_S,
    )


def _gradient_bytes(load: Workload, machine: MachineProfile) -> float:
    """Read and written per second where a gradient is taken over from autograd."""
    if machine.gradients is None or machine.device is not None:
        return machine.compute[load.dtype].pointwise_bytes
    return machine.gradients * 4.0  # measured with bf16: two bytes read, two written


def _collective_seconds(
    load: Workload, machine: MachineProfile, gathered: Sequence[int], gradients: Sequence[int]
) -> tuple[list[float], list[float]]:
    ranks, network = load.ranks, machine.network
    if ranks.size == 1:
        return [0.0] * len(gathered), [0.0] * len(gradients)
    if network is None:
        raise ConfigError(
            f"plan: {ranks.size} ranks need the rates of collectives, which the machine profile {machine.name!r} does "
            "not have; measure them with tierzero bench all --save"
        )
    nodes = ranks.size // ranks.local
    between = network.between_nodes

    def seconds(nbytes: int, rates: Sequence[CollectiveRate], times: float) -> float:
        if not nbytes:
            return 0.0
        local = nbytes / rate_at(rates, nbytes) if ranks.local > 1 else 0.0
        far = times * nbytes * (nodes - 1) / nodes / between if nodes > 1 and between else 0.0
        return max(local, far)

    reduces = network.reduce_scatter if load.stage.sharded else network.all_reduce
    return (
        [seconds(nbytes, network.all_gather, 1) for nbytes in gathered],
        [seconds(nbytes, reduces, 1 if load.stage.sharded else 2) for nbytes in gradients],
    )


def _accesses(load: Workload, machine: MachineProfile) -> tuple[list[Access], list[Access]]:
    rates = machine.compute[load.dtype]
    slower = load.ranks.local if machine.device is None else 1  # ranks share the cores

    def seconds(counts: OperationCounts) -> float:
        return counts.seconds(rates) * slower

    forward = [Access(visit.unit, seconds(visit.counts), visit.uses_weights) for visit in load.work.forward]
    again = {visit.unit: seconds(visit.counts) for visit in load.work.forward if visit.unit in load.recomputed}
    last = {visit.unit: number for number, visit in enumerate(load.work.backward)}
    backward: list[Access] = []
    run_again: set[int] = set()
    for number, visit in enumerate(load.work.backward):
        if visit.unit in again and visit.unit not in run_again:
            for unit in _segment_of(load, visit.unit):
                run_again.add(unit)
                if unit != visit.unit:
                    backward.append(Access(unit, again[unit]))
            backward.append(Access(visit.unit, again[visit.unit]))
        backward.append(Access(visit.unit, seconds(visit.counts), visit.uses_weights, last[visit.unit] == number))
    return forward, backward


def _segment_of(load: Workload, unit: int) -> list[int]:
    """The recomputed units that are run again with ``unit``, in the order of the forward."""
    order = list(load.recomputed)
    start = order.index(unit) // max(1, load.segment) * max(1, load.segment)
    return order[start : order.index(unit) + 1]


def transient_peak(load: Workload) -> int:
    """Bytes of activations and of gradients on the way out of autograd that are alive at most."""
    work, recomputed = load.work, set(load.recomputed)
    if not recomputed:
        return work.peak
    kept = live = most = 0
    saved: dict[int, int] = {}
    for visit in work.forward:
        most = max(most, live + visit.transient)
        if visit.unit in recomputed:
            saved[visit.unit] = visit.kept
        first = visit.unit in recomputed and _segment_of(load, visit.unit)[0] == visit.unit
        live += (visit.entered if first else 0) if visit.unit in recomputed else visit.kept
    kept = live
    for visit in work.backward:
        again = sum(saved.get(unit, 0) for unit in _segment_of(load, visit.unit)) if visit.unit in recomputed else 0
        most = max(most, kept + again + visit.transient)
    return most
