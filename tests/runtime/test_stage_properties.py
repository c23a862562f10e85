"""For any shapes, whatever the ranks use of them: the sharded stages give the same bits, in any tier."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ..support.rank_pool import RankPool
from ..support.training import Recipe, Result, assert_identical, configured, train_sharded
from .test_properties import HOMES, MODELS, ODD, Shape, Stack, Unit


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@dataclass(frozen=True)
class Setting:
    stage: int
    optimizer: Any
    gradients: Any
    params: Any
    tile: int
    prefetch: int
    overlap: str
    precision: str

    def config(self, nvme: Path) -> Any:
        kept = "host"
        return configured(
            nvme,
            sharding={"stage": self.stage},
            train={"precision": self.precision, "grad_clip": 0},
            placement={
                "params": self.params if self.stage == 3 else kept,
                "gradients": self.gradients if self.stage > 1 else kept,
                "optimizer": self.optimizer,
            },
            tiers={"tile": self.tile, "prefetch": self.prefetch, "device": "16MiB", "host": "32MiB"},
            optimizer={"overlap": self.overlap},
        )


SETTINGS = st.builds(
    Setting,
    stage=st.sampled_from([1, 2, 3]),
    optimizer=HOMES,
    gradients=HOMES,
    params=HOMES,
    tile=st.sampled_from([4096, 6144]),
    prefetch=st.integers(0, 3),
    overlap=st.sampled_from(["none", "forward", "backward"]),
    precision=st.sampled_from(["bf16", "fp32"]),
)


def trained(rank: int, shape: Shape, config: Any, overlap: str) -> Result:
    def of_this_rank(step: int) -> tuple[torch.Tensor]:
        return (torch.tensor(0.1 + 0.07 * step + 0.3 * rank),)

    backward = overlap == "backward"
    recipe = Recipe(steps=3, accumulate=1 if backward else 2, clip=None if backward else 0.05, batches=of_this_rank)
    return train_sharded(Stack(shape), config, recipe, units=(Unit,), poison=True)


def same_bits(rank: int, size: int, shape: Shape, setting: Setting, folder: str) -> None:
    simplest = Setting(3, "host", "host", "host", 4096, 0, "none", setting.precision)
    wanted = trained(rank, shape, simplest.config(Path(folder)), setting.overlap)
    assert_identical(trained(rank, shape, setting.config(Path(folder)), setting.overlap), wanted)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(shape=MODELS, setting=SETTINGS)
@example(shape=ODD, setting=Setting(1, "nvme", "host", "host", 4096, 1, "forward", "bf16"))
@example(shape=ODD, setting=Setting(2, "nvme", "nvme", "host", 4096, 1, "backward", "fp32"))
def test_any_model_at_any_sharded_stage(shape: Shape, setting: Setting, ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(same_bits, shape, setting, folder)
