"""`tierzero plan`: the fastest plan of a configuration on a machine, found without allocating anything."""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import dataclass
from typing import Any, cast

import torch

import tierzero as tz
from tierzero.tiers.free_memory import total_bytes

from ..activations.segments import segment_length
from ..config import Config
from ..errors import BudgetError, ConfigError
from ..models import bundled_model
from ..planner.counting import count_work
from ..planner.generic import generic_machine
from ..planner.machine import MachineProfile
from ..planner.memory_plan import plan_memory
from ..planner.overlap import Overlap, check_both, planned_overlap, second_slot_bytes
from ..planner.placement import totals_by_kind
from ..planner.prediction import Ranks as PlannedRanks
from ..planner.prediction import Workload, predict, transient_peak
from ..planner.search import Candidate, Choice, Options, fastest
from ..planner.shape import Budgets, MemoryPlan, ModelShape
from ..runtime.budgets import budgets_here
from ..runtime.draft import Draft, draft
from ..sharding.stages import KINDS
from .ranks import Ranks, micro_batches
from .settings import said_with
from .without_memory import model_and_loss

_USABLE = 0.8
"""Of a machine's memory, where its free memory is not known: the rest is the system's."""
_TILES = (None, 1 << 19, 1 << 20, 1 << 21, 1 << 22)


@dataclass(frozen=True)
class Site:
    """Where the run would be: ``ranks`` on ``nodes``. ``here``: on this machine, whose free memory counts."""

    machine: MachineProfile
    ranks: int = 1
    nodes: int = 1
    here: bool = True

    @property
    def local(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True)
class Plan:
    """The best candidate, or what was configured, with what it was chosen for."""

    config: Config
    site: Site
    parameters: int
    shape: ModelShape
    budgets: Budgets
    micro_steps: int
    best: Candidate


