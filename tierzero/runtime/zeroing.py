"""``module.zero_grad()`` for modules whose gradients live in the tiers, where ``.grad`` does not show them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import nn

from tierzero.runtime.state import slot_of

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


def install_zero_grad(runtime: Runtime, model: nn.Module) -> None:
    """Lets every module of the model drop its parameters' gradients without reading them."""
    for module in model.modules():
        module.zero_grad = functools.partial(_zero_grad, runtime, module)  # type: ignore[method-assign]


def _zero_grad(runtime: Runtime, module: nn.Module, set_to_none: bool = True) -> None:
    slots = []
    for parameter in module.parameters():
        slot = slot_of(parameter)
        if slot is not None:
            slots.append(slot)
        elif parameter.grad is not None:  # added after sharding
            parameter.grad = None if set_to_none else parameter.grad.detach().zero_()
    runtime.zero_grad(slots)
