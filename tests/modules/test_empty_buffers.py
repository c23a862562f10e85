"""Buffers of empty models: those on the meta device get values or are refused, and a folder's must be of their kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tierzero as tz

from ..support.oracle import config, sharded


class Tabled(nn.Module):
    """A linear layer with a table of floats, a persistent one of integers, and a layer that has nothing but a table."""

    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(3.0) / 3, persistent=False)

        def reset_parameters(self) -> None:
            self.angles.copy_(torch.arange(3.0) / 3)

    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("order", torch.arange(3))

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "order"):
                self.order.copy_(torch.arange(3))

    def __init__(self) -> None:
        super().__init__()
        self.angles = Tabled.Angles()
        self.linear = Tabled.Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, self.linear.order] + self.angles.angles)


def all_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tabled()


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("init", [None, reset])
def test_buffers_on_the_meta_device_get_their_values(init: object, tmp_path: Path) -> None:
    plain = Tabled()
    with sharded(all_on_meta(), config(tmp_path), ("linear",), init=init) as model:
        assert torch.equal(model.angles.angles, plain.angles.angles)
        assert torch.equal(model.linear.order, plain.linear.order)
        assert torch.isfinite(model(torch.ones(2, 3))).all()


def linear_only(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.Linear.reset_parameters(module)


@pytest.mark.parametrize("init", ["folder", "function", "none"])
def test_buffers_that_nothing_gives_values_are_refused(init: str, tmp_path: Path) -> None:
    """They would stay on the meta device, and so would all that is computed with them."""
    (tmp_path / "weights").mkdir()
    save_file(Tabled().state_dict(), tmp_path / "weights" / "model.safetensors")
    model = all_on_meta()
    if init == "none":
        model = built_but_for_buffers(model)
    given = {"folder": tmp_path / "weights", "function": linear_only, "none": None}[init]
    with pytest.raises(tz.ConfigError, match=r"buffer '(angles\.angles|linear\.order)' has no values.*empty_init"):
        tz.shard(model, config(tmp_path), ("linear",), init=given)


def built_but_for_buffers(model: nn.Module) -> nn.Module:
    for name in ("weight", "bias"):
        setattr(model.linear, name, nn.Parameter(torch.ones_like(getattr(model.linear, name), device="cpu")))
    return model


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("linear.order", torch.zeros(1, dtype=torch.int64), r"'linear.order' .* has shape \(1,\)"),
        ("linear.weight", torch.ones(3, 3, dtype=torch.int8), r"'linear.weight' .* is I8.*quantized"),
        ("linear.weight", torch.ones(3, 3).to(torch.float8_e4m3fn), r"'linear.weight' .* is F8_E4M3.*quantized"),
    ],
)
def test_folder_with_other_buffers_or_quantized_weights(
    name: str, value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    save_file(Tabled().state_dict() | {name: value}, tmp_path / "weights" / "model.safetensors")
    with tz.empty_init():
        model = Tabled()
    with pytest.raises(tz.ConfigError, match=message):
        tz.shard(model, config(tmp_path), init=tmp_path / "weights")
