"""For any shapes, placement, tile and timing: the bits of the simplest run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from ..support.fake_device import FakeDevice
from ..support.training import Recipe, Result, assert_identical, configured, everything_in, tight, train_sharded


@dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    trainable: bool = True
    used: bool = True


Shape = tuple[tuple[Parameter, ...], ...]
"""The parameters of each unit."""


class Unit(nn.Module):
    def __init__(self, parameters: Sequence[Parameter], generator: torch.Generator) -> None:
        super().__init__()
        self.used = tuple(parameter.used for parameter in parameters)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(p.shape, generator=generator), requires_grad=p.trainable) for p in parameters
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for used, weight in zip(self.used, self.weights, strict=True):
            if used:
                x = torch.tanh(x + (weight * x).square().sum() / max(1, weight.numel()))
        return x


class Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.units = nn.ModuleList(Unit(parameters, generator) for parameters in shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for unit in self.units:
            x = unit(x)
        return x.float()


def inputs(step: int) -> tuple[torch.Tensor]:
    return (torch.tensor(0.1 + 0.07 * step),)


SIZES = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 100])
SHAPES = st.one_of(
    st.just(()),
    st.tuples(SIZES),
    st.tuples(SIZES, SIZES),
    st.tuples(st.sampled_from([1, 3, 5]), SIZES, st.sampled_from([1, 2, 7])),
    st.sampled_from([(2048,), (4096,), (4097,), (8192,), (9001,), (3, 4096)]),
)
PARAMETERS = st.builds(
    Parameter,
    SHAPES,
    trainable=st.sampled_from([True, True, True, False]),
    used=st.sampled_from([True, True, True, False]),
)
MODELS = st.lists(st.lists(PARAMETERS, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple)
SPLITS = st.sampled_from([{"host": 0.5, "nvme": 0.5}, {"device": 0.2, "host": 0.2, "nvme": 0.6}])
HOMES = st.one_of(st.sampled_from(["device", "host", "nvme", "nvme"]), SPLITS)


@dataclass(frozen=True)
class Setting:
    params: Any
    optimizer: Any
    gradients: Any
    tile: int
    prefetch: int
    overlap: str
    block_size: int
    precision: str
    tight: bool
    fake: bool

    def config(self, nvme: Path) -> Any:
        limits = {} if self.tight else {"device": "16MiB", "host": "16MiB"}
        return configured(
            nvme,
            train={"precision": self.precision, "grad_clip": 0},
            placement={"params": self.params, "optimizer": self.optimizer, "gradients": self.gradients},
            tiers={"tile": self.tile, "prefetch": self.prefetch} | limits,
            optimizer={"overlap": self.overlap},
            io={"block_size": self.block_size},
        )

    @property
    def possible(self) -> bool:
        """On a device of its own the optimizer can only be where the weights are; both halves of the step are for state
        on nvme.
        """
        if self.overlap == "both" and not (self.params == "nvme" and self.optimizer == "nvme"):
            return False
        return not (self.fake and "device" in self.optimizer and self.params != "device")


SETTINGS = st.builds(
    Setting,
    params=HOMES,
    optimizer=HOMES,
    gradients=HOMES,
    tile=st.sampled_from([4096, 6144, 16384]),
    prefetch=st.integers(0, 3),
    overlap=st.sampled_from(["none", "forward", "backward", "both"]),
    block_size=st.sampled_from([4096, 12288, 1 << 20]),
    precision=st.sampled_from(["bf16", "fp32"]),
    tight=st.booleans(),
    fake=st.booleans(),
).filter(lambda setting: setting.possible)

ODD: Shape = (
    (Parameter(()), Parameter((0, 3)), Parameter((33, 7)), Parameter((4097,))),
    (),
    (Parameter((5,), trainable=False), Parameter((1,), used=False)),
    (Parameter((0,)),),
)
HARSH = Setting("nvme", "nvme", "nvme", 4096, 1, "backward", 4096, "bf16", tight=True, fake=True)


def recipe_for(setting: Setting) -> Recipe:
    backward = setting.overlap == "backward"
    return Recipe(
        steps=3,
        accumulate=1 if backward else 2,
        clip=None if backward else 0.05,
        batches=inputs,
    )


def run(shape: Shape, setting: Setting, config: Any, device: FakeDevice | None) -> Result:
    return train_sharded(Stack(shape), config, recipe_for(setting), units=(Unit,), device=device, poison=True)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shape=MODELS, setting=SETTINGS)
@example(shape=ODD, setting=HARSH)
def test_any_model_in_any_setting(shape: Shape, setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        nvme = Path(folder)
        simplest = configured(
            nvme,
            train={"precision": setting.precision},
            placement=everything_in("host"),
            tiers={"prefetch": 0},
            optimizer={"overlap": "none"},
        )
        wanted = run(shape, setting, simplest, None)
        device = FakeDevice(longest_s=0.001) if setting.fake else None
        try:
            config = setting.config(nvme)
            if setting.tight:
                config = tight(lambda: Stack(shape), config, units=(Unit,), device=device)
            assert_identical(run(shape, setting, config, device), wanted)
        finally:
            if device is not None:
                device.close()
