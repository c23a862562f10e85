"""The compiled loops over state with int8 moments, a block of 128 elements at a time: `tierzero.optim.moments` says how
they are stored, and has the same arithmetic in PyTorch.

Each block goes through a few short loops and stays in the first-level cache meanwhile. They are short because LLVM
gives up vectorising a loop of which it would have to check that many arrays do not overlap, and of a length that it
knows; and called by the loop over the blocks itself, with scratch that it has made, which was a quarter faster than a
function for a block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from tierzero.optim.bits import bits_float, chance_of, float_bits, float_to_fp16, join_bits, split_float, widen
from tierzero.optim.formats import BLOCK
from tierzero.optim.jit import loop
from tierzero.optim.loops import adam
from tierzero.optim.moments import LEAST_ROOT

_LEAST_ROOT = np.float32(LEAST_ROOT)
_PER_127 = np.float32(1) / np.float32(127)
_PER_65025 = np.float32(1) / np.float32(65025)
_UNIT = np.float32(2.0**-24)
_ROUNDS = np.float32(3 << 22)
"""Added to a float32 of at most 2**21 and taken away again, it leaves the nearest integer, ties to even."""
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@register_jitable
def _level(code: Any) -> Any:
    return (code * code) * _PER_65025


@register_jitable
def _load(m8: Any, v8: Any, m_scale: Any, v_scale: Any, m: Any, v: Any) -> None:
    for i in range(BLOCK):
        root = v_scale * _level(np.float32(v8[i]))
        m[i] = (m_scale * (np.float32(m8[i]) * _PER_127)) * root
        v[i] = root * root


@register_jitable
def _adam(w: Any, m: Any, v: Any, grad: Any, scale: Any, s: Any, masks: Any) -> None:
    for i in range(BLOCK):
        w_i, m_i, v_i = adam(w[i], m[i], v[i], widen(grad[i]) * scale, s, masks)
        w[i] = w_i
        m[i] = m_i
        v[i] = v_i


@register_jitable
def _root(m: Any, v: Any, seed: Any, chance: Any) -> None:
    """v becomes its root, as it is to be stored."""
    for i in range(BLOCK):
        chance[i] = np.float32(chance_of(m[i], v[i], seed) >> np.uint32(8)) * _UNIT
        root, least = float_bits(math.sqrt(v[i])), float_bits(m[i] * _LEAST_ROOT) & _MAGNITUDE
        v[i] = bits_float(least if least > root else root)


@register_jitable
def _largest(x: Any) -> Any:
    """Of the magnitudes, as bits: a NaN is larger than anything."""
    largest = np.uint32(0)
    for i in range(BLOCK):
        bits = float_bits(x[i]) & _MAGNITUDE
        largest = bits if bits > largest else largest
    return largest


@register_jitable
def _store_root(root: Any, chance: Any, scale: Any, v8: Any) -> None:
    """Codes into v8, and root becomes what is read back."""
    for i in range(BLOCK):
        share = root[i] / scale
        below = np.float32(np.int32(math.sqrt(share) * np.float32(255)))
        below = min(below, np.float32(254))
        low, high = _level(below), _level(below + np.float32(1))
        low, high = low * low, high * high
        code = below + (np.float32(1) if chance[i] * (high - low) < share * share - low else np.float32(0))
        code = np.float32(1) if (code < np.float32(1)) & (share > np.float32(0)) else code
        v8[i] = np.uint8(np.int32(code))
        root[i] = scale * _level(code)


@register_jitable
def _divide(m: Any, root: Any) -> None:
    for i in range(BLOCK):
        m[i] = m[i] / root[i] if root[i] > np.float32(0) else np.float32(0)


@register_jitable
def _store_ratio(u: Any, scale: Any, m8: Any) -> None:
    for i in range(BLOCK):
        m8[i] = np.int8(np.int32((u[i] / scale * np.float32(127) + _ROUNDS) - _ROUNDS))


@register_jitable
def _store(m: Any, root: Any, chance: Any, m8: Any, v8: Any) -> Any:
    """Codes into m8 and v8; returns the scales. Overwrites ``m`` and ``root``."""
    largest = _largest(root)
    if largest == np.uint32(0) or largest >= _INFINITY:
        m8[:] = np.int8(0)
        v8[:] = np.uint8(0)
        scale = np.float32(0) if largest == np.uint32(0) else np.float32(np.nan)
        return scale, scale
    v_scale = bits_float(largest)
    _store_root(root, chance, v_scale, v8)
    _divide(m, root)
    m_scale = bits_float(_largest(m))
    if m_scale > np.float32(0):
        _store_ratio(m, m_scale, m8)
    else:
        m8[:] = np.int8(0)
    return m_scale, v_scale


@register_jitable
def _join(hi: Any, lo: Any, w: Any) -> None:
    for i in range(BLOCK):
        w[i] = bits_float(join_bits(hi[i], lo[i]))


@register_jitable
def _split(w: Any, hi: Any, lo: Any) -> None:
    for i in range(BLOCK):
        upper, lower = split_float(w[i])
        hi[i] = upper
        lo[i] = lower


@register_jitable
def _narrow(w: Any, weight: Any) -> None:
    for i in range(BLOCK):
        weight[i] = float_to_fp16(w[i])


@loop
def adam_bf16_int8(
    hi: Any, lo: Any, m8: Any, v8: Any, m_scale: Any, v_scale: Any, grad: Any, scale: Any, s: Any, masks: Any, seed: Any
) -> None:
    """Update hi (uint16), lo (int16), m8 (int8), v8 (uint8) and, of each block, m_scale and v_scale (float32) in
    place.
    """
    w, m = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    v, chance = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for k in range(m_scale.size):
        a, b = k * BLOCK, (k + 1) * BLOCK
        _join(hi[a:b], lo[a:b], w)
        _load(m8[a:b], v8[a:b], m_scale[k], v_scale[k], m, v)
        _adam(w, m, v, grad[a:b], scale, s, masks)
        _root(m, v, seed, chance)
        m_scale[k], v_scale[k] = _store(m, v, chance, m8[a:b], v8[a:b])
        _split(w, hi[a:b], lo[a:b])


@loop
def adam_fp32_int8(
    w: Any, m8: Any, v8: Any, m_scale: Any, v_scale: Any, grad: Any, scale: Any, s: Any, masks: Any, seed: Any
) -> None:
    """As `adam_bf16_int8`, for w (float32)."""
    m, v, chance = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for k in range(m_scale.size):
        a, b = k * BLOCK, (k + 1) * BLOCK
        _load(m8[a:b], v8[a:b], m_scale[k], v_scale[k], m, v)
        _adam(w[a:b], m, v, grad[a:b], scale, s, masks)
        _root(m, v, seed, chance)
        m_scale[k], v_scale[k] = _store(m, v, chance, m8[a:b], v8[a:b])


@loop
def adam_fp16_int8(
    weight: Any,
    master: Any,
    m8: Any,
    v8: Any,
    m_scale: Any,
    v_scale: Any,
    grad: Any,
    scale: Any,
    s: Any,
    masks: Any,
    seed: Any,
) -> None:
    """As `adam_bf16_int8`, for master (float32), which is written to weight (int16: fp16 bits)."""
    m, v, chance = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for k in range(m_scale.size):
        a, b = k * BLOCK, (k + 1) * BLOCK
        _load(m8[a:b], v8[a:b], m_scale[k], v_scale[k], m, v)
        _adam(master[a:b], m, v, grad[a:b], scale, s, masks)
        _root(m, v, seed, chance)
        m_scale[k], v_scale[k] = _store(m, v, chance, m8[a:b], v8[a:b])
        _narrow(master[a:b], weight[a:b])
