"""The Adam update in plain PyTorch: for state that lives on an accelerator, and the oracle of the kernel's tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tierzero.optim.formats import StateFormat, check_state, check_vector, join_master, split_master
from tierzero.optim.hyper import AdamHyper, AdamScalars
from tierzero.optim.moments import exact_sqrt, load_moments, store_moments

_CHUNK = 4 << 20
"""Elements updated at a time: the temporaries are a few fp32 chunks of this size, whatever the shard's."""


def update_reference(
    fmt: StateFormat,
    weight: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    hyper: AdamHyper,
    grad_scale: float = 1.0,
) -> None:
    """Update ``weight`` and ``parts`` in place, with the arithmetic of ``AdamScalars`` and so with the bits of
    ``kernel.update``.

    All tensors are contiguous and 1-D of one length on one device; ``grad`` is bf16, fp16 or fp32 and is left as it is.
    A NaN is a NaN in both implementations, but its payload is not specified. Raises ``ValueError`` for tensors that do
    not fit.
    """
    check_state(fmt, weight, parts, tuple(segment.name for segment in fmt.updated))
    check_vector("grad", grad, grad.dtype, weight.numel())
    scale = float(torch.tensor(grad_scale, dtype=torch.float32, device="cpu"))
    with torch.no_grad():
        for start in range(0, weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            g = grad[piece].to(torch.float32) * scale
            _update_chunk(fmt, weight[piece], fmt.cut(parts, piece), g, hyper)


def _update_chunk(
    fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], g: torch.Tensor, hyper: AdamHyper
) -> None:
    m, v = load_moments(fmt, parts, weight.numel())
    if fmt.name == "bf16":
        master = join_master(weight, parts["lo"])
        _adam(master, m, v, g, hyper.scalars())
        split_master(master, weight, parts["lo"])
    elif fmt.name == "fp16":
        _adam(parts["master"], m, v, g, hyper.scalars())
        weight.copy_(parts["master"])
    else:
        _adam(weight, m, v, g, hyper.scalars())
    if fmt.moments != "fp32":
        store_moments(fmt, m, v, parts, hyper.step)


def _adam(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, s: AdamScalars) -> None:
    """Update fp32 ``w``, ``m``, ``v`` in place; overwrites ``g``.

    One operation per call: lerp_, addcmul_ and add_ with alpha may fuse a multiply and an add, and then round once
    less.
    """
    if s.l2 != 0.0:
        g.add_(w * s.l2)
    w.mul_(s.decay)
    d = (g - m).mul_(s.lerp)
    if s.lerp > 0.0:
        m.add_(d)
    else:
        torch.add(g, d, out=m)
    _flush(m)
    v.mul_(s.beta2).add_(torch.mul(g, s.one_minus_beta2, out=d).mul_(g))
    _flush(v)
    denominator = exact_sqrt(v).mul_(s.inv_sqrt_bias2).add_(s.eps)
    w.sub_(torch.mul(m, s.step_size, out=g).div_(denominator))


def _flush(x: torch.Tensor) -> None:
    x.masked_fill_(x.abs() < torch.finfo(torch.float32).tiny, 0.0)
