"""Gradient accumulation fused with the sum of squares that the global norm needs.

The sum has one value for given elements, whatever the number of threads, tiles or the machine: the elements are taken
in blocks of ``BLOCK`` from the start of the fragment; within a block element ``k`` adds its square, exact in fp64, to
lane ``k % LANES``; the upper half of the lanes is added to the lower half until one is left; then the blocks are added
in order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from tierzero.optim.formats import check_vector
from tierzero.optim.kernel import GRAD_DTYPES, raw

BLOCK = 4096
"""Elements of one block: where threads may split a fragment, and where a caller may without changing the block sums."""


def accumulate(
    dst: torch.Tensor, src: torch.Tensor, *, overwrite: bool, threads: int = 1, executor: Executor | None = None
) -> float:
    """Add ``src`` to ``dst`` in place, or copy it there, and return the sum of squares of the resulting ``dst``.

    Both are contiguous 1-D host tensors of one length, each bf16, fp16 or fp32, and do not overlap. With ``overwrite``
    it is ``dst.copy_(src)``, without ``dst.add_(src)``: added in fp32, rounded once to dst's dtype, to nearest with
    ties to even. The result equals PyTorch's bit for bit (a NaN is a NaN). The returned sum is fp64 and independent of
    ``threads``; it is finite exactly if every element of ``dst`` is.

    ``threads`` > 1 splits the work on block boundaries over that many threads, the calling one among them; the others
    come from ``executor``, or are started for this call. Call it from a thread that is not the executor's own: it
    waits.

    Raises ``ValueError`` for tensors that do not fit, before anything is changed.
    """
    _check("dst", dst, dst.numel())
    _check("src", src, dst.numel())
    from tierzero.optim import loops

    function = loops.copy_sum_squares if overwrite else loops.add_sum_squares
    return _run(function, (raw(dst), raw(src)), threads, executor)


def sum_of_squares(x: torch.Tensor, *, threads: int = 1, executor: Executor | None = None) -> float:
    """Return the sum of squares of ``x`` in fp64: the value that ``accumulate`` returns when it leaves ``x`` in
    ``dst``.

    ``x`` is a contiguous 1-D host tensor of bf16, fp16 or fp32; ``threads`` and ``executor`` as there.
    """
    _check("x", x, x.numel())
    from tierzero.optim import loops

    return _run(loops.sum_squares, (raw(x),), threads, executor)


def warm_up(dst_dtype: torch.dtype, src_dtype: torch.dtype) -> None:
    """Compile what ``accumulate`` and ``sum_of_squares`` need for these dtypes, or load it from the cache."""
    dst, src = torch.zeros(1, dtype=dst_dtype, device="cpu"), torch.zeros(1, dtype=src_dtype, device="cpu")
    accumulate(dst, src, overwrite=True)
    accumulate(dst, src, overwrite=False)
    sum_of_squares(dst)


def _run(function: Any, arrays: tuple[np.ndarray[Any, Any], ...], threads: int, executor: Executor | None) -> float:
    from tierzero.optim import loops

    key = (function, *(array.dtype for array in arrays))
    if key not in _warm:
        _compile(function, arrays)
        _warm.add(key)
    blocks = -(-arrays[0].size // BLOCK)
    sums = np.empty(blocks)
    per_thread = max(1, -(-blocks // max(1, threads)))

    def work(first: int) -> None:
        last = min(first + per_thread, blocks)
        function(*(array[first * BLOCK : last * BLOCK] for array in arrays), sums[first:last])

    starts = range(0, blocks, per_thread)
    if len(starts) <= 1:
        function(*arrays, sums)
    elif executor is not None:
        _fan_out(executor, work, starts)
    else:
        with ThreadPoolExecutor(len(starts) - 1) as pool:
            _fan_out(pool, work, starts)
    return float(loops.ordered_sum(sums))


_warm: set[Any] = set()


def _compile(function: Any, arrays: tuple[np.ndarray[Any, Any], ...]) -> None:
    from tierzero.optim import jit, loops

    sums = jit.array_type(np.dtype(np.float64))
    jit.compile_for(function, (*(jit.array_type(array.dtype) for array in arrays), sums))
    jit.compile_for(loops.ordered_sum, (sums,))


def _fan_out(executor: Executor, work: Callable[[int], None], starts: range) -> None:
    others = [executor.submit(work, start) for start in starts[1:]]
    try:
        work(starts[0])
    finally:
        wait(
            others
        )  # the caller's buffers are free to reuse once this returns or raises: no thread may still write there
    for future in others:
        future.result()


def _check(name: str, tensor: torch.Tensor, length: int) -> None:
    if tensor.dtype not in GRAD_DTYPES or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a bf16, fp16 or fp32 host tensor, not {tensor.dtype} on {tensor.device}")
    check_vector(name, tensor, tensor.dtype, length)
