"""A plan as a person reads it, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..planner.prediction import BOUND_NAMES
from .improvements import Improvement
from .planned import Plan, placement_of, settings
from .settings import set_lines
from .text import amount, count


def as_json(plan: Plan, improvements: Sequence[Improvement], default: Plan | None) -> dict[str, Any]:
    """One object; bytes and seconds."""
    best, phases = plan.best, plan.best.prediction.phases
    return {
        "fits": True,
        "predicted_step_s": best.step_s,
        "bound_by": best.prediction.bound_by,
        "peak_bytes": peak_bytes(plan),
        "placement": placement_of(plan),
        "tile": best.plan.tile,
        "prefetch": best.plan.prefetch,
        "overlap": best.overlap,
        "recompute": best.choice.recompute,
        "phases_s": {"forward": phases.forward, "backward": phases.backward, "update": phases.update},
        "waiting_s": phases.waiting,
        "busy_s": phases.busy,
        "nvme_bytes_per_step": phases.nvme_bytes,
        "parameters": plan.parameters,
        "ranks": plan.site.ranks,
        "nodes": plan.site.nodes,
        "machine": {
            "name": plan.site.machine.name,
            "date": plan.site.machine.date,
            "source": plan.site.machine.source,
        },
        "as_configured_step_s": default.best.step_s if default is not None else None,
        "would_help": [{"what": each.what, "saved": each.saved} for each in improvements],
    }


def peak_bytes(plan: Plan) -> dict[str, int]:
    """Per rank, at most."""
    memory = plan.best.plan
    return {
        "device": memory.device + plan.best.activations,
        "host": memory.host,
        "nvme": memory.nvme_state + plan.best.second_slots,
    }


def lines(plan: Plan, improvements: Sequence[Improvement], default: Plan | None) -> list[str]:
    """All of it, a fact a line."""
    best, site = plan.best, plan.site
    phases, machine = best.prediction.phases, site.machine
    over = f"{site.ranks} rank{'s' if site.ranks > 1 else ''}"
    over += f" on {site.nodes} nodes" if site.nodes > 1 else ""
    train = plan.config.train
    tokens = train.batch_size * train.seq_len
    found = [
        f"model    {count(plan.parameters)} parameters, {train.precision}, {over}, {tokens:,} tokens a step",
        f"machine  {machine.name}, {machine.date} ({machine.source})",
        f"step     {_seconds(best.step_s)} predicted: forward {_seconds(phases.forward)}, backward "
        f"{_seconds(phases.backward)}, update {_seconds(phases.update)}; {count(tokens / best.step_s)} tokens/s",
        f"bound    {_bound(plan)}",
    ]
    found += ["", *_memory_table(plan), "", *_places(plan), *set_lines(settings(plan))]
    if default is not None and default.best.step_s > 1.005 * best.step_s:
        found.append(f"         {_seconds(default.best.step_s)} a step without these settings")
    if improvements:
        found.append("")
        found += [
            f"{'helps' if number == 0 else '':<9}{each.what}: -{100 * each.saved:.0f}%"
            for number, each in enumerate(improvements)
        ]
    return found


def _places(plan: Plan) -> list[str]:
    words = (
        f"{kind} {' and '.join(f'{100 * part:.0f}% {tier}' for tier, part in tiers.items())}"
        for kind, tiers in placement_of(plan).items()
        if tiers
    )
    return [f"places   {', '.join(words)}"]


def _bound(plan: Plan) -> str:
    prediction = plan.best.prediction
    phases = prediction.phases
    shares = ", ".join(
        f"{BOUND_NAMES[name]} {100 * busy / phases.step:.0f}%" for name, busy in phases.busy.items() if busy > 0
    )
    waits = sum(phases.waiting.values())
    waiting = f"; the model waits for {100 * waits / phases.step:.0f}%" if waits > 0.005 * phases.step else ""
    why = " (nothing is busy throughout: too little memory to work ahead)" if prediction.bound_by == "memory" else ""
    return f"{prediction.bound_by}{why}; busy: {shares}{waiting}"


def _memory_table(plan: Plan) -> list[str]:
    memory, budgets = plan.best.plan, plan.budgets
    slots = ", two slots of each tile" if plan.best.second_slots else ""
    rows = [
        ("tier", "most", "budget", "of that"),
        (
            "device (host memory)" if budgets.device_is_host else "device",
            amount(memory.device),
            amount(budgets.device_limit),
            f"state {amount(memory.device_state)}, gathered {amount(memory.arena)}, gradients on their way "
            f"{amount(memory.buckets)}",
        ),
        ("activations", amount(plan.best.activations), "", "beside the device's budget, in the same memory"),
        (
            "host",
            amount(memory.host),
            amount(budgets.host_limit),
            f"state {amount(memory.host_state)}, tiles in flight {amount(memory.staging)}",
        ),
        (
            "nvme",
            amount(peak_bytes(plan)["nvme"]),
            "",
            f"{amount(plan.best.prediction.phases.nvme_bytes)} moved a step{slots}",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[3]}" for row in rows
    ]


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
