"""Module methods that would take a sharded model's parameters out of the tiers: refused in one line each."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from tierzero.errors import ConfigError
from tierzero.runtime.state import slot_of

_APPLY = (
    "a sharded model keeps its parameters in the tiers: .to(), .cuda(), .half() and alike cannot move or convert them; "
    "choose placement and train.precision in the configuration, before tierzero.shard"
)
_LOAD = (
    "load_state_dict on a sharded model: its weights are in the tiers; load them before tierzero.shard, give "
    "init=<folder of safetensors>, or use tierzero.load_checkpoint"
)


def install_refusals(model: nn.Module) -> None:
    for module in model.modules():
        if any(slot_of(parameter) is not None for parameter in module.parameters()):
            module._apply = _Refusal(_APPLY)  # type: ignore[method-assign]
        if any(slot_of(parameter) is not None for parameter in module.parameters(recurse=False)):
            # Not load_state_dict itself: a module around the model calls this one only.
            module._load_from_state_dict = _Refusal(_LOAD)  # type: ignore[method-assign]


class _Refusal:
    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(self._message)
