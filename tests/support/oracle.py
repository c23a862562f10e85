"""A model trained twice: unsharded with ``torch.optim.AdamW`` and under TierZero, then compared value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import tierzero as tz
from tierzero.api import running
from tierzero.optim.formats import state_format, store_master
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.reference import update_reference
from tierzero.runtime.build import build_runtime
from tierzero.runtime.state import slot_of

TIERS = ("host", "nvme")
Loss = Callable[[nn.Module, int, int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and what is trained on it: ``loss(model, step, rank)``. ``units`` as for `tierzero.shard`."""

    build: Callable[[], nn.Module]
    loss: Loss
    units: Any = None
    steps: int = 6
    eps: float = 1e-8
    """Larger where gradients are zero but for rounding (a key's bias in attention): Adam would amplify the noise."""
    clip: float | None = None


@dataclass
class Outcome:
    """Values in host memory, by parameter name. ``moments``: (m, v), None where the parameter never stepped."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, tuple[torch.Tensor, torch.Tensor] | None] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)


def config(nvme: Path, tier: object = "nvme", **sections: dict[str, Any]) -> tz.Config:
    """fp32, small tiles, little prefetch, all state in ``tier``; ``sections`` over it."""
    merged: dict[str, dict[str, Any]] = {
        "train": {"precision": "fp32"},
        "tiers": {"nvme": [str(nvme)], "tile": 4096, "prefetch": 1, "device": "64MiB", "host": "64MiB"},
        "placement": dict.fromkeys(("params", "optimizer", "gradients"), tier),
    }
    for name, keys in sections.items():
        merged[name] = merged.get(name, {}) | keys
    return tz.Config.from_dict(merged)


@contextmanager
def sharded(model: nn.Module, settings: tz.Config, units: Any = None, **options: Any) -> Iterator[nn.Module]:
    """The model sharded, released memory filled with NaN; closed at the end, whatever happened."""
    runtime = build_runtime(model, settings, units, poison=True, **options)
    try:
        yield model
    finally:
        runtime.close()


def built(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.build()


def hyper(case: Case) -> dict[str, Any]:
    return {"lr": 1e-2, "betas": (0.9, 0.95), "eps": case.eps, "weight_decay": 0.1}


def seeded_loss(case: Case, model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss, with random numbers (dropout) that depend on step and rank only."""
    torch.manual_seed(100 * step + rank)
    return case.loss(model, step, rank)


