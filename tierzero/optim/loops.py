"""The compiled loops over state and gradients. Importing this imports Numba; ``kernel`` and ``gradient`` do so on first
use.

Arrays are 1-D, contiguous, of one length, and never overlap. ``bits`` says how their dtypes are read: a gradient is
uint16 (bf16 bits), int16 (fp16 bits) or float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from tierzero.optim.bits import (
    bits_float,
    chance_of,
    float_bits,
    float_to_fp16,
    join_bits,
    narrow,
    narrow_by_chance,
    split_float,
    widen,
)
from tierzero.optim.jit import loop

BLOCK = 4096
"""Elements whose squares are summed together; see ``gradient``."""
LANES = 128
"""Partial sums within a block: element ``k`` of a block goes to lane ``k % LANES``."""


class Masks(NamedTuple):
    """The conditions of ``AdamScalars`` as ``numpy.uint32``, all bits set or none.

    Arguments, not an ``if`` on a scalar: that becomes a branch inside the vector loop. The usual case (no L2, beta1 >
    0.5) passes None instead and compiles to a loop without them.
    """

    l2: Any
    from_m: Any


@register_jitable
def _pick(mask: Any, yes: Any, no: Any) -> Any:
    return bits_float((float_bits(yes) & mask) | (float_bits(no) & ~mask))


@register_jitable
def _flush(x: Any) -> Any:
    """A subnormal becomes +0, and -0 too."""
    return np.float32(0) if float_bits(x) & np.uint32(0x7F800000) == np.uint32(0) else x


@register_jitable
def adam(w: Any, m: Any, v: Any, g: Any, s: Any, masks: Any) -> Any:
    """New w, m, v as fp32: the order of operations of ``AdamScalars``. ``masks`` are its conditions."""
    origin = m
    if masks is not None:
        g = _pick(masks.l2, g + s.l2 * w, g)
        origin = _pick(masks.from_m, m, g)
    w = w * s.decay
    m = _flush(origin + s.lerp * (g - m))
    v = _flush(v * s.beta2 + (s.one_minus_beta2 * g) * g)
    w = w - (s.step_size * m) / (math.sqrt(v) * s.inv_sqrt_bias2 + s.eps)
    return w, m, v


@register_jitable
def _update(w: Any, m: Any, v: Any, grad: Any, scale: Any, s: Any, masks: Any, seed: Any) -> Any:
    """One element: new w as float32, new m and v as they are stored."""
    w_i, m_i, v_i = adam(w, widen(m), widen(v), widen(grad) * scale, s, masks)
    return w_i, narrow(m_i, m), narrow_by_chance(v_i, v, chance_of(m_i, v_i, seed))


@loop
def adam_bf16(hi: Any, lo: Any, m: Any, v: Any, grad: Any, scale: Any, s: Any, masks: Any, seed: Any) -> None:
    """Update hi (uint16), lo (int16), m and v (float32, or uint16: bf16 bits) in place."""
    for i in range(hi.size):
        w = bits_float(join_bits(hi[i], lo[i]))
        w, m[i], v[i] = _update(w, m[i], v[i], grad[i], scale, s, masks, seed)
        upper, lower = split_float(w)
        hi[i] = upper
        lo[i] = lower


@loop
def adam_fp32(w: Any, m: Any, v: Any, grad: Any, scale: Any, s: Any, masks: Any, seed: Any) -> None:
    """Update w (float32), m and v (float32, or uint16: bf16 bits) in place."""
    for i in range(w.size):
        w[i], m[i], v[i] = _update(w[i], m[i], v[i], grad[i], scale, s, masks, seed)


@loop
def adam_fp16(weight: Any, master: Any, m: Any, v: Any, grad: Any, scale: Any, s: Any, masks: Any, seed: Any) -> None:
    """Update master (float32), m and v (float32, or uint16: bf16 bits) in place and write the new master to weight
    (int16: fp16 bits).
    """
    for i in range(master.size):
        w, m[i], v[i] = _update(master[i], m[i], v[i], grad[i], scale, s, masks, seed)
        weight[i] = float_to_fp16(w)
        master[i] = w


# Slices below, not offsets: for an index that may be negative, as any sum of two may, Numba adds a test to each access.


@register_jitable
def _add_squares(x: Any, lanes: Any) -> None:
    for i in range(x.size):
        value = np.float64(widen(x[i]))
        lanes[i] += value * value


@register_jitable
def _block_sum(x: Any, lanes: Any) -> Any:
    """Sum of squares of one block; ``lanes`` is scratch, float64[LANES]."""
    lanes[:] = 0.0
    for row in range(x.size // LANES):
        _add_squares(x[row * LANES : (row + 1) * LANES], lanes)
    _add_squares(x[x.size - x.size % LANES :], lanes)
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@loop
def sum_squares(x: Any, block_sums: Any) -> None:
    """Write the sum of squares of each block of ``x`` to ``block_sums`` (float64[ceil(n / BLOCK)])."""
    lanes = np.empty(LANES, np.float64)
    for block in range(block_sums.size):
        block_sums[block] = _block_sum(x[block * BLOCK : (block + 1) * BLOCK], lanes)


# A block of dst stays in the first-level cache between storing and squaring: two plain loops, each vectorised, and
# still one pass over memory.


@register_jitable
def _copy(dst: Any, src: Any) -> None:
    for i in range(dst.size):
        dst[i] = narrow(widen(src[i]), dst[i])


@register_jitable
def _add(dst: Any, src: Any) -> None:
    for i in range(dst.size):
        dst[i] = narrow(widen(dst[i]) + widen(src[i]), dst[i])


@loop
def copy_sum_squares(dst: Any, src: Any, block_sums: Any) -> None:
    """``dst = src`` in dst's dtype, and the sums of squares of the result as ``sum_squares`` gives them."""
    lanes = np.empty(LANES, np.float64)
    for block in range(block_sums.size):
        part = dst[block * BLOCK : (block + 1) * BLOCK]
        _copy(part, src[block * BLOCK : (block + 1) * BLOCK])
        block_sums[block] = _block_sum(part, lanes)


@loop
def add_sum_squares(dst: Any, src: Any, block_sums: Any) -> None:
    """``dst = dst + src``, added in fp32 and rounded once, and the sums of squares of the result."""
    lanes = np.empty(LANES, np.float64)
    for block in range(block_sums.size):
        part = dst[block * BLOCK : (block + 1) * BLOCK]
        _add(part, src[block * BLOCK : (block + 1) * BLOCK])
        block_sums[block] = _block_sum(part, lanes)


@loop
def ordered_sum(values: Any) -> float:
    """Sum of float64 values, first to last (Python's ``sum`` compensates from 3.12 on, not before)."""
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total
