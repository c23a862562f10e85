"""Transforms of ``torch.func`` (vmap, jvp, grad) around a sharded model: what the runtime does itself is no part of
them. Inside one every operation gives a tensor of the transform, which must not become the values of a parameter.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tierzero.errors import ConfigError


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, operations are ordinary ones."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def require_hooks(unit: str) -> None:
    """Raises ConfigError where autograd records without hooks, by which saved weights are paged in again."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        raise ConfigError(
            f"unit {unit!r} cannot be differentiated by torch.func.grad, vjp, jacrev or hessian, which allow no hooks "
            "on saved tensors; use torch.autograd.grad or torch.autograd.functional (vmap, jvp and jacfwd work)"
        )


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor that a transform's tensor stands for."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
