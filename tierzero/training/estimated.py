"""`tierzero estimate`: what a configuration, or a number of parameters, needs at every stage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tierzero as tz

from ..activations.measure import ActivationBytes, activation_bytes
from ..activations.segments import segment_length
from ..config import Config
from ..errors import ConfigError
from ..models import bundled_model
from ..optim.formats import state_format
from ..planner.estimate import Estimate, Job, Limits, cheapest, estimates
from ..planner.shape import GroupShape, ModelShape
from ..runtime.draft import DTYPES, draft
from ..sharding.layout import flat_layout
from ..sharding.stages import KINDS, Stage
from .ranks import Ranks, micro_batches
from .text import amount, count
from .without_memory import model_and_loss


@dataclass(frozen=True)
class Report:
    """Every row, and the cheapest that fits (None: none does, or no limits were given)."""

    parameters: int
    precision: str
    ranks: int
    nodes: int
    rows: Sequence[Estimate]
    cheapest: Estimate | None
    activations: ActivationBytes | None
    limits: Limits

    def as_json(self) -> dict[str, Any]:
        best = self.cheapest
        return {
            "parameters": self.parameters,
            "precision": self.precision,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "limits_per_rank": dataclasses.asdict(self.limits),
            "rows": [row.as_json() for row in self.rows],
            "cheapest": {"stage": best.stage, "offload": best.offload} if best is not None else None,
        }


def estimate_config(config: Config, ranks: int, nodes: int, limits: Limits, device_is_host: bool) -> Report:
    """For the bundled model as ``config`` describes it. Raises ConfigError for a batch that the ranks cannot share."""
    local = _local(ranks, nodes)
    micro_batch, micro_steps = micro_batches(config, Ranks(0, ranks, 0, local))
    with torch.device("meta"), tz.empty_init():
        model = bundled_model(config)

    @functools.cache
    def shape_of(stage: Stage) -> ModelShape:
        return draft(model, config.override([f"sharding.stage={stage.number}"]), None, ranks).shape()

    activations = activations_of(config, micro_batch)
    recompute = config.activations.recompute
    job = Job(
        shape_of,
        ranks,
        micro_steps,
        activations.peak(recompute),
        kept=draft(model, config, None, ranks).kept,
        segment=segment_length(recompute, config.model.layers),
        tile=config.tiers.tile,
        prefetch=config.tiers.prefetch,
        device_is_host=device_is_host,
    )
    tiers = config.tiers
    stated = Limits(
        limits.device if limits.device is not None else tiers.device,
        limits.host if limits.host is not None else (tiers.host // local if tiers.host is not None else None),
        limits.nvme if limits.nvme is not None else tiers.nvme_limit,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _report(job, parameters, config.train.precision, nodes, stated, activations)


def estimate_parameters(
    parameters: int, precision: str, ranks: int, nodes: int, limits: Limits, device_is_host: bool
) -> Report:
    """For any model of so many parameters. What depends on its units and its activations is left out."""
    _local(ranks, nodes)
    dtype = DTYPES[precision]

    def shape_of(stage: Stage) -> ModelShape:
        layout = flat_layout(dtype, True, [(("all",), torch.Size([parameters]))], stage.parts(ranks))
        group = GroupShape(0, layout, state_format(dtype), dtype.itemsize, stage.whole)
        return ModelShape((group,), ("all",), ((),))

    job = Job(shape_of, ranks, units_known=False, device_is_host=device_is_host)
    return _report(job, parameters, precision, nodes, limits, None)


def activations_of(config: Config, micro_batch: int) -> ActivationBytes:
    """Of one micro-batch of ``micro_batch`` sequences, whatever is recomputed."""
    build, run = model_and_loss(config, micro_batch)
    return activation_bytes(build, lambda model: list(model.blocks), run)  # type: ignore[arg-type]


def _local(ranks: int, nodes: int) -> int:
    if ranks % nodes:
        raise ConfigError(f"estimate: {ranks} ranks cannot be divided among {nodes} nodes; give a multiple")
    return ranks // nodes


def _report(
    job: Job, parameters: int, precision: str, nodes: int, limits: Limits, activations: ActivationBytes | None
) -> Report:
    rows = estimates(job, limits)
    return Report(parameters, precision, job.ranks, nodes, rows, cheapest(rows), activations, limits)


# As text.

_HEADERS = (
    "stage", "offload", *KINDS, "device", "host", "nvme", "moved per step", "fits",
)  # fmt: skip


def lines(report: Report, recompute: str | int | None = None) -> list[str]:
    """The report as a person reads it. ``recompute``: what the activations were counted for."""
    over = f"{report.ranks} rank{'s' if report.ranks > 1 else ''}"
    over += f" on {report.nodes} nodes" if report.nodes > 1 else ""
    found = [f"model    {count(report.parameters)} parameters, {report.precision}, {over}; all figures are per rank"]
    if report.activations is not None and recompute is not None:
        found.append(
            f"device   includes activations, {amount(report.activations.peak(recompute))} (recompute = {recompute}: "
            f"{amount(report.activations.kept(recompute))} are kept through the forward)"
        )
    else:
        found.append("device   without gathered units and activations, which depend on the model: give a configuration")
    rows = [_cells(row) for row in report.rows]
    widths = [max(len(cell) for cell in column) for column in zip(_HEADERS, *rows, strict=True)]
    found.append("")
    table = (zip(row, widths, strict=True) for row in (_HEADERS, *rows))
    found += ["  ".join(cell.rjust(width) for cell, width in row).rstrip() for row in table]
    return [*found, "", _verdict(report)]


def _cells(row: Estimate) -> tuple[str, ...]:
    kinds = [sum(places.get(kind, 0) for places in row.state.values()) for kind in KINDS]
    fits = {None: "", True: "yes", False: "no"}[row.fits]
    if row.missing:
        fits += " (" + ", ".join(f"{tier} {amount(nbytes)} short" for tier, nbytes in row.missing.items()) + ")"
    return (
        str(row.stage),
        row.offload,
        *map(amount, kinds),
        *(amount(row.totals[tier]) for tier in ("device", "host", "nvme")),
        amount(sum(row.volume.values())),
        fits,
    )


def _verdict(report: Report) -> str:
    limits = {tier: limit for tier, limit in dataclasses.asdict(report.limits).items() if limit is not None}
    if not limits:
        return "cheapest unknown: give the memory per rank (--device, --host, --nvme, or the keys of [tiers])"
    given = ", ".join(f"{tier} {amount(limit)}" for tier, limit in limits.items())
    if report.cheapest is None:
        return f"cheapest none fits in {given} per rank: use more ranks, a smaller model or larger tiers"
    best = report.cheapest
    offload = "without offload" if best.offload == "none" else f"with offload {best.offload}"
    return f"cheapest stage {best.stage} {offload}, of those that fit in {given} per rank"
