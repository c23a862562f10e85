"""``module.zero_grad()`` for modules whose gradients live in the tiers, where ``.grad`` does not show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch import nn

from tierzero.errors import NotResidentError
from tierzero.runtime.state import slot_of

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


def install_zero_grad(runtime: Runtime, model: nn.Module) -> None:
    """Lets every module of the model drop its parameters' gradients without reading them."""
    for module in model.modules():
        module.zero_grad = _ZeroGrad(runtime, module)  # type: ignore[method-assign]


class _ZeroGrad:
    """One module's ``zero_grad``. It also refuses to be copied: a copy of a module whose parameters happen to be
    gathered would otherwise succeed, and run the original's forward.
    """

    def __init__(self, runtime: Runtime, module: nn.Module) -> None:
        self._runtime = runtime
        self._module = module

    def __call__(self, set_to_none: bool = True) -> None:
        slots = []
        for parameter in self._module.parameters():
            slot = slot_of(parameter)
            if slot is not None:
                slots.append(slot)
            elif parameter.grad is not None:  # added after sharding
                parameter.grad = None if set_to_none else parameter.grad.detach().zero_()
        self._runtime.zero_grad(slots)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise NotResidentError(
            "a sharded model cannot be copied; copy it before tierzero.shard, or load "
            "tierzero.full_state_dict(model) into a second one"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotResidentError(
            "a sharded model cannot be pickled; save tierzero.full_state_dict(model) or use tierzero.save_checkpoint"
        )
