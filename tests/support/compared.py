"""One piece of code on a plain model and on a sharded copy: the same tensors come out, and the model is at rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierzero as tz
from tierzero.runtime.state import slot_of

from .oracle import assert_at_rest, config, sharded

Act = Callable[[nn.Module], list[torch.Tensor]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's for a plain model, TierZero's for a sharded one."""
    kind = torch.optim.AdamW if slot_of(next(model.parameters())) is None else tz.AdamW
    return kind(model.parameters(), lr=1e-2, eps=1e-5)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [
        parameter.detach().clone() if slot_of(parameter) is None else tz.read_state(parameter, "weight")
        for parameter in model.parameters()
    ]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of every parameter, dense; zeros where there is none."""
    found = []
    for parameter in model.parameters():
        slot = slot_of(parameter)
        if slot is not None:
            found.append(tz.read_state(parameter, "gradient") if slot.has_grad else torch.zeros(parameter.shape))
        else:
            found.append(torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.to_dense().clone())
    return found


def trained(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """The losses of some steps, and the weights after them."""
    optimizer, losses = adamw(model), []
    for step in range(steps):
        torch.manual_seed(step)
        value = loss(model, step)
        value.backward()
        losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + weights(model)


def assert_alike(
    build: Callable[[], nn.Module],
    act: Act,
    nvme: Path,
    tier: str,
    units: Any,
    tolerance: float = 1e-5,
    **sections: Any,
) -> None:
    """``act`` returns the same tensors, within ``tolerance`` (relative, and absolute)."""
    torch.manual_seed(0)
    plain = build()
    wanted = act(plain)
    torch.manual_seed(0)
    with sharded(build(), config(nvme, tier, **{"tiers": {"prefetch": 0}} | sections), units) as model:
        found = act(model)
        assert_at_rest(model)
        assert len(found) == len(wanted)
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, check_stride=False)
