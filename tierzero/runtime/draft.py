"""A model as it is going to be sharded: units, flat groups, what is asked of the plan. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tierzero.activations.segments import segment_length
from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.optim.formats import StateFormat, state_format, with_average
from tierzero.planner.shape import GroupShape, ModelShape, PlanRequest
from tierzero.sharding.layout import FlatLayout, flat_layout
from tierzero.sharding.stages import STAGES, Stage
from tierzero.sharding.units import UnitChoice, UnitSpec, find_units, matches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class GroupDraft:
    """One flat group of the unit with number ``unit``; ``fmt`` is None for a frozen one."""

    unit: int
    layout: FlatLayout
    fmt: StateFormat | None
    grad_dtype: torch.dtype
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class Draft:
    """``convert`` is the dtype that the model is converted to; None where it mixes dtypes, which it keeps."""

    specs: list[UnitSpec]
    groups: list[GroupDraft]
    convert: torch.dtype | None
    stage: Stage
    blocks: tuple[str, ...]
    """Modules that are worth recomputing, in order, see `is_block`."""
    kept: frozenset[int]
    """Units that stay gathered from the forward to the update."""

    def shape(self) -> ModelShape:
        return ModelShape(
            tuple(
                GroupShape(g.unit, g.layout, g.fmt, g.grad_dtype.itemsize if g.fmt else 0, self.stage.whole)
                for g in self.groups
            ),
            tuple(spec.title for spec in self.specs),
            tuple(spec.ancestors for spec in self.specs),
        )

    def request(self, config: Config, ranks: int) -> PlanRequest:
        placement, tiers = config.placement, config.tiers
        return PlanRequest(
            placement.params,
            placement.optimizer,
            placement.gradients,
            tiers.tile,
            tiers.prefetch,
            frozen=None if placement.frozen == "params" else placement.frozen,
            kept=self.kept,
            reduced=ranks > 1,
            stage=self.stage,
            segment=segment_length(config.activations.recompute, len(self.blocks)),
            order=tuple(placement.order),
            overlap=config.optimizer.overlap,
        )


def draft(model: nn.Module, config: Config, units: UnitChoice, ranks: int) -> Draft:
    """Raises ConfigError for units that match nothing."""
    sharding = config.sharding
    specs = find_units(model, units if units is not None else sharding.units, sharding.min_unit)
    stage = STAGES[sharding.stage]
    convert = _conversion(model, config)
    groups = _draft_groups(specs, convert, config, stage.parts(ranks))
    blocks = tuple(name for spec in specs for name, module in spec.modules.items() if is_block(name, module))
    return Draft(specs, groups, convert, stage, blocks, kept_units(specs, sharding.reshard_after_forward))


def kept_units(specs: list[UnitSpec], reshard: bool | list[str]) -> frozenset[int]:
    """Raises ConfigError for a name that no unit has."""
    if isinstance(reshard, bool):
        return frozenset() if reshard else frozenset(range(len(specs)))
    found: set[int] = set()
    for entry in reshard:
        hits = {
            index
            for index, spec in enumerate(specs)
            if any(matches(name or spec.title, module, entry) for name, module in spec.modules.items())
        }
        if not hits:
            units = ", ".join(spec.title for spec in specs[:8])
            raise ConfigError(f"sharding.reshard_after_forward: no unit is named {entry!r}; there are {units}")
        found |= hits
    return frozenset(found)


def is_block(name: str, module: nn.Module) -> bool:
    """A unit's module worth recomputing: one of the model's blocks, not the model itself nor a single layer."""
    return bool(name) and next(module.children(), None) is not None


def _conversion(model: nn.Module, config: Config) -> torch.dtype | None:
    """The dtype that the model's parameters are converted to: train.precision, unless the model itself mixes dtypes,
    which it keeps.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    return DTYPES[config.train.precision] if len(dtypes) == 1 else None


def _with_statistics(model: nn.Module) -> set[nn.Parameter]:
    """Weights beside running statistics (batch norm). Buffers keep their dtype, and PyTorch wants these two alike."""
    return {
        parameter
        for module in model.modules()
        if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        for parameter in module.parameters(recurse=False)
    }


def _draft_groups(specs: list[UnitSpec], convert: torch.dtype | None, config: Config, parts: int) -> list[GroupDraft]:
    drafts = []
    kept = _with_statistics(specs[0].modules[""])
    for index, spec in enumerate(specs):
        members: dict[tuple[torch.dtype, bool], list[tuple[tuple[str, ...], nn.Parameter]]] = {}
        for names, parameter in spec.parameters:
            dtype = parameter.dtype
            if convert is not None and dtype.is_floating_point and parameter not in kept:
                dtype = convert
            members.setdefault((dtype, parameter.requires_grad), []).append((names, parameter))
        for (dtype, trainable), named in members.items():
            fmt = state_format(dtype, config.optimizer.state_dtype) if trainable else None
            shapes = [(names, parameter.shape) for names, parameter in named]
            layout = flat_layout(dtype, trainable, shapes, parts, fmt.block if fmt is not None else 1)
            grad_dtype = dtype if config.train.grad_dtype == "auto" else DTYPES[config.train.grad_dtype]
            if fmt is not None and config.optimizer.ema:
                fmt = with_average(fmt)
            members_of = tuple(parameter for _, parameter in named)
            drafts.append(GroupDraft(index, layout, fmt, grad_dtype, members_of))
    return drafts