class Planner:
    """Plans one configuration; `plan` may be called with other machines and budgets than the site's, too."""

    def __init__(self, config: Config, site: Site) -> None:
        if site.ranks % site.nodes:
            raise ConfigError(f"plan: {site.ranks} ranks cannot be divided among {site.nodes} nodes; give a multiple")
        device = site.machine.device
        if not site.here and device is not None and site.local > device.count:
            raise ConfigError(
                f"plan: {site.local} ranks on a node, but {site.machine.name} has {device.count} devices; give more "
                "--nodes"
            )
        self.config, self.site = config, site
        self.micro_batch, self.micro_steps = micro_batches(config, Ranks(0, site.ranks, 0, site.local))
        with torch.device("meta"), tz.empty_init():
            model = bundled_model(config)
        self._draft: Draft = draft(model, config, None, site.ranks)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.shape = self._draft.shape()
        self._units = {name: index for index, spec in enumerate(self._draft.specs) for name in spec.modules}
        build, run = model_and_loss(config, self.micro_batch)
        self.work = count_work(build, self._units, run)

    def plan(self, options: Options | None = None, site: Site | None = None, budgets: Budgets | None = None) -> Plan:
        """The fastest of ``options`` (None: all that the configuration leaves open). Raises BudgetError when none
        fits.
        """
        site = site or self.site
        budgets = budgets or self.budgets(site)
        options = options or self.options()
        best = fastest(options, lambda choice: self.candidate(choice, site, budgets))
        return Plan(self.config, site, self.parameters, self.shape, budgets, self.micro_steps, best)

    def as_configured(self) -> Choice:
        """What a run does that is given no plan."""
        config = self.config
        return Choice(
            config.activations.recompute,
            config.optimizer.overlap,
            tuple(config.placement.order),
            config.tiers.tile,
            config.tiers.prefetch,
        )

    def options(self) -> Options:
        """What the configuration leaves open. What it says is not changed."""
        given, config = self.config.given(), self.config
        said = {(section, key) for section, keys in given.items() for key in keys}
        overlaps = ["auto", "forward", "both", "none"]  # first what a run takes that is given no plan
        if config.train.grad_clip == 0 and config.train.precision != "fp16" and self.micro_steps == 1:
            overlaps.insert(1, "backward")
        return Options(
            [config.activations.recompute] if ("activations", "recompute") in said else ["none", "unit", "sqrt"],
            [config.optimizer.overlap] if config.optimizer.overlap != "auto" else overlaps,
            self._orders(("placement", "order") in said),
            [config.tiers.tile] if config.tiers.tile is not None else _TILES,
            [config.tiers.prefetch] if config.tiers.prefetch is not None else [None, 1, 2, 3, 4],
        )

    def _orders(self, said: bool) -> list[tuple[str, ...]]:
        """All of them where kinds of state compete for faster memory."""
        own = tuple(self.config.placement.order)
        one_memory = self.site.machine.device is None and not self.config.tiers.nvme
        if said or not _competes(self.config) or one_memory:
            return [own]
        return [own, *(order for order in itertools.permutations(KINDS) if order != own)]

    def budgets(self, site: Site) -> Budgets:
        """Of each rank: what is free here, or what a machine like the site's has."""
        if site.here and site.machine is self.site.machine:
            return budgets_here(self.config, site.local)
        tiers, machine = self.config.tiers, site.machine
        host = int(machine.host.memory_bytes * _USABLE) // site.local
        device = int(machine.device.memory_bytes * _USABLE) if machine.device is not None else host
        return Budgets(
            tiers.device,
            tiers.host // site.local if tiers.host is not None else None,
            device,
            host,
            machine.device is None,
            bool(tiers.nvme or machine.drives),
            site.local,
            machine.host.memory_bytes // site.local,
            *((tiers.nvme_limit, True) if tiers.nvme_limit is not None else ()),
        )

    def candidate(self, choice: Choice, site: Site, budgets: Budgets) -> Candidate:
        segment = segment_length(choice.recompute, len(self._draft.blocks))
        load = self.workload(choice, site, segment)
        activations = transient_peak(load)
        request = dataclasses.replace(
            self._draft.request(self.config, site.ranks),
            tile=choice.tile,
            prefetch=choice.prefetch,
            segment=segment,
            order=choice.order,
            overlap=choice.overlap,
        )
        plan = plan_memory(self.shape, request, _without(budgets, activations))
        _check_device(plan, activations, site.machine)
        overlap = self._overlap(choice.overlap, plan, budgets)
        second = self._second_slots(overlap, plan, budgets)
        load = dataclasses.replace(load, overlap=overlap)
        try:
            return Candidate(choice, plan, predict(load, plan, site.machine), activations, overlap, second)
        except RuntimeError as error:
            raise BudgetError(f"plan: {error}; raise tiers.device") from None

    def _overlap(self, chosen: str, plan: MemoryPlan, budgets: Budgets) -> Overlap:
        """What a run has that is configured so. Raises BudgetError for "both" that nobody asked for, where "auto" would
        not choose it.
        """
        overlap, durable = cast("Overlap", chosen), self.config.checkpoint.durable
        if self.config.optimizer.overlap == "both":
            check_both(plan)
        elif chosen in ("auto", "both"):
            overlap = planned_overlap("auto", self.shape, plan, budgets, durable)
            if chosen == "both" and overlap != "both":
                raise BudgetError('optimizer.overlap = "both": nothing to try, or no room for second slots')
        return overlap

    def _second_slots(self, overlap: Overlap, plan: MemoryPlan, budgets: Budgets) -> int:
        """Bytes of tier files that second slots take beside the first. Raises BudgetError where they do not fit."""
        durable = self.config.checkpoint.durable
        if not durable and overlap != "both":
            return 0
        second = second_slot_bytes(self.shape, plan, durable)
        missing = plan.nvme_state + second - budgets.nvme_capacity
        if missing > 0:
            why = "checkpoint.durable" if durable else 'optimizer.overlap = "both"'
            raise BudgetError(
                f"tiers.nvme: {missing:,} bytes short of {plan.nvme_state + second:,} (two slots of each tile: {why}); "
                "use larger drives, raise tiers.nvme_limit, or place less there",
                missing,
            )
        return second

    def workload(self, choice: Choice, site: Site, segment: int) -> Workload:
        """What is simulated for ``choice``."""
        recomputed = list(dict.fromkeys(self._units[name] for name in self._draft.blocks)) if segment else []
        return Workload(
            self.shape,
            self.work,
            self.config.train.precision,
            self._draft.stage,
            PlannedRanks(site.ranks, site.local),
            self.micro_steps,
            choice.overlap,
            recomputed,
            segment,
            self._draft.kept,
            self.config.io.queue_depth * max(1, len(self.config.tiers.nvme)),
            self.config.io.block_size,
        )


