"""The Adam update of state in host memory: one compiled pass over weight, optimizer segments and gradient.

Numba is imported by the first call, not by importing this module: it costs as much as a third of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tierzero.errors import ConfigError
from tierzero.optim.formats import StateFormat, check_state, check_vector
from tierzero.optim.hyper import AdamHyper, AdamScalars

GRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a gradient may be made of, for any state format."""


def update(
    fmt: StateFormat,
    weight: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    hyper: AdamHyper,
    grad_scale: float = 1.0,
) -> None:
    """Update ``weight`` and the segments ``parts`` in place; bit for bit what ``reference.update_reference`` does.

    All tensors are contiguous, 1-D, of one length and in host memory, and do not overlap; zero elements and any
    alignment are fine. ``weight`` is of ``fmt.weight_dtype``, ``parts`` has the format's segments by name, ``grad`` is
    bf16, fp16 or fp32 and is left as it is. ``grad_scale`` is rounded to fp32 and multiplied to each gradient first:
    unscaling, averaging and clipping in one factor. Runs on the calling thread without the GIL; threads may update
    disjoint slices at the same time.

    Raises ``ValueError`` for tensors that do not fit the format, before anything is changed.
    """
    segments = tuple(segment.name for segment in fmt.optimizer)
    check_state(fmt, weight, parts, segments)
    _check_grad_dtype(grad.dtype)
    check_vector("grad", grad, grad.dtype, weight.numel())
    for name, tensor in (("weight", weight), ("grad", grad), *parts.items()):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is on {tensor.device}: the kernel updates host memory, use update_reference there"
            )
    warm_up(fmt, grad.dtype)
    arrays = [raw(weight), *(raw(parts[name]) for name in segments), raw(grad)]
    _loop(fmt)(*arrays, np.float32(grad_scale), _as_fp32(hyper.scalars()))


def warm_up(fmt: StateFormat, grad_dtype: torch.dtype) -> None:
    """Compile the loop for this format and gradient dtype, or load it from the cache, unless that is done.

    Call it from a background thread to hide the compilation; an ``update`` that needs the same loop meanwhile waits for
    it.
    """
    _check_grad_dtype(grad_dtype)
    if (fmt.name, grad_dtype) in _warm:
        return
    from numba import types

    from tierzero.optim import jit

    dtypes = (fmt.weight_dtype, *(segment.dtype for segment in fmt.optimizer), grad_dtype)
    arrays = (jit.array_type(raw(torch.empty(0, dtype=dtype)).dtype) for dtype in dtypes)
    jit.compile_for(_loop(fmt), (*arrays, types.float32, jit.scalars_type(AdamScalars)))
    _warm.add((fmt.name, grad_dtype))


_warm: set[tuple[str, torch.dtype]] = set()


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a host tensor as the loops take it: bf16 as uint16, fp16 as int16, fp32 as it is."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


def _as_fp32(scalars: AdamScalars) -> AdamScalars:
    """The loops compute in the type of their arguments."""
    return AdamScalars._make(np.float32(value) for value in scalars)


def _loop(fmt: StateFormat) -> Any:
    from tierzero.optim import loops

    return getattr(loops, f"adam_{fmt.name}")


def _check_grad_dtype(dtype: torch.dtype) -> None:
    if dtype not in GRAD_DTYPES:
        raise ConfigError(
            f"gradients of dtype {dtype} are not supported: use torch.bfloat16, torch.float16 or torch.float32"
        )
