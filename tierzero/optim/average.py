"""The exponential moving average of the weights: one more fp32 segment, moved after each update.

``ema = ema + rate * (master - ema)``, every operation rounded to fp32 and none fused, with ``rate`` = 1 - decay. The
master is what the update has just made it; nothing else of the state is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tierzero.optim.formats import StateFormat, check_state, load_master, master_segments, store_master
from tierzero.optim.kernel import raw

_CHUNK = 4 << 20
"""Elements at a time outside the compiled loops: bounds the temporaries to a few such chunks."""


def rate_of(decay: float) -> float:
    """How far an average moves: 1 - ``decay``, rounded once to fp32."""
    return float(np.float32(1.0 - decay))


def move_average(fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], rate: float) -> None:
    """Move ``parts["ema"]`` in place; bit for bit what `move_average_reference` does.

    Tensors as for `tierzero.optim.kernel.update`, in host memory. Runs on the calling thread without the GIL. Raises
    ``ValueError`` for tensors that do not fit the format.
    """
    names = master_segments(fmt)
    check_state(fmt, weight, parts, (*names, "ema"))
    # The weight is a part of the master unless the master is stored whole beside it.
    master = [parts[name] for name in names] if names == ("master",) else [weight, *(parts[name] for name in names)]
    _loop(len(master))(*map(raw, (*master, parts["ema"])), np.float32(rate))


def move_average_reference(
    fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], rate: float
) -> None:
    """The same in plain PyTorch: for state that lives on an accelerator, and the oracle of the tests."""
    check_state(fmt, weight, parts, (*master_segments(fmt), "ema"))
    with torch.no_grad():
        for piece, master in _masters(fmt, weight, parts):
            ema = parts["ema"][piece]
            ema.add_(master.sub_(ema).mul_(rate))


def begin_average(fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
    """Makes the average, where the format has one, equal to a master that has just got its values."""
    if fmt.is_averaged:
        for piece, master in _masters(fmt, weight, parts):
            parts["ema"][piece] = master


def exchange_average(fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
    """Master and average change places; the weight follows the master.

    Done twice, every bit is as before. Only NaNs lose something, the lower half of their payload in a split master.
    """
    for piece, master in _masters(fmt, weight, parts):
        own = {name: parts[name][piece] for name in master_segments(fmt)}
        store_master(fmt, parts["ema"][piece], weight[piece], own)
        parts["ema"][piece] = master


def warm_up(fmt: StateFormat) -> None:
    """Compile the loop of `move_average` for this format, or load it from the cache."""
    _loop(2 if fmt.name == "bf16" else 1)


@functools.cache
def _loop(arrays: int) -> Any:
    """For a master of so many arrays."""
    from numba import types

    from tierzero.optim import average_loops, jit

    fp32, hi, lo = (jit.array_type(np.dtype(dtype)) for dtype in (np.float32, np.uint16, np.int16))
    loop, master = (average_loops.average_split, (hi, lo)) if arrays == 2 else (average_loops.average_whole, (fp32,))
    jit.compile_for(loop, (*master, fp32, types.float32))
    return loop


def _masters(
    fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces, and for each its master in a tensor of its own."""
    for start in range(0, weight.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        own = {name: parts[name][piece] for name in master_segments(fmt)}
        yield piece, load_master(fmt, weight[piece], own)
