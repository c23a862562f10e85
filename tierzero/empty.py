"""Building a model whose parameters take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tierzero.errors import ConfigError


@contextmanager
def empty_init() -> Iterator[None]:
    """Inside, modules register their parameters without memory (on the meta device); buffers are built as usual.

    ``tierzero.shard`` fills the model afterwards, one unit at a time. The parameter objects stay the same, so tied
    weights stay tied. Nesting is harmless.
    """
    original, original_load = nn.Module.register_parameter, nn.Module._load_from_state_dict

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:
            # The values the constructor allocated were never touched, so they never took memory either.
            give_memory(param, param.detach().to("meta"))

    def refuse_loading(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(parameter is not None and parameter.is_meta for parameter in self._parameters.values()):
            raise ConfigError(
                "load_state_dict inside tierzero.empty_init: the parameters are empty and would not take the values; "
                "give tierzero.shard init=<folder of safetensors>, or build the model as usual"
            )
        original_load(self, *args, **kwargs)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    nn.Module._load_from_state_dict = refuse_loading  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        nn.Module._load_from_state_dict = original_load  # type: ignore[method-assign]


def give_memory(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Exchanges what the parameter is over, on whatever device; its class, its attributes and its hooks stay."""
    kind, attributes, hooks = type(parameter), parameter.__dict__, parameter._backward_hooks
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    parameter.__class__ = kind
    parameter.__dict__ = attributes
    if hooks:
        parameter._backward_hooks = hooks
