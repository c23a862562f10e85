"""For any model, placement and number of ranks: what was saved is what any other run loads, to the last bit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import tierzero as tz

from ..support.cloning import cloned_by, copied
from ..support.oracle import Outcome, assert_bits, config, record_state, sharded
from ..support.rank_pool import RankPool


@dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    used: bool = True


@dataclass(frozen=True)
class Shape:
    """The parameters of each unit; ``tied``: the first of the last unit is the first of the first as well."""

    units: tuple[tuple[Parameter, ...], ...]
    tied: bool


class Unit(nn.Module):
    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.used = tuple(parameter.used for parameter in parameters)
        self.weights = nn.ParameterList(_made(parameter) for parameter in parameters)
        self.register_buffer("seen", torch.randint(9, (len(parameters), 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for used, weight in zip(self.used, self.weights, strict=True):
            if used:
                x = torch.tanh(x + (weight.float() * x).square().sum() / max(1, weight.numel()))
        return x


def _made(parameter: Parameter) -> nn.Parameter:
    dtype = getattr(torch, parameter.dtype)
    values = (torch.randn(parameter.shape) * 9).to(dtype)
    return nn.Parameter(values, requires_grad=parameter.trainable and dtype.is_floating_point)


class Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.units = nn.ModuleList(Unit(parameters) for parameters in shape.units)
        if shape.tied and shape.units[0] and shape.units[-1]:
            self.units[-1].weights[0] = self.units[0].weights[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale.float()
        for unit in self.units:
            x = unit(x)
        return x


@dataclass(frozen=True)
class Setting:
    ranks: int
    stage: int
    params: Any
    optimizer: Any
    tile: int
    cloned: bool = False
    """Durable tiers on a file system that clones."""

    def config(self, root: Path, name: str, precision: str) -> tz.Config:
        (root / name).mkdir(exist_ok=True)
        sections: dict[str, dict[str, Any]] = {
            "train": {"precision": precision, "grad_clip": 0},
            "tiers": {"tile": self.tile},
            "sharding": {"stage": 3 if self.cloned else self.stage},
        }
        if self.cloned:
            sections["checkpoint"] = {"durable": True, "dir": str(root / "run")}
            return config(root / name, "nvme", **sections)
        params = self.params if self.stage == 3 else "host"
        sections["placement"] = {"params": params, "optimizer": self.optimizer, "gradients": "host"}
        return config(root / name, **sections)


SIZES = st.sampled_from([0, 1, 2, 3, 31, 33, 64])
SHAPES = st.one_of(
    st.just(()),
    st.tuples(SIZES),
    st.tuples(SIZES, SIZES),
    st.sampled_from([(4096,), (4097,), (9001,), (3, 4096), (5, 1, 7)]),
)
PARAMETERS = st.builds(
    Parameter,
    SHAPES,
    dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16", "int32"]),
    trainable=st.sampled_from([True, True, True, False]),
    used=st.sampled_from([True, True, False]),
)
MODELS = st.builds(
    Shape,
    st.lists(st.lists(PARAMETERS, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple),
    tied=st.booleans(),
)
HOMES = st.sampled_from(["host", "nvme", {"host": 0.5, "nvme": 0.5}])
STAGES = st.sampled_from([0, 1, 2, 3, 3])
TILES = st.sampled_from([4096, 6144, 16384])
PRECISIONS = st.sampled_from(["bf16", "fp32"])


def settings_of(most: int) -> st.SearchStrategy[Setting]:
    return st.builds(Setting, st.integers(1, most), STAGES, HOMES, HOMES, TILES, cloned=st.booleans())


def outcome_of(model: nn.Module) -> Outcome:
    outcome = Outcome()
    record_state(model, outcome)
    for name, buffer in model.named_buffers():
        outcome.weights[name], outcome.moments[name] = buffer.clone(), None
    return outcome


@contextlib.contextmanager
def built(shape: Shape, chosen: tz.Config, seed: int) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    with sharded(Stack(shape), chosen, (Unit,)) as model:
        yield model, tz.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def save_as_rank(rank: int, size: int, shape: Shape, setting: Setting, precision: str, folder: str) -> Outcome:
    root = Path(folder)
    with built(shape, setting.config(root, "first", precision), 1) as (model, optimizer):
        for step in range(2):
            model(torch.tensor(0.1 + 0.3 * rank + 0.07 * step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with cloned_by(copied) as cloned:
            tz.save_checkpoint(model, optimizer, root / "saved", extra={"step": 2})
        assert bool(cloned) is setting.cloned
        return outcome_of(model)


def load_as_rank(rank: int, size: int, shape: Shape, setting: Setting, precision: str, folder: str) -> Outcome:
    root = Path(folder)
    with built(shape, setting.config(root, "second", precision), 2) as (model, optimizer):
        assert tz.load_checkpoint(model, optimizer, root / "saved") == {"step": 2}
        return outcome_of(model)


def on_ranks(pools: dict[int, RankPool], function: Any, shape: Shape, setting: Setting, *args: Any) -> list[Outcome]:
    if setting.ranks == 1:
        return [function(0, 1, shape, setting, *args)]
    return pools[setting.ranks].run(function, shape, setting, *args)


def assert_loads(pools: dict[int, RankPool], shape: Shape, saving: Setting, loading: Setting, precision: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = on_ranks(pools, save_as_rank, shape, saving, precision, folder)
        assert tz.verify_checkpoint(Path(folder) / "saved") == []
        for found in on_ranks(pools, load_as_rank, shape, loading, precision, folder):
            assert_bits(found, saved[0])


ODD = Shape(
    (
        (Parameter((33, 7)), Parameter(()), Parameter((0, 3)), Parameter((4097,), "bfloat16")),
        (),
        (Parameter((5,), trainable=False), Parameter((31,), "int32"), Parameter((9001,), "float16")),
        (Parameter((33, 7)), Parameter((0,)), Parameter((3,), used=False)),
    ),
    tied=True,
)
SPLIT = {"host": 0.5, "nvme": 0.5}
QUIETLY = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=8, **QUIETLY)
@given(shape=MODELS, saving=settings_of(2), loading=settings_of(2), precision=PRECISIONS)
@example(
    shape=ODD,
    saving=Setting(2, 3, "nvme", "nvme", 4096, cloned=True),
    loading=Setting(1, 3, "host", SPLIT, 6144),
    precision="bf16",
)
@example(
    shape=ODD,
    saving=Setting(1, 3, SPLIT, "nvme", 6144),
    loading=Setting(2, 1, "host", "nvme", 4096),
    precision="fp32",
)
def test_any_model_between_any_two_runs(
    shape: Shape, saving: Setting, loading: Setting, precision: str, two_ranks: RankPool
) -> None:
    assert_loads({2: two_ranks}, shape, saving, loading, precision)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    ranks = RankPool(3)
    yield ranks
    ranks.close()


@pytest.mark.long
@settings(max_examples=150, **QUIETLY)
@given(shape=MODELS, saving=settings_of(3), loading=settings_of(3), precision=PRECISIONS)
def test_more_models_on_more_ranks(
    shape: Shape, saving: Setting, loading: Setting, precision: str, two_ranks: RankPool, three_ranks: RankPool
) -> None:
    assert_loads({2: two_ranks, 3: three_ranks}, shape, saving, loading, precision)
