"""Bit-level conversions inside compiled loops: bf16, fp16 and the split fp32 master.

Compiled code has no bf16 and no portable fp16 type, so here an array's integer dtype says what its bits are: ``uint16``
bf16, ``int16`` fp16; ``float32`` is itself. ``widen`` and ``narrow`` convert by that rule. The fp16 conversions are
integer arithmetic: LLVM's own becomes a call of a missing function on CPUs without F16C.

Hazard: Numba's disk cache of a loop knows the loop's file, not this one. After a change here, touch the files that
import it or remove their ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from tierzero.optim.jit import loop

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET_BF16 = np.uint32(0x40)
_QUIET = np.uint32(0x400000)
_UPPER = np.uint32(0xFFFF0000)


def _bitcast(source: Any, target: Any, llvm_target: Any) -> Any:
    """An intrinsic that reinterprets a ``source`` as a ``target`` of the same size."""

    def cast(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm_target)

        return target(source), generate

    return intrinsic(cast)


float_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))
"""float32 -> its bits as uint32."""
bits_float = _bitcast(types.uint32, types.float32, ir.FloatType())
"""Bits as uint32 -> float32."""


@register_jitable
def bf16_to_float(half: np.uint16) -> Any:
    """bf16 bits -> float32, exact."""
    return bits_float(np.uint32(half) << np.uint32(16))


@register_jitable
def float_to_bf16(value: np.float32) -> np.uint16:
    """float32 -> bf16 bits, to nearest with ties to even; a NaN stays a NaN of its sign."""
    bits = float_bits(value)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | _QUIET_BF16
    return np.uint16(quiet if (bits & _MAGNITUDE) > _INFINITY else rounded)


@register_jitable
def float_to_bf16_by_chance(value: np.float32, chance: np.uint32) -> np.uint16:
    """float32 -> one of the two bf16 next to it, the upper one if its share of the way is above that of ``chance``."""
    bits = float_bits(value)
    rounded = np.uint32(bits + (chance >> np.uint32(16))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | (_QUIET_BF16 if (bits & _MAGNITUDE) > _INFINITY else np.uint32(0))
    return np.uint16(quiet if (bits & _INFINITY) == _INFINITY else rounded)


@register_jitable
def chance_of(m: np.float32, v: np.float32, seed: np.uint32) -> Any:
    """The 32 bits of chance that `tierzero.optim.moments` describes."""
    h = np.uint32((float_bits(m) ^ seed) * np.uint32(0x9E3779B1))
    h = np.uint32((h ^ (h >> np.uint32(15)) ^ float_bits(v)) * np.uint32(0x85EBCA77))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE3D))
    return np.uint32(h ^ (h >> np.uint32(16)))


@register_jitable
def fp16_to_float(half: np.int16) -> Any:
    """fp16 bits -> float32, exact."""
    word = np.uint32(np.uint16(half))
    magnitude = (word & np.uint32(0x7FFF)) << np.uint32(13)
    normal = np.uint32(magnitude + np.uint32((127 - 15) << 23))
    special = np.uint32(magnitude + np.uint32((255 - 31) << 23))
    # A subnormal's bits after an implicit one of 2**-14 make a normal number; taking that one away leaves the value.
    one = np.uint32((127 - 14) << 23)
    subnormal = float_bits(bits_float(magnitude | one) - bits_float(one))
    bits = normal
    bits = subnormal if magnitude < np.uint32(1 << 23) else bits
    bits = special if magnitude >= np.uint32(31 << 23) else bits
    return bits_float(bits | ((word & np.uint32(0x8000)) << np.uint32(16)))


@register_jitable
def float_to_fp16(value: np.float32) -> np.int16:
    """float32 -> fp16 bits, to nearest with ties to even, infinity from 65520 on; a NaN stays a NaN of its sign."""
    word = float_bits(value)
    magnitude = word & _MAGNITUDE
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(magnitude - np.uint32((127 - 15) << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    # Adding 0.5 aligns the last mantissa bit with fp16's subnormal unit of 2**-24: the FPU does the rounding.
    half_one = np.uint32(126 << 23)
    subnormal = np.uint32(float_bits(bits_float(magnitude) + bits_float(half_one)) - half_one)
    bits = normal
    bits = subnormal if magnitude < np.uint32((127 - 14) << 23) else bits
    bits = np.uint32(0x7C00) if magnitude >= np.uint32((127 + 16) << 23) else bits
    bits = np.uint32(0x7E00) if magnitude > _INFINITY else bits
    return np.int16(bits | ((word & _SIGN) >> np.uint32(16)))


@register_jitable
def split_float(value: np.float32) -> tuple[np.uint16, np.int16]:
    """float32 -> (hi, lo); see ``split``."""
    bits = float_bits(value)
    # Before rounding: adding to a NaN's payload can carry into infinity or into the sign.
    bits = (bits | _QUIET) & _UPPER if value != value else bits
    return np.uint16(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16)), np.int16(bits)


@register_jitable
def join_bits(hi: np.uint16, lo: np.int16) -> np.uint32:
    """(hi, lo) -> fp32 bits ``(hi << 16) + lo``, modulo 2**32."""
    return np.uint32((np.uint32(hi) << np.uint32(16)) + np.uint32(np.int32(lo)))


def widen(element: Any) -> Any:
    """Element of an array -> float32, by the dtype rule of this module. Compiled code only."""
    raise TypeError("widen is for compiled loops")


@overload(widen)
def _widen(element):  # type: ignore[no-untyped-def]  # Numba compares the signatures
    if element == types.uint16:
        return lambda element: bf16_to_float(element)
    if element == types.int16:
        return lambda element: fp16_to_float(element)
    return lambda element: element


def narrow(value: Any, like: Any) -> Any:
    """float32 -> element of the type of ``like``, by the dtype rule of this module. Compiled code only."""
    raise TypeError("narrow is for compiled loops")


@overload(narrow)
def _narrow(value, like):  # type: ignore[no-untyped-def]
    if like == types.uint16:
        return lambda value, like: float_to_bf16(value)
    if like == types.int16:
        return lambda value, like: float_to_fp16(value)
    return lambda value, like: value


def narrow_by_chance(value: Any, like: Any, chance: Any) -> Any:
    """As `narrow`, but to bf16 by ``chance`` (uint32). Compiled code only."""
    raise TypeError("narrow_by_chance is for compiled loops")


@overload(narrow_by_chance)
def _narrow_by_chance(value, like, chance):  # type: ignore[no-untyped-def]
    if like == types.uint16:
        return lambda value, like, chance: float_to_bf16_by_chance(value, chance)
    return lambda value, like, chance: value


@loop
def split(master: np.ndarray, hi: np.ndarray, lo: np.ndarray) -> None:
    """Split float32[n] ``master`` into bf16 bits ``hi`` (uint16[n]) and rest ``lo`` (int16[n]).

    ``hi`` is the master rounded to the nearest bf16 with ties away from zero (with ties to even the rest +32768 would
    not fit), and ``bits(master) == (hi << 16) + lo`` holds exactly for every finite value and infinity. A value that
    rounds past the largest bf16 has ``hi`` infinite, and still joins exactly. A NaN becomes a quiet NaN of its sign
    with ``lo`` 0: the lower payload bits are lost, and 0x7fc00000 and 0xffc00000 are exact.
    """
    for i in range(master.size):
        upper, lower = split_float(master[i])
        hi[i] = upper
        lo[i] = lower


@loop
def join(hi: np.ndarray, lo: np.ndarray, master: np.ndarray) -> None:
    """Write float32[n] ``master`` from ``hi`` (uint16[n]) and ``lo`` (int16[n]): the inverse of ``split``."""
    for i in range(master.size):
        master[i] = bits_float(join_bits(hi[i], lo[i]))
