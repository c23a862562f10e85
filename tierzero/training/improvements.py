"""What would make a planned step faster: the same search on a machine with more of one thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Config
from ..errors import BudgetError
from ..planner.machine import ComputeRates, Drive, MachineProfile
from ..planner.shape import Budgets
from .planned import Plan, Planner, Site
from .text import amount

_WORTH = 0.02
"""A smaller gain is not worth telling."""
_MORE = 0.25
"""More of a memory budget, as a part of it."""


@dataclass(frozen=True)
class Improvement:
    """``saved``: the part of the time per token that ``what`` would save."""

    what: str
    saved: float


def improvements(planner: Planner, plan: Plan) -> list[Improvement]:
    """The largest gain first; what gains nothing is left out."""
    found = []
    options = dataclasses.replace(planner.options(), order=[plan.best.choice.order])
    for what, changed, site, budgets, tokens in _variants(planner, plan):
        try:
            better = (changed or planner).plan(options, site, budgets)
        except BudgetError:
            continue
        saved = 1 - better.best.step_s / plan.best.step_s / tokens
        if saved >= _WORTH:
            found.append(Improvement(what, saved))
    return sorted(found, key=lambda improvement: -improvement.saved)


def _variants(planner: Planner, plan: Plan) -> Iterator[tuple[str, Planner | None, Site, Budgets, float]]:
    """(what is changed, the planner of a changed job, the site, the budgets, times as many tokens)."""
    site, budgets, machine = plan.site, plan.budgets, plan.site.machine
    more = _more_memory(budgets.host_limit)
    host = dataclasses.replace(
        budgets,
        host=budgets.host_limit + more,
        host_free=budgets.host_free + more,
        available=budgets.available + more,
    )
    yield f"{amount(more * site.local)} more host memory on each node", None, site, host, 1
    if machine.device is not None:
        more = _more_memory(budgets.device_limit)
        device = dataclasses.replace(
            budgets, device=None if budgets.device is None else budgets.device + more,
            device_free=budgets.device_free + more,
        )  # fmt: skip
        yield f"{amount(more)} more memory on each device", None, site, device, 1
        link = machine.device.model_copy(
            update={name: 2 * getattr(machine.device, name) for name in ("to_device", "to_host", "both")}
        )
        yield "a link to the device of twice the rate", None, _with(site, device=link), budgets, 1
    drive = machine.all_drives()
    if drive is not None and budgets.nvme:
        twice = Drive(name=drive.name, read=2 * drive.read, write=2 * drive.write, mixed=2 * drive.mixed)
        yield "drives of twice the rate", None, _with(site, drives=(twice,), striped=None), budgets, 1
    yield "twice the compute", None, _with(site, compute=_twice(machine)), budgets, 1
    if machine.network is not None and site.ranks > 1:
        yield "a network of twice the rate", None, _with(site, network=_twice_network(machine)), budgets, 1
    larger = _twice_the_batch(planner)
    if larger is not None:
        yield "twice the sequences per step, per token", larger, site, budgets, 2


def _more_memory(limit: int) -> int:
    """A quarter more, in whole GB from 1 GB on."""
    more = int(limit * _MORE)
    return max(1, round(more / 1e9)) * 10**9 if more >= 5e8 else more


def _with(site: Site, **changes: object) -> Site:
    return dataclasses.replace(site, machine=site.machine.model_copy(update=changes))


def _twice(machine: MachineProfile) -> dict[str, ComputeRates]:
    found = {}
    for dtype, rates in machine.compute.items():
        matmul = tuple(rate.model_copy(update={"flops": 2 * rate.flops}) for rate in rates.matmul)
        changes = {
            "matmul": matmul,
            "attention": tuple(rate.model_copy(update={"flops": 2 * rate.flops}) for rate in rates.attention),
            "pointwise_bytes": 2 * rates.pointwise_bytes,
            "operation_s": rates.operation_s / 2,
        }
        found[str(dtype)] = rates.model_copy(update=changes)
    return found


def _twice_network(machine: MachineProfile) -> object:
    network = machine.network
    assert network is not None
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    changes: dict[str, object] = {
        kind: tuple(rate.model_copy(update={"rate": 2 * rate.rate}) for rate in getattr(network, kind))
        for kind in kinds
    }
    if network.between_nodes is not None:
        changes["between_nodes"] = 2 * network.between_nodes
    return network.model_copy(update=changes)


def _twice_the_batch(planner: Planner) -> Planner | None:
    """Of the same micro-batches where those are given, else of larger ones."""
    config: Config = planner.config
    try:
        return Planner(config.override([f"train.batch_size={2 * config.train.batch_size}"]), planner.site)
    except (BudgetError, ValueError):
        return None