def _check_device(plan: MemoryPlan, activations: int, machine: MachineProfile) -> None:
    """Raises BudgetError where activations find no room beside the pools on a device."""
    if machine.device is None:
        return
    missing = plan.device + activations - machine.device.memory_bytes
    if missing > 0:
        raise BudgetError(
            f"plan: the device has {machine.device.memory_bytes:,} bytes, {missing:,} short of {plan.device:,} for "
            f"tiers.device and {activations:,} for activations; lower train.micro_batch, set activations.recompute, or "
            "lower tiers.device",
            missing,
        )


def _without(budgets: Budgets, activations: int) -> Budgets:
    """What activations leave to the pools. They are no part of the budgets that a user states."""
    if budgets.device_is_host:
        return dataclasses.replace(
            budgets,
            host_free=max(0, budgets.host_free - activations),
            available=max(0, budgets.available - activations),
        )
    return dataclasses.replace(budgets, device_free=max(0, budgets.device_free - activations))


def settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """The keys by which a run follows the plan: the placements follow from the order."""
    best = plan.best
    return {
        **({"placement": {"order": list(best.choice.order)}} if _competes(plan.config) else {}),
        "tiers": {"tile": best.plan.tile, "prefetch": best.plan.prefetch},
        "optimizer": {"overlap": best.overlap},
        "activations": {"recompute": best.choice.recompute},
    }


def _competes(config: Config) -> bool:
    """Whether `placement.order` decides anything."""
    return [getattr(config.placement, kind) for kind in KINDS].count("auto") > 1


def planned_config(plan: Plan) -> dict[str, dict[str, Any]]:
    """What the configuration says, paths made absolute, and the settings of the plan."""
    return said_with(plan.config, settings(plan))


def placement_of(plan: Plan) -> dict[str, dict[str, float]]:
    """For each kind of state the part of its bytes in each tier."""
    totals = totals_by_kind(plan.shape, plan.best.plan.homes, plan.best.plan.tile)
    found = {}
    for kind, tiers in totals.items():
        total = sum(tiers.values())
        found[kind] = {tier.value: round(nbytes / total, 4) for tier, nbytes in tiers.items() if nbytes}
    return found


def default_plan(planner: Planner) -> Plan | None:
    """What a run does that is given no plan; None where it does not fit."""
    choice = planner.as_configured()
    options = Options(*([value] for value in dataclasses.astuple(choice)))
    try:
        return planner.plan(options)
    except BudgetError:
        return None


def _machine_here() -> MachineProfile:
    """Its memory and cores are this one's, its rates are not."""
    cores, memory = os.cpu_count() or 1, total_bytes()
    if not torch.cuda.is_available():
        return generic_machine(cores, memory)
    return generic_machine(cores, memory, torch.cuda.mem_get_info(0)[1], torch.cuda.device_count())


def site_of(profile: str | None, ranks: int | None, nodes: int) -> Site:
    """``ranks`` None: one rank, on this machine if the profile is of it. Raises ConfigError for a bad profile."""
    machine = MachineProfile.load(profile) if profile is not None else _machine_here()
    return Site(machine, ranks or 1, nodes, here=ranks is None and _is_this_one(machine))


def _is_this_one(machine: MachineProfile) -> bool:
    """By its memory and whether it has a GPU."""
    memory = total_bytes()
    alike: bool = abs(machine.host.memory_bytes - memory) < 0.05 * memory
    return alike and (machine.device is not None) is torch.cuda.is_available()
