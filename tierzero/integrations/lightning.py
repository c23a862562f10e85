"""Lightning Fabric: a strategy for sharded models."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

import tierzero as tz
from tierzero.errors import CheckpointError, ConfigError
from tierzero.integrations.sharded import is_sharded, refuse_other_optimizer, refuse_precision

_REST = "fabric"
"""In a checkpoint's ``extra``: what else `fabric.save` was given."""


class TierZeroStrategy(DDPStrategy):
    """A strategy of Lightning Fabric for a model that `tierzero.shard` has sharded: `fabric.setup` leaves it as it is,
    `fabric.clip_gradients` is `tierzero.clip_grad_norm_`, `fabric.save` and `fabric.load` are its
    checkpoints. Processes are
    started and joined as for "ddp", for one device too.

    Raises ConfigError for what the sharded model decides itself, such as precision.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _EveryBackward()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if not is_sharded(module):
            raise ConfigError("fabric.setup: the model is not sharded; call tierzero.shard(model, config) first")
        if type(self.precision) is not Precision:
            kind = type(self.precision).__name__
            raise ConfigError(
                f"Fabric: precision is {kind}; leave it out, train.precision of the sharded model decides"
            )
        refuse_precision("Fabric: precision", "no", module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        refuse_other_optimizer(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        if not is_sharded(module):
            super().module_to_device(module)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        if norm_type != 2:
            raise ConfigError(f"clip_gradients: norm_type is {norm_type}; a sharded model is clipped by its 2-norm")
        return tz.clip_grad_norm_(module, max_norm, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        raise ConfigError("clip_gradients: a sharded model is clipped by its norm; use max_norm")

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return tz.full_state_dict(module)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 (Fabric's name)
    ) -> None:
        """A checkpoint of TierZero, with all that is not the model and its optimizer inside: whole or not there."""
        model, optimizer, rest = _parted("fabric.save", state)
        if filter:
            raise ConfigError("fabric.save: filter is not for sharded models; use tierzero.full_state_dict")
        packed = io.BytesIO()
        torch.save(self._convert_stateful_objects_in_state(rest, filter={}), packed)
        tz.save_checkpoint(model, optimizer, path, extra={_REST: base64.b64encode(packed.getvalue()).decode()})

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns what ``state`` has no place for, like `fabric.load`."""
        model, optimizer, rest = _parted("fabric.load", state)
        packed = io.BytesIO(base64.b64decode(tz.load_checkpoint(model, optimizer, path)[_REST]))
        saved: dict[str, Any] = torch.load(packed, weights_only=weights_only is not False)
        for key, value in rest.items():
            if key not in saved:
                if strict:
                    raise CheckpointError(f"{path} has no {key!r}; leave it out of state, or pass strict=False")
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(saved.pop(key))
            else:
                state[key] = saved.pop(key)
        return saved


class _EveryBackward(_BackwardSyncControl):
    """Gradients accumulate in the tiers, reduced: there is nothing to put off."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _parted(call: str, state: Any) -> tuple[nn.Module, torch.optim.Optimizer | None, dict[str, Any]]:
    """The sharded model, its optimizer, and all else. Raises ConfigError where there is not one model."""
    named = state if isinstance(state, dict) else {}
    models = {key: value for key, value in named.items() if isinstance(value, nn.Module) and is_sharded(value)}
    optimizers = {key: value for key, value in named.items() if isinstance(value, tz.AdamW | tz.Adam)}
    if len(models) != 1 or len(optimizers) > 1:
        raise ConfigError(
            f"{call}: state has {len(models)} sharded models and {len(optimizers)} optimizers; give a dict with one "
            "model and its optimizer, or use tierzero.save_checkpoint and tierzero.load_checkpoint"
        )
    rest = {key: value for key, value in named.items() if key not in models and key not in optimizers}
    return next(iter(models.values())), next(iter(optimizers.values()), None), rest
