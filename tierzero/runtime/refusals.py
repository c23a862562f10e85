"""What would take a sharded model's parameters out of the tiers, or give it others that are in none: refused in one
line each."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

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

_RESIZE = (
    "resize_token_embeddings on a sharded model: its parameters are in the tiers in the sizes that they have; resize "
    "before tierzero.shard"
)


_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Every module of every sharded model."""


def install_refusals(model: nn.Module) -> None:
    _watch_registrations()
    for module in model.modules():
        _sharded.add(module)
        if hasattr(module, "resize_token_embeddings"):  # of the transformers library
            module.resize_token_embeddings = _Refusal(_RESIZE)  # type: ignore[assignment]
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


@functools.cache
def _watch_registrations() -> None:
    """PyTorch asks these of every module, for parameters and modules that are assigned as for those that are added."""
    register_module_parameter_registration_hook(_refuse_parameter)
    register_module_module_registration_hook(_refuse_module)


def _refuse_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None and module in _sharded and slot_of(parameter) is None:
        raise _added(f"parameter {name!r} was assigned to", type(module).__name__)


def _refuse_module(module: nn.Module, name: str, added: nn.Module | None) -> None:
    if added is None or module not in _sharded:
        return
    for inner, parameter in added.named_parameters(name):
        if slot_of(parameter) is None:
            raise _added(f"a module with the parameter {inner!r} was added to", type(module).__name__)


def _added(what: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{what} a {kind} of a sharded model: it would be in no tier, and neither trained nor saved; add it (an "
        "adapter, a head) before tierzero.shard, or keep it outside the model"
    )
