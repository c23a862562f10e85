"""Which models can be sharded: refused by the parameter's name, before anything is allocated."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tierzero.errors import ConfigError
from tierzero.runtime.draft import DTYPES
from tierzero.runtime.paged import refuse_accumulate_hook
from tierzero.runtime.state import slot_of


def check_model(model: nn.Module) -> None:
    """Raises ConfigError for a model without parameters, one that is sharded already, and by name for parameters that
    the tiers cannot hold.
    """
    parameters = list(model.parameters())
    if not parameters:
        raise ConfigError("shard: the model has no parameters")
    if any(slot_of(parameter) is not None for parameter in parameters):
        raise ConfigError("shard: the model is sharded already")
    for name, parameter in model.named_parameters():
        _check_kind(name, parameter)
        if parameter.grad is not None:
            raise ConfigError(f"shard: parameter {name!r} has a gradient; call model.zero_grad() before tierzero.shard")
        _check_dtype(name, parameter)
        if parameter._post_accumulate_grad_hooks:
            refuse_accumulate_hook(name)
    _check_memory(model)


def _check_kind(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ConfigError(
            f"shard: parameter {name!r} has no shape yet (a lazy module); run the model once before tierzero.shard"
        )
    wrapper = is_traceable_wrapper_subclass(parameter)
    if wrapper or parameter.layout is not torch.strided or parameter.is_quantized or parameter.is_nested:
        special = {"quantized": parameter.is_quantized, "nested": parameter.is_nested}
        kinds: list[object] = [type(parameter).__name__] if wrapper else [kind for kind, it in special.items() if it]
        raise ConfigError(
            f"shard: parameter {name!r} is no plain dense tensor ({(kinds or [parameter.layout])[0]}); make it one, or "
            "a buffer, before tierzero.shard"
        )


def _check_dtype(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype.is_complex:
        raise ConfigError(f"shard: parameter {name!r} is {parameter.dtype}; complex parameters are not supported")
    if parameter.requires_grad and parameter.dtype not in DTYPES.values():
        raise ConfigError(
            f"shard: parameter {name!r} is {parameter.dtype} and trainable; use bfloat16, float16 or float32, or "
            f"freeze it"
        )


def _check_memory(model: nn.Module) -> None:
    """Parameters that are tied only by lying in the same memory would part: each gets a place of its own."""
    placed = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name, parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and parameter.numel() and parameter.is_contiguous()
    )
    for (_, stop, first, trained), (start, _, second, also) in itertools.pairwise(placed):
        if start < stop and (trained or also):
            raise ConfigError(
                f"shard: parameters {first!r} and {second!r} lie in the same memory but are two; tie them by assigning "
                "one parameter to both modules, or give each values of its own"
            )
