"""Two ranks with different data train to the values of one process on the mean of their losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.cases import CASES
from ..support.oracle import TIERS, Case, assert_bits, assert_close, config, train_plain, train_sharded
from ..support.rank_pool import RankPool

NAMES = (
    "tied",
    "tied-functional",
    "borrower",
    "captured",
    "albert",
    "skipping",
    "branching",
    "two-forwards",
    "structured",
    "encoder",
    "lstm",
    "weight-normed",
    "odd",
    "wide",
    "unused",
    "lora",
    "mixture",
    "one-block",
    "every-leaf",
)


def ten_steps(name: str) -> Case:
    case = CASES[name]
    return Case(case.build, case.loss, case.units, max(10, case.steps), max(case.eps, 1e-6), case.clip)


def train_as_rank(rank: int, size: int, name: str, tiers: tuple[str, ...], nvme: str) -> None:
    case = ten_steps(name)
    found = [train_sharded(case, config(Path(nvme), tier), rank, size) for tier in tiers]
    assert_close(found[0], train_plain(case, size), tolerance=5e-5)
    for other in found[1:]:
        assert_bits(other, found[0])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree_with_one_process(name: str, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(train_as_rank, name, TIERS, str(tmp_path))


def joined_as_rank(rank: int, size: int, name: str, nvme: str) -> None:
    case = ten_steps(name)
    wanted = train_plain(case, size)
    for floor in (300, 10**6):
        found = train_sharded(case, config(Path(nvme), sharding={"min_unit": floor}), rank, size)
        assert_close(found, wanted, tolerance=5e-5)


@pytest.mark.parametrize("name", ["every-leaf", "skipping", "lora", "mixture"])
def test_ranks_with_small_units_joined(name: str, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(joined_as_rank, name, str(tmp_path))


def stages_as_rank(rank: int, size: int, name: str, nvme: str) -> None:
    case = ten_steps(name)
    found = [
        train_sharded(case, config(Path(nvme), "host", sharding={"stage": stage}), rank, size) for stage in (3, 2, 1, 0)
    ]
    for other in found[1:3]:
        assert_bits(other, found[0])
    assert_close(found[3], found[0], tolerance=1e-6)


@pytest.mark.parametrize("name", ["skipping", "odd", "lora", "mixture"])
def test_stages_agree(name: str, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(stages_as_rank, name, str(tmp_path))


def overflow_only_in_the_sum(rank: int, size: int, nvme: str) -> None:
    """Each rank's fp16 gradients are 40,000, and so is their mean; their sum is beyond the type."""
    model = tz.shard(nn.Linear(8, 8, bias=False), config(Path(nvme), train={"precision": "fp16"}))
    try:
        (model(torch.ones(1, 8)).sum() * 40_000).backward()
        assert tz.clip_grad_norm_(model, math.inf).item() == 40_000 * 8
    finally:
        tz.close(model)


def test_fp16_gradients_are_averaged_within_their_range(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(overflow_only_in_the_sum, str(tmp_path))
