"""Clipping by the global norm, over ranks and tiers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.optim.owner import owner_of, owner_of_all


@out_of_graphs
def clip_grad_norm_(
    model: nn.Module | Iterable[torch.Tensor], max_norm: float, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales the gradients of a sharded model so that their global 2-norm is at most ``max_norm``.

    In place of the model all its parameters may be given, as to PyTorch's function; a part of them is refused.
    Call it after the last backward of a step, on every rank. Returns the norm *before* clipping as a 0-dim fp32
    tensor, as ``torch.nn.utils.clip_grad_norm_`` does. The scaling itself is part of the update; gradients are not
    touched twice.

    Raises ConfigError for a ``max_norm`` that is not a positive number, and for a model whose updates run beside the
    backward. With ``error_if_nonfinite`` a norm that is not finite raises RuntimeError.
    """
    if not isinstance(max_norm, int | float) or isinstance(max_norm, bool) or not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: max_norm is {max_norm!r}; it must be a number above 0")
    norm = (owner_of(model) if isinstance(model, nn.Module) else owner_of_all(model)).clip(float(max_norm))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"clip_grad_norm_: the gradients' norm is {norm}")
    return torch.tensor(norm, dtype=torch.float32, device="cpu")
