"""Dynamic loss scaling for fp16: the scale grows until gradients overflow, and backs off when they do.

Same rule as PyTorch's ``GradScaler`` (Micikevicius et al., 2018), without touching ``.grad``: unscaling is part of
the update's one pass, and a non-finite gradient shows in the norm that is taken as gradients arrive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.optim.owner import owner_of


class LossScaler:
    """``scaler.scale(loss).backward()``; clipping, the step and the change of the scale take care of themselves.

    A step whose gradients are not finite is skipped, the scale is multiplied with ``backoff``; after
    ``growth_interval`` steps without one it is multiplied with ``growth``. The scale applies from the first
    ``scale()`` after a step.
    """

    def __init__(
        self,
        model: nn.Module,
        init_scale: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if init_scale <= 0 or growth <= 1 or not 0 < backoff < 1 or growth_interval < 1:
            raise ConfigError("LossScaler: needs init_scale > 0, growth > 1, 0 < backoff < 1, growth_interval >= 1")
        self._owner = owner_of(model)
        if self._owner.updates_in_backward:
            raise ConfigError("LossScaler: optimizer.overlap = 'backward' cannot skip a step; use 'forward' with fp16")
        self.scale_value = init_scale
        self.growth, self.backoff, self.growth_interval = growth, backoff, growth_interval
        self.good_steps = 0
        self.skipped_steps = 0
        self._owner.on_step_skipped = self._after_step

    @out_of_graphs
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the current scale."""
        self._owner.loss_scale = self.scale_value
        return loss * self.scale_value

    def _after_step(self, skipped: bool) -> None:
        if skipped:
            self.scale_value *= self.backoff
            self.good_steps = 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale_value *= self.growth
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale_value, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale_value = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped_steps = int(state.get("skipped_steps", 0))
