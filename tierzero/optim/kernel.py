"""The Adam update of state in host memory: one compiled pass over weight, optimizer segments and gradient.

Numba is imported by the first call, not by importing this module: it costs as much as a third of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from tierzero.errors import ConfigError
from tierzero.optim.formats import Moments, StateFormat, check_state, check_vector
from tierzero.optim.hyper import AdamHyper, AdamScalars
from tierzero.optim.moments import seed_of

if TYPE_CHECKING:
    from tierzero.optim.loops import Masks

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

    All tensors are contiguous, 1-D, of the format's lengths and in host memory, and do not overlap; zero elements and
    any alignment are fine. They begin at a multiple of ``fmt.block`` in their parameter. ``weight`` is of
    ``fmt.weight_dtype``, ``parts`` has the segments ``fmt.updated`` by name, ``grad`` is bf16, fp16 or fp32 and is left
    as it is. ``grad_scale`` is rounded to fp32 and multiplied to each gradient first: unscaling, averaging and clipping
    in one factor. Runs on the calling thread without the GIL; threads may update disjoint slices at the same time.

    Raises ``ValueError`` for tensors that do not fit the format, before anything is changed.
    """
    usual = _arguments(hyper)[1] is None
    loop = _loops.get((fmt.name, fmt.moments, grad.dtype, usual))
    if loop is None:
        warm_up(fmt, grad.dtype, hyper)
        loop = _loops[fmt.name, fmt.moments, grad.dtype, usual]
    tensors = _checked(fmt, weight, parts, grad)
    arguments = (np.float32(grad_scale), *_arguments(hyper))
    rest = weight.numel() % fmt.block
    if rest:
        tensors = _update_rest(fmt, loop, tensors, rest, arguments)
    loop(*map(raw, tensors), *arguments)


def _update_rest(
    fmt: StateFormat, loop: Any, tensors: list[torch.Tensor], rest: int, arguments: tuple[Any, ...]
) -> list[torch.Tensor]:
    """Updates the last ``rest`` elements, which are no whole block, with zeros behind them. Returns what is left."""
    lengths = (1, *[segment.per for segment in fmt.updated], 1)
    ends = [tensor[tensor.numel() - -(-rest // per) :] for tensor, per in zip(tensors, lengths, strict=True)]
    blocks = [tensor.new_zeros(fmt.block // per) for tensor, per in zip(tensors, lengths, strict=True)]
    for block, end in zip(blocks, ends, strict=True):
        block[: end.numel()] = end
    loop(*map(raw, blocks), *arguments)
    for block, end in zip(blocks[:-1], ends[:-1], strict=True):
        end.copy_(block[: end.numel()])
    return [tensor[: tensor.numel() - end.numel()] for tensor, end in zip(tensors, ends, strict=True)]


def _checked(
    fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The loop's tensors in its order, or the ``ValueError`` of ``update``.

    One look at each, what is wrong is found out after: an update of a tile takes a few hundred microseconds, and this
    code has fallen out of the caches since the last one.
    """
    segments = fmt.updated
    try:
        tensors = [weight, *[parts[segment.name] for segment in segments], grad]
    except KeyError:
        tensors = []
    dtypes = (fmt.weight_dtype, *[segment.dtype for segment in segments], grad.dtype)
    length = weight.numel()
    lengths = (length, *[segment.values(length) for segment in segments], length)
    fit = [
        tensor.shape == (wanted,) and tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu
        for tensor, dtype, wanted in zip(tensors, dtypes, lengths, strict=False)
    ]
    if not (tensors and all(fit)):
        _refuse(fmt, weight, parts, grad)
    return tensors


def _refuse(fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], grad: torch.Tensor) -> NoReturn:
    check_state(fmt, weight, parts, tuple(segment.name for segment in fmt.updated))
    check_vector("grad", grad, grad.dtype, weight.numel())
    for name, tensor in (("weight", weight), ("grad", grad), *parts.items()):
        if not tensor.is_cpu:
            raise ValueError(
                f"{name} is on {tensor.device}: the kernel updates host memory, use update_reference there"
            )
    raise AssertionError("these tensors fit")


def warm_up(fmt: StateFormat, grad_dtype: torch.dtype, hyper: AdamHyper | None = None) -> None:
    """Compile the loop for this format and gradient dtype, or load it from the cache, unless that is done.

    ``hyper`` is an example of the updates to come: L2 weight decay, and beta1 of 0.5 or less, have a loop of their own.
    Call it from a background thread to hide the compilation; an ``update`` that needs the same loop meanwhile waits for
    it.
    """
    _check_grad_dtype(grad_dtype)
    usual = hyper is None or _arguments(hyper)[1] is None
    key = (fmt.name, fmt.moments, grad_dtype, usual)
    if key in _loops:
        return
    from numba import types

    from tierzero.optim import jit, loops, loops_int8
    from tierzero.optim.loops import Masks

    dtypes = (fmt.weight_dtype, *(segment.dtype for segment in fmt.updated), grad_dtype)
    arrays = (jit.array_type(raw(torch.empty(0, dtype=dtype, device="cpu")).dtype) for dtype in dtypes)
    masks = types.none if usual else jit.tuple_type(Masks, np.uint32)
    loop = getattr(loops_int8, f"adam_{fmt.name}_int8") if fmt.block > 1 else getattr(loops, f"adam_{fmt.name}")
    scalars = jit.tuple_type(AdamScalars, np.float32)
    jit.compile_for(loop, (*arrays, types.float32, scalars, masks, types.uint32))
    _loops[key] = loop


_loops: dict[tuple[str, Moments, torch.dtype, bool], Any] = {}
"""Compiled loops by format name, moments, gradient dtype, and whether the update is the usual one (see
``loops.Masks``).
"""


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a host tensor as the loops take it: bf16 as uint16, fp16 as int16, all else as it is."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


@lru_cache(maxsize=64)  # a step's tiles share a few sets of hyperparameters
def _arguments(hyper: AdamHyper) -> tuple[AdamScalars, Masks | None, np.uint32]:
    """The scalars as numpy.float32, in which the loops compute, their conditions, and the seed of chance."""
    from tierzero.optim.loops import Masks

    exact = hyper.scalars()
    scalars = AdamScalars._make(np.float32(value) for value in exact)
    seed = np.uint32(seed_of(hyper.step))
    conditions = (exact.l2 != 0.0, exact.lerp > 0.0)
    if conditions == (False, True):
        return scalars, None, seed
    return scalars, Masks._make(np.uint32(0xFFFFFFFF if condition else 0) for condition in conditions), seed


def _check_grad_dtype(dtype: torch.dtype) -> None:
    if dtype not in GRAD_DTYPES:
        raise ConfigError(
            f"gradients of dtype {dtype} are not supported: use torch.bfloat16, torch.float16 or torch.float32"
        )
