"""PEFT: adapters of sharded models, to and from PEFT's own files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

import tierzero as tz
from tierzero.errors import ConfigError
from tierzero.runtime.runtime import runtime_of
from tierzero.runtime.safetensors_folder import SafetensorsFolder


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """What PEFT saves of all the model's adapters, whole, in host memory, under the model's names: the ``state_dict``
    of ``model.save_pretrained`` and of ``get_peft_model_state_dict``. The base is not read. Every rank must call it.
    """
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    wanted: set[int] = set()
    for adapter in model.peft_config:
        chosen = get_peft_model_state_dict(model, state_dict=named | buffers, adapter_name=adapter)
        wanted |= {id(value) for value in chosen.values()}
    names = [name for name, parameter in named.items() if id(parameter) in wanted]
    state = dict(zip(names, tz.read_state([named[name] for name in names], "weight"), strict=True))
    return state | {name: value.detach().cpu() for name, value in buffers.items() if id(value) in wanted}


def save_adapters(model: PeftModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """``model.save_pretrained(folder, **options)`` for a sharded model: every rank must call it, rank 0 writes."""
    rank = runtime_of(model).world.rank
    model.save_pretrained(str(folder), state_dict=adapter_state(model), is_main_process=rank == 0, **options)


def load_adapter(model: PeftModel, folder: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Takes the weights of an adapter that the sharded model has from a folder that PEFT has written. Every rank must
    call it. Moments and step counts stay as they are.

    Raises ConfigError, before anything is changed, for an adapter that the model lacks (one cannot be added to a
    sharded model) and for a folder that does not have all of its weights.
    """
    if adapter_name not in model.peft_config:
        known = ", ".join(map(repr, model.peft_config))
        raise ConfigError(f"load_adapter: the model has no adapter {adapter_name!r}, only {known}; add it before shard")
    taken: dict[str, torch.Tensor] = {}

    def take(state: Mapping[str, torch.Tensor], **_: Any) -> Any:
        taken.update(state)
        return nn.modules.module._IncompatibleKeys([], [])

    # PEFT knows what the adapter's weights are called in the model, whose names and shapes it asks for. What it would
    # load is taken instead.
    model.load_state_dict = take
    model.state_dict = functools.partial(type(model).state_dict, model, keep_vars=True)
    try:
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), adapter_name)
    finally:
        del model.load_state_dict, model.state_dict
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lacking = [name for name in _names_of(model, adapter_name) if name not in taken]
    unknown = [name for name in taken if name not in parameters]
    if lacking or unknown:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {unknown[0]!r}, which the model lacks"
        raise ConfigError(f"load_adapter: {folder} {what}; it is of another adapter or model")
    tz.write_state([parameters[name] for name in taken], "weight", list(taken.values()))


def init_base(model: PeftModel, folder: str | os.PathLike[str]) -> Callable[[nn.Module], None]:
    """For ``init`` of `tierzero.shard`, of LoRA over a base that was built under `tierzero.empty_init`: the base's
    weights from the safetensors files in ``folder``, a unit at a time, adapters as PEFT begins them.

    Raises ConfigError for adapters that begin from the base's weights.
    """
    for adapter, config in model.peft_config.items():
        if getattr(config, "init_lora_weights", None) not in (True, False, "gaussian"):
            raise ConfigError(f"init_base: adapter {adapter!r} needs its base to begin from; build the base in memory")
    source = SafetensorsFolder(Path(folder))
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for child, parameter in module.named_parameters(names[module], recurse=False):
            name = child.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if not parameter.is_meta and source.holds(name):  # empty: it is not its unit's turn
                parameter.copy_(source.tensor(name))
        if isinstance(module, LoraLayer):
            for adapter in (*module.lora_A, *module.lora_embedding_A):
                module.reset_lora_parameters(adapter, model.peft_config[adapter].init_lora_weights)

    return fill


def _names_of(model: PeftModel, adapter: str) -> list[str]:
    """Parameters that PEFT saves of one adapter."""
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    wanted = {id(value) for value in get_peft_model_state_dict(model, state_dict=named, adapter_name=adapter).values()}
    return [name for name, parameter in named.items() if id(parameter) in wanted]
