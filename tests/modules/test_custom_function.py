"""A custom autograd.Function is handed the parameter object itself, also one whose values are away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Crossing(nn.Module):
    """Its own forward uses the weight of a layer that is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 512)
        self.other = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(self.first(x), self.other.weight).square().mean()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_weight_of_another_unit_in_a_custom_function(tmp_path: Path, tier: str) -> None:
    torch.manual_seed(0)
    model, x = Crossing(), torch.randn(4, 8)
    model(x).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    config = {"train": {"precision": "fp32"}, "tiers": {"nvme": [str(tmp_path)]}, "placement": {"params": tier}}
    tz.shard(model, tz.Config.from_dict(config))
    try:
        model(x).backward()
        for parameter, expected in zip(model.parameters(), wanted, strict=True):
            assert expected is not None
            torch.testing.assert_close(tz.read_state(parameter, "gradient"), expected, rtol=0, atol=0)
    finally:
        tz.close(model)
