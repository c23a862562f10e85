"""Hyperparameters of one Adam update and the fp32 scalars that every implementation of it uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierzero.errors import ConfigError


class AdamScalars(NamedTuple):
    """The arithmetic of one update; every value is one that fp32 has.

    Per parameter, every operation rounded to fp32 and none fused (``g`` is the gradient as fp32)::

        g = g * grad_scale
        g = g + l2 * w                          only where l2 != 0
        w = w * decay
        d = g - m
        m = flush(m + lerp * d)                 where lerp > 0
        m = flush(g + lerp * d)                 elsewhere (beta1 <= 0.5: exact for beta1 = 0)
        v = flush(v * beta2 + (one_minus_beta2 * g) * g)
        w = w - (step_size * m) / (sqrt(v) * inv_sqrt_bias2 + eps)

    ``flush`` makes a subnormal +0. The moments of a weight whose gradient stays zero, a rare token's embedding say,
    decay into subnormals and would never leave them, and CPUs compute with those 20 times slower.

    The denominator has the reciprocal of sqrt(bias2) as a factor: GPUs divide by a scalar that way and CPUs do not, so
    that a division would round differently on the two.
    """

    decay: float
    l2: float
    lerp: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias2: float
    eps: float
    step_size: float


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one update of one parameter group.

    ``step`` counts updates from 1 and includes the one being made. ``decoupled`` selects AdamW; without it the weight
    decay is added to the gradient (Adam with L2).

    Raises ``ConfigError`` for values for which the update is not defined.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"optimizer {name} is {value}: it must be at least 0 and below 1")
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"optimizer {name} is {value}: it must be finite and not negative")
        if self.step < 1:
            raise ConfigError(f"optimizer step is {self.step}: the first update has step 1")

    def scalars(self) -> AdamScalars:
        """Return the scalars, computed in fp64 and rounded once to fp32."""
        bias1 = 1.0 - self.beta1**self.step
        bias2 = 1.0 - self.beta2**self.step
        toward_grad = 1.0 - self.beta1
        return AdamScalars(
            decay=_fp32(1.0 - self.lr * self.weight_decay if self.decoupled else 1.0),
            l2=_fp32(0.0 if self.decoupled else self.weight_decay),
            # From the nearer end, as torch.lerp does: far from m, m + 1 * (g - m) would lose the low bits of g.
            lerp=_fp32(toward_grad if toward_grad < 0.5 else -self.beta1),
            beta2=_fp32(self.beta2),
            one_minus_beta2=_fp32(1.0 - self.beta2),
            inv_sqrt_bias2=_fp32(1.0 / math.sqrt(bias2)),
            eps=_fp32(self.eps),
            step_size=_fp32(self.lr / bias1),
        )


def _fp32(value: float) -> float:
    return float(np.float32(value))