def train_plain(case: Case, ranks: int = 1) -> Outcome:
    """On one process; with several ``ranks`` on the mean of their losses, as data parallel training does."""
    model = built(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **hyper(case))
    outcome = Outcome()
    for step in range(case.steps):
        loss = sum(seeded_loss(case, model, step, rank) for rank in range(ranks)) / ranks
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        outcome.losses.append(loss.item())
        if case.clip is not None:
            outcome.norms.append(torch.nn.utils.clip_grad_norm_(trained, case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        outcome.weights[name] = parameter.detach().clone()
        state = optimizer.state.get(parameter)
        outcome.moments[name] = (state["exp_avg"], state["exp_avg_sq"]) if state else None
        outcome.updates[name] = int(state["step"]) if state else 0
    return outcome


def train_plain_bf16(case: Case, ranks: int = 1) -> Outcome:
    """As `train_plain` in mixed precision, of cases that do not clip: bf16 parameters and inputs of a model whose
    buffers stay as they are, the mean of the ranks' bf16 gradients, and the update of split fp32 masters as plain
    PyTorch has it. Bit for bit what the same runtime has to compute.
    """
    assert case.clip is None
    model = built(case)
    model.register_forward_pre_hook(lambda _, args, named: tree_map(_bf16, (args, named)), with_kwargs=True)
    fmt = state_format(torch.bfloat16)
    states = {}
    for name, parameter in model.named_parameters():
        parts = {segment.name: torch.zeros(parameter.numel(), dtype=segment.dtype) for segment in fmt.optimizer}
        master, parameter.data = parameter.detach().flatten(), torch.empty_like(parameter, dtype=torch.bfloat16)
        store_master(fmt, master, parameter.data.view(-1), parts)
        states[name] = parts
    outcome = Outcome(updates=dict.fromkeys(states, 0))
    for step in range(case.steps):
        losses, gradients = [], []
        for rank in range(ranks):
            loss = seeded_loss(case, model, step, rank)
            loss.backward()
            losses.append(loss.detach())
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
            model.zero_grad()
        outcome.losses.append(sum(losses[1:], losses[0]).item() / ranks)
        for name, parameter in model.named_parameters():
            given = [grads[name] for grads in gradients if grads[name] is not None]
            if given:
                outcome.updates[name] += 1
                at = AdamHyper(1e-2, 0.9, 0.95, case.eps, 0.1, True, outcome.updates[name])
                mean = sum(given[1:], given[0]).flatten() / ranks
                update_reference(fmt, parameter.data.view(-1), states[name], mean, at)
    for name, parameter in model.named_parameters():
        outcome.weights[name] = parameter.detach().clone()
        m, v = (states[name][kind].view(parameter.shape) for kind in "mv")
        outcome.moments[name] = (m, v) if outcome.updates[name] else None
    return outcome


def _bf16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


def take_steps(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> Outcome:
    """The training loop on a sharded model."""
    outcome = Outcome()
    for step in range(case.steps):
        loss = seeded_loss(case, model, step, rank)
        loss.backward()
        outcome.losses.append(_mean_over_ranks(loss.detach(), ranks))
        if case.clip is not None:
            outcome.norms.append(tz.clip_grad_norm_(model, case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return outcome


def _mean_over_ranks(loss: torch.Tensor, ranks: int) -> float:
    total = loss.clone()
    if ranks > 1:
        torch.distributed.all_reduce(total)
    return total.item() / ranks


def train_sharded(case: Case, settings: tz.Config, rank: int = 0, ranks: int = 1, **options: Any) -> Outcome:
    with sharded(built(case), settings, case.units, **options) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(case))
        outcome = take_steps(case, model, optimizer, rank, ranks)
        record_state(model, outcome)
        assert_at_rest(model)
    return outcome


def record_state(model: nn.Module, outcome: Outcome) -> None:
    """Weights and moments; of models of very many parameters those of some, because each one is read by itself."""
    named = list(model.named_parameters())
    for name, parameter in named[:: 1 + len(named) // 500]:
        slot = slot_of(parameter)
        assert slot is not None
        outcome.weights[name] = tz.read_state(parameter, "weight")
        outcome.updates[name] = slot.step
        outcome.moments[name] = None
        if slot.step:
            outcome.moments[name] = (tz.read_state(parameter, "m"), tz.read_state(parameter, "v"))


def assert_at_rest(model: nn.Module) -> None:
    """Between steps every parameter is away, no unit is in use, and no pool went over its budget."""
    runtime = running(model)
    assert [slot.name for slot in runtime.slots() if not slot.is_away] == []
    assert [unit.title for unit in runtime.units if unit.active] == []
    assert runtime.pools["buckets"].used == 0
    for name, pool in runtime.pools.items():
        assert pool.peak <= pool.capacity, name


def relative_error(found: torch.Tensor, wanted: torch.Tensor, least: float = 1e-12) -> float:
    """Norm of the difference over the norm of what is wanted (``least`` if that is smaller), of the whole tensor."""
    if not wanted.numel():
        return 0.0
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(least))


def assert_close(found: Outcome, wanted: Outcome, tolerance: float = 1e-5) -> None:
    """Losses, norms and weights within ``tolerance`` (relative), moments within five times that, step counts equal."""
    for step, (have_loss, want_loss) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        where = f"loss of step {step}: {have_loss} instead of {want_loss}"
        assert abs(have_loss - want_loss) <= tolerance * max(1.0, abs(want_loss)), where
    for step, (have_norm, want_norm) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        where = f"norm of step {step}: {have_norm} instead of {want_norm}"
        assert abs(have_norm - want_norm) <= 10 * tolerance * max(1e-3, want_norm), where
    assert found.weights
    for name, have_weight in found.weights.items():
        want_weight = wanted.weights[name]
        assert found.updates[name] == wanted.updates[name], f"{name}: number of updates"
        assert have_weight.shape == want_weight.shape
        error = relative_error(have_weight, want_weight)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
        have_moments, want_moments = found.moments[name], wanted.moments[name]
        if have_moments is not None and want_moments is not None:
            # Below the floors a gradient is nothing but rounding.
            for which, have, want, least in zip("mv", have_moments, want_moments, (1e-4, 1e-8), strict=True):
                error = relative_error(have, want, least)
                assert error <= 5 * tolerance, f"{name} {which}: relative error {error:.2e}"


def assert_bits(found: Outcome, wanted: Outcome) -> None:
    """Equal to the last bit."""
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert found.updates == wanted.updates
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), name
        have, want = found.moments[name], wanted.moments[name]
        assert (have is None) == (want is None), name
        if have is not None and want is not None:
            assert torch.equal(have[0], want[0]), f"{name} m"
            assert torch.equal(have[1], want[1]), f"{name} v"
