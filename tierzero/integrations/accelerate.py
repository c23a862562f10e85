"""Hugging Face Accelerate: its ``Accelerator`` for sharded models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import tierzero as tz
from tierzero.errors import ConfigError
from tierzero.integrations.sharded import is_sharded, refuse_other_optimizer, refuse_precision

_UNUSABLE = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
_STATE = "tierzero"
"""The checkpoint's name in the folder of a saved state."""


class TierZeroAccelerator(Accelerator):
    """`accelerate.Accelerator`, which leaves a sharded model as it is: `prepare` wraps it into nothing, clipping is
    `tierzero.clip_grad_norm_`, and `save_state` and `load_state` keep weights and optimizer state in a checkpoint of
    TierZero. Everything else is Accelerate's own.

    Raises ConfigError for what the sharded model decides itself: precision, compilation, FSDP, DeepSpeed.
    """

    _models: list[nn.Module]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not is_sharded(model):
            unsharded: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return unsharded
        self.check(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if any(is_sharded(model) for model in self._models):
            refuse_other_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def check(self, model: nn.Module) -> None:
        """Raises ConfigError for settings that cannot be had with ``model``."""
        kind = self.distributed_type.name
        if kind in _UNUSABLE:
            raise ConfigError(f"accelerate: distributed_type is {kind}; the model is sharded already, leave that out")
        dynamo = self.state.dynamo_plugin.backend.name
        if dynamo != "NO":
            raise ConfigError(
                f"accelerate: dynamo_backend is {dynamo}; compile the units with train.compile = true instead"
            )
        refuse_precision("accelerate: mixed_precision", self.mixed_precision, model)

    def clip_grad_norm_(
        self, parameters: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """As `tierzero.clip_grad_norm_`: the norm of the whole model, before clipping, over ranks and tiers."""
        given = parameters if isinstance(parameters, nn.Module) else list(parameters)
        if not isinstance(given, nn.Module) and not any(hasattr(parameter, "_tierzero") for parameter in given):
            unsharded: torch.Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
            return unsharded
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_: norm_type is {norm_type}; a sharded model is clipped by its 2-norm")
        return tz.clip_grad_norm_(given, max_norm)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        given = list(parameters)
        if any(hasattr(parameter, "_tierzero") for parameter in given):
            raise ConfigError("clip_grad_value_: a sharded model is clipped by its norm; use clip_grad_norm_")
        super().clip_grad_value_(given, clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """As `tierzero.full_state_dict`, which every rank must call."""
        found: dict[str, torch.Tensor] = (
            tz.full_state_dict(model) if is_sharded(model) else super().get_state_dict(model, unwrap)
        )
        return found

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        with self._sharded_apart() as (model, optimizer):
            folder = super().save_state(output_dir, *args, **kwargs)
            tz.save_checkpoint(model, optimizer, Path(folder) / _STATE)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        with self._sharded_apart() as (model, optimizer):
            if input_dir is None:
                raise ConfigError("load_state: name the folder that save_state returned")
            tz.load_checkpoint(model, optimizer, Path(input_dir).expanduser() / _STATE)
            return super().load_state(input_dir, *args, **kwargs)

    @contextmanager
    def _sharded_apart(self) -> Iterator[tuple[nn.Module, Any]]:
        """The sharded model and its optimizer, while Accelerate sees other models only."""
        everything = self._models
        sharded = [model for model in everything if is_sharded(model)]
        if len(sharded) != 1 or len(self._optimizers) != 1:
            raise ConfigError(
                f"accelerate: save_state and load_state are for one sharded model and its optimizer, and "
                f"{len(sharded)} and {len(self._optimizers)} are prepared; use tierzero.save_checkpoint for each"
            )
        self._models = [model for model in everything if not is_sharded(model)]
        try:
            yield sharded[0], self._optimizers[0]
        finally:
            self._models = everything
