"""How m and v are stored in fewer bytes than fp32, in plain PyTorch: any device, and the oracle of the compiled loops.

**bf16.** m is rounded to nearest. v cannot be: one update moves it by a few thousandths where beta2 = 0.999, less than
half of bf16's last place, so that it would stay as it is for ever (measured: the gradients fall tenfold, and after 3000
steps the root of v is 2.6 times what fp32 has). It is rounded up or down by chance, so that it is right on average.

**int8.** A block of 128 elements of a parameter shares two scales. Stored are ``r``, the root of v, and ``u = m / r``.
The elements of a block differ by orders of magnitude, in m as in r, but u, which is what the weight moves by, hardly:
it takes a linear map, r one with fine steps near zero::

    r = v_scale * (code / 255)**2           code 0 to 255, v_scale the block's largest r
    u = m_scale * (code / 127)              code -127 to 127, m_scale the block's largest abs(u)

u is rounded to nearest, r by chance so that v is right on average. No r that is not 0 becomes 0, and r is ``abs(m) /
1024`` at least, so that no m stands over a v of next to nothing. A block that a NaN or an infinity gets into is NaN.

**Chance** is a hash of the step and of the bits of the new m and v: nothing of where the element lies, so that tiles,
placement and ranks change no bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tierzero.optim.formats import BLOCK, StateFormat

LEAST_ROOT = 2.0**-10
"""Of abs(m): the least root of v beside it. Adam's own is above it for all but betas very near 1."""
_HASH = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_EXPONENT = 0x7F800000


def seed_of(step: int) -> int:
    """What the chance of update number ``step`` begins with, 32 bits."""
    return (step * _HASH[0] + _HASH[2]) & 0xFFFFFFFF


def load_moments(
    fmt: StateFormat, parts: Mapping[str, torch.Tensor], elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v of ``elements`` elements as fp32, 1-D: new tensors, but of an fp32 state the state itself.

    ``parts`` are the segments of a range that begins at a multiple of ``fmt.block`` in its parameter.
    """
    m, v = parts["m"], parts["v"]
    if fmt.moments != "int8":
        return m.float(), v.float()
    root = _root(_blocks(v.float()), parts["v_scale"])
    u = parts["m_scale"].unsqueeze(1) * (_blocks(m.float()) * _per(127))
    return _flat(u * root, elements), _flat(root * root, elements)


def store_moments(
    fmt: StateFormat, m: torch.Tensor, v: torch.Tensor, parts: Mapping[str, torch.Tensor], step: int | None = None
) -> None:
    """Sets the moments in ``parts`` to fp32 ``m`` and ``v``: of the update number ``step``, or without one, as when a
    state is converted, to nearest. ``parts`` as in `load_moments`.
    """
    if fmt.moments == "fp32":
        parts["m"].copy_(m)
        parts["v"].copy_(v)
    elif fmt.moments == "bf16":
        parts["m"].copy_(m)
        parts["v"].copy_(v if step is None else _unbiased_bf16(v, _hash(m, v, step)))
    else:
        _store_int8(m, v, parts, None if step is None else _chance(_hash(m, v, step)))


def _store_int8(
    m: torch.Tensor, v: torch.Tensor, parts: Mapping[str, torch.Tensor], chance: torch.Tensor | None
) -> None:
    elements, m = m.numel(), _blocks(m)
    root = torch.maximum(exact_sqrt(_blocks(v)), m.abs() * LEAST_ROOT)
    scale = root.amax(1)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    share = torch.where(scale.unsqueeze(1) > 0, root / scale.unsqueeze(1), 0.0)
    below = (exact_sqrt(share) * 255).floor().clamp(max=254)
    low, high = _level(below) ** 2, _level(below + 1) ** 2
    up = (_blocks(chance) if chance is not None else 0.5) * (high - low) < share * share - low
    code = torch.where(share > 0, (below + up).clamp(min=1), 0.0)
    root = _root(code, scale)
    u = torch.where(root > 0, m / root, 0.0)
    largest = torch.where(scale.isfinite(), u.abs().amax(1), torch.nan)
    steps = torch.where(largest.unsqueeze(1) > 0, (u / largest.unsqueeze(1) * 127).round(), 0.0)
    parts["m"].copy_(_flat(steps, elements))
    parts["v"].copy_(_flat(code, elements))
    parts["m_scale"].copy_(largest)
    parts["v_scale"].copy_(scale)


def _root(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scale.unsqueeze(1) * _level(code)


def _level(code: torch.Tensor) -> torch.Tensor:
    return code * code * _per(255 * 255)


def _per(count: int) -> float:
    """1 / count, in fp32; times count it is 1."""
    return float(torch.tensor(1.0, device="cpu") / count)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[n] -> [ceil(n / BLOCK), BLOCK], with zeros behind the end."""
    missing = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, BLOCK)


def _flat(x: torch.Tensor, elements: int) -> torch.Tensor:
    return x.view(-1)[:elements]


def _hash(m: torch.Tensor, v: torch.Tensor, step: int) -> torch.Tensor:
    """32 bits for each element, as int32."""
    first, second, third = (_signed(factor) for factor in _HASH)
    h = m.view(torch.int32).bitwise_xor(_signed(seed_of(step))).mul_(first)
    h.bitwise_xor_(_shifted(h, 15)).bitwise_xor_(v.view(torch.int32)).mul_(second)
    h.bitwise_xor_(_shifted(h, 13)).mul_(third)
    return h.bitwise_xor_(_shifted(h, 16))


def _shifted(h: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as unsigned."""
    return h.bitwise_right_shift(by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _chance(h: torch.Tensor) -> torch.Tensor:
    """fp32 from 0 to below 1."""
    return _shifted(h, 8).float() * 2.0**-24


def _unbiased_bf16(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """fp32 values that bf16 has: those next to each of ``x``, the nearer the likelier."""
    bits = x.view(torch.int32)
    rounded = (bits + _shifted(h, 16)).bitwise_and_(-0x10000)
    finite = bits.bitwise_and(_EXPONENT) != _EXPONENT
    return torch.where(finite, rounded, bits).view(torch.float32)


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Square root, rounded correctly: fp32 torch.sqrt on CPUs may be an ulp off (MKL); fp64 can be rounded twice."""
    return x.double().sqrt_().float() if x.device.type == "cpu" else x.sqrt()
