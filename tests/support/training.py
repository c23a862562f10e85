"""One small training run, written once for sharded and for plain models, and the comparison of two such runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.errors import BudgetError
from tierzero.reaching import read_state
from tierzero.runtime.build import build_runtime
from tierzero.runtime.device import Device

from .models import UNITS, batch

KINDS = ("weight", "master", "m", "v")
Batches = Callable[[int], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Recipe:
    """How to train. ``accumulate`` backwards per step, each on a batch of its own; ``clip`` None: not at all."""

    steps: int = 20
    accumulate: int = 1
    clip: float | None = 1.18
    adamw: bool = True
    groups: bool = True
    """Vectors get a learning rate and betas of their own and no weight decay."""
    schedule: bool = True
    batches: Batches = batch


@dataclass
class Result:
    """What a run computed: exact values, in host memory. ``norms`` are those before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """By ``name/kind`` for sharded runs, by name for plain ones."""
    stats: dict[str, Any] = field(default_factory=dict)


def everything_in(tier: object) -> dict[str, object]:
    """A ``[placement]`` that puts all state into one tier, or splits all of it alike."""
    return dict.fromkeys(("params", "optimizer", "gradients"), tier)


def configured(nvme: Path, **sections: dict[str, Any]) -> tz.Config:
    """A bf16 configuration with ``nvme`` and small tiles, all state on NVMe, and ``sections`` over it."""
    merged: dict[str, dict[str, Any]] = {
        "tiers": {"nvme": [str(nvme)], "tile": 4096},
        "placement": everything_in("nvme"),
    }
    for name, keys in sections.items():
        merged[name] = merged.get(name, {}) | keys
    return tz.Config.from_dict(merged)


def tight(
    build: Callable[[], nn.Module], config: tz.Config, units: Any = UNITS, device: Device | None = None
) -> tz.Config:
    """``config`` with the smallest device and host budgets that it accepts. On several ranks all must call it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1  # which share the host's budget
    budgets = {"device": 4096, "host": 4096}
    while True:
        candidate = tz.Config.from_dict(_with_budgets(config, budgets))
        try:
            runtime = build_runtime(build(), candidate, units, device=device)
        except BudgetError as error:
            tier = str(error).removeprefix("tiers.").split(" ")[0]
            budgets[tier] += error.missing * (ranks if tier == "host" else 1)
        else:
            runtime.close()
            return candidate


def _with_budgets(config: tz.Config, budgets: dict[str, int]) -> dict[str, Any]:
    raw: dict[str, Any] = config.model_dump(by_alias=True, exclude_unset=True)
    raw["tiers"] = raw["tiers"] | budgets
    return raw


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    if not recipe.groups:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.ndim == 2]},
        {"params": [p for p in parameters if p.ndim != 2], "lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.0},
    ]


def schedule_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler | None:
    if not recipe.schedule:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.97**step)


def take_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], torch.Tensor],
    recipe: Recipe,
    result: Result,
    between: Callable[[int], None] = lambda step: None,
) -> None:
    """The loop that a user would write. ``between`` runs before each step."""
    scheduler = schedule_of(optimizer, recipe)
    for step in range(recipe.steps):
        between(step)
        total = 0.0
        for micro in range(recipe.accumulate):
            loss = model(*recipe.batches(step * recipe.accumulate + micro)) / recipe.accumulate
            loss.backward()
            total += loss.item()
        result.losses.append(total)
        if recipe.clip is not None:
            result.norms.append(clip(recipe.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


@contextmanager
def sharded(
    model: nn.Module,
    config: tz.Config,
    recipe: Recipe,
    units: Any = UNITS,
    device: Device | None = None,
    poison: bool = False,
) -> Iterator[torch.optim.Optimizer]:
    """The model sharded, with its optimizer; closed at the end, whatever happened."""
    runtime = build_runtime(model, config, units, device=device, poison=poison)
    try:
        kind = tz.AdamW if recipe.adamw else tz.Adam
        yield kind(parameter_groups(model, recipe), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    finally:
        runtime.close()


def train_sharded(
    model: nn.Module,
    config: tz.Config,
    recipe: Recipe | None = None,
    between: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Result:
    recipe = recipe or Recipe()
    result = Result()
    with sharded(model, config, recipe, **options) as optimizer:
        take_steps(model, optimizer, lambda most: tz.clip_grad_norm_(model, most), recipe, result, between)
        result.state = whole_state(model)
        result.stats = tz.stats(model)
        assert_within_budgets(model)
    return result


def train_plain(model: nn.Module, recipe: Recipe | None = None) -> Result:
    """The same on an unsharded model with ``torch.optim`` and ``torch.nn.utils.clip_grad_norm_``."""
    recipe = recipe or Recipe()
    kind = torch.optim.AdamW if recipe.adamw else torch.optim.Adam
    optimizer = kind(parameter_groups(model, recipe), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    result = Result()

    def clip(most: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    take_steps(model, optimizer, clip, recipe, result)
    result.state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every kind of every parameter's state, by ``name/kind``; averages where there are any."""
    averaged = any(group.fmt is not None and group.fmt.is_averaged for group in running(model).groups())
    found: dict[str, torch.Tensor] = {}
    for kind in (*KINDS, "ema") if averaged else KINDS:
        named = [(name, p) for name, p in model.named_parameters() if kind == "weight" or p.requires_grad]
        values = read_state([parameter for _, parameter in named], kind)  # type: ignore[arg-type]
        found |= {f"{name}/{kind}": value for (name, _), value in zip(named, values, strict=True)}
    return found


def assert_within_budgets(model: nn.Module) -> None:
    for name, pool in running(model).pools.items():
        assert pool.peak <= pool.capacity, f"pool {name}: {pool.peak} bytes of {pool.capacity}"
        assert pool.used + pool.cached <= pool.capacity, name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: equal for NaNs too, different for zeros of either sign."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])


def assert_identical(found: Result, wanted: Result, what: str = "") -> None:
    """Losses, norms and every bit of the state."""
    assert found.losses == wanted.losses, f"{what}: losses {found.losses} instead of {wanted.losses}"
    assert found.norms == wanted.norms, f"{what}: norms {found.norms} instead of {wanted.norms}"
    assert_same_state(found.state, wanted.state, what)


def assert_same_state(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str = "") -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, f"{what}: {name}"
        assert found[name].dtype == tensor.dtype, f"{what}: {name}"
        differing = int((bits(found[name]) != bits(tensor)).sum())
        assert differing == 0, f"{what}: {name} differs in {differing} of {tensor.numel()} elements"


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the whole tensor: norm of the difference over the norm of what is wanted."""
    if not wanted.numel():
        return 0.0
    wanted64 = wanted.double()
    return float((found.double() - wanted64).norm() / wanted64.norm().clamp_min(1e-30))


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
