"""What would take a sharded model's parameters out of the tiers, give it others that are in none, or run another
module's forward: refused in one line each."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tierzero.errors import ConfigError, NotResidentError
from tierzero.runtime.state import slot_of

_APPLY = (
    "a sharded model keeps its parameters in the tiers: .to(), .cuda(), .half() and alike cannot move or convert them; "
    "choose placement and train.precision in the configuration, before tierzero.shard"
)
_LOAD = (
    "load_state_dict on a sharded model: its weights are in the tiers; load them before tierzero.shard, give "
    "init=<folder of safetensors>, or use tierzero.load_checkpoint"
)
_COPY = (
    "a sharded model cannot be copied or pickled, nor can its parts; copy it before tierzero.shard, load "
    "tierzero.full_state_dict(model) into a second one, or use tierzero.save_checkpoint"
)
_WRAP = (
    "DistributedDataParallel or FSDP around a sharded model: tierzero.shard has divided it over the ranks already; "
    "train the model as it is"
)
_SCRIPT = (
    "torch.jit.script and torch.jit.trace cannot compile a sharded model, whose forward pages its weights in; compile "
    "a plain model with tierzero.full_state_dict(model) loaded"
)

_RESIZE = (
    "resize_token_embeddings on a sharded model: its parameters are in the tiers in the sizes that they have; resize "
    "before tierzero.shard"
)


_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Every module of every sharded model."""


def install_refusals(model: nn.Module) -> None:
    """Some are methods of a module, some what PyTorch's wrappers ask a module for."""
    _watch_registrations()
    composed = _composed_key()
    for module in model.modules():
        _sharded.add(module)
        if hasattr(module, "resize_token_embeddings"):  # of the transformers library
            module.resize_token_embeddings = _Refusal(_RESIZE)  # type: ignore[assignment]
        if any(slot_of(parameter) is not None for parameter in module.parameters()):
            module._apply = _Refusal(_APPLY)  # type: ignore[method-assign]
            module.__getstate__ = _Refusal(_COPY, NotResidentError)  # type: ignore[method-assign]
            module.__prepare_scriptable__ = _Refusal(_SCRIPT)  # type: ignore[assignment]
            module._ddp_params_and_buffers_to_ignore = _Refusal(_WRAP)  # type: ignore[assignment]
            if composed is not None:
                module.__dict__[composed] = _RefusingDict()
        if any(slot_of(parameter) is not None for parameter in module.parameters(recurse=False)):
            # Not load_state_dict itself: a module around the model calls this one only.
            module._load_from_state_dict = _Refusal(_LOAD)  # type: ignore[method-assign]


def _composed_key() -> str | None:
    """Under which a module keeps what of `fully_shard` and alike was applied to it."""
    try:
        contract = importlib.import_module("torch.distributed._composable.contract")
    except ImportError:  # a build without torch.distributed
        return None
    return getattr(contract, "REGISTRY_KEY", None)


def refuse_tracing() -> None:
    """Raises ConfigError in ``torch.jit.trace``, which would make constants of the gathered weights."""
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(_SCRIPT)


class _Refusal:
    """Raises when it is called or iterated over."""

    def __init__(self, message: str, error: type[Exception] = ConfigError) -> None:
        self._message, self._error = message, error

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error(self._message)

    def __iter__(self) -> Iterator[Any]:
        self()

    def __deepcopy__(self, memo: object) -> NoReturn:
        """A copy of a module whose parameters happen to be gathered would else succeed, and run the original's
        forward.
        """
        raise NotResidentError(_COPY)


class _RefusingDict(dict[Any, Any]):
    def __contains__(self, key: object) -> bool:
        raise ConfigError(_WRAP)


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
