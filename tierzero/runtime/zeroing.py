"""``module.zero_grad()`` for modules whose gradients live in the tiers, where ``.grad`` does not show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tierzero.graphs import out_of_graphs
from tierzero.optim.owner import require_dropping
from tierzero.runtime.state import slot_of

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


def install_zero_grad(runtime: Runtime, model: nn.Module) -> None:
    """Lets every module of the model drop its parameters' gradients without reading them."""
    for module in model.modules():
        module.zero_grad = _ZeroGrad(runtime, module)  # type: ignore[method-assign]


class _ZeroGrad:
    """One module's ``zero_grad``."""

    def __init__(self, runtime: Runtime, module: nn.Module) -> None:
        self._runtime = runtime
        self._module = module

    @out_of_graphs
    def __call__(self, set_to_none: bool = True) -> None:
        require_dropping(set_to_none)
        slots = []
        for parameter in self._module.parameters():
            slot = slot_of(parameter)
            if slot is not None:
                slots.append(slot)
            elif parameter.grad is not None:  # added after sharding
                parameter.grad = None
        self._runtime.zero_grad(slots)
