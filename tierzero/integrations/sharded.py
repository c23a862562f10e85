"""What the integrations ask about a sharded model, and refuse alike."""

from __future__ import annotations

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.optim.optimizer import Adam, AdamW
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.state import slot_of


def is_sharded(model: nn.Module) -> bool:
    return any(slot_of(parameter) is not None for parameter in model.parameters())


def refuse_other_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError unless it is TierZero's, in a library's wrapper or not."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Adam | AdamW):
        kind = type(inner)
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} cannot train a sharded model; use tierzero.AdamW or tierzero.Adam"
        )


def refuse_precision(setting: str, wanted: str | None, model: nn.Module) -> None:
    """Raises ConfigError where a library is asked for another precision than the model was sharded with, and for fp16,
    whose loss scale a library would not apply to gradients that are in the tiers. ``wanted``: "no", "bf16", "fp16".
    """
    runtime = runtime_of(model)
    if _computes_in(runtime, torch.float16):
        raise ConfigError(
            'train.precision = "fp16" needs tierzero.LossScaler around the loss, which this loop does not call; use '
            '"bf16", or a loop of your own'
        )
    if wanted not in (None, "no") and not (wanted == "bf16" and _computes_in(runtime, torch.bfloat16)):
        raise ConfigError(
            f"{setting} is {wanted!r}; a sharded model computes in the precision it was sharded with: leave it out and "
            'set train.precision = "bf16"'
        )


def _computes_in(runtime: Runtime, dtype: torch.dtype) -> bool:
    return any(group.layout.dtype is dtype and group.fmt is not None for group in runtime.groups())
