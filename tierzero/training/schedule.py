"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from ..config import OptimizerSection


def lr_factor(section: OptimizerSection, steps: int) -> Callable[[int], float]:
    """The factor on ``optimizer.lr`` for each step from 0 to ``steps`` - 1.

    A linear warm-up of ``warmup`` steps, then ``schedule`` down to ``min_lr_ratio`` at the last step.
    """
    warmup, last, schedule, end = section.warmup, steps - 1, section.schedule, section.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, last - warmup))
        down = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return end + (1 - end) * down

    return factor


def scheduler_at(optimizer: torch.optim.Optimizer, section: OptimizerSection, steps: int, step: int) -> LambdaLR:
    """A scheduler that has set the learning rate of ``step``, which depends on nothing else: a resumed run goes on."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] = section.lr
    return LambdaLR(optimizer, lr_factor(section, steps), last_epoch=step - 1)
