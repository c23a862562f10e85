"""Awkward models of many kinds train to the same values as without TierZero, from host memory and from NVMe."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.cases import CASES
from ..support.oracle import TIERS, Case, assert_close, config, train_plain, train_sharded
from ..support.zoo import Block, Stack, penalized

PLACED = [
    pytest.param(name, tier, marks=pytest.mark.long if (name, tier) == ("many", "host") else ())
    for name in CASES
    for tier in TIERS
]


@pytest.mark.parametrize(("name", "tier"), PLACED)
def test_values_are_those_of_the_unsharded_model(name: str, tier: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = train_sharded(case, config(tmp_path, tier))
    assert_close(found, train_plain(case))


@pytest.mark.parametrize("tier", TIERS)
def test_penalty_over_the_parameters_outside_the_forward(tier: str, tmp_path: Path) -> None:
    case = Case(Stack, penalized, (Block,))
    assert_close(train_sharded(case, config(tmp_path, tier)), train_plain(case))


@pytest.mark.parametrize("name", ["albert", "branching", "tied-functional", "wide"])
def test_with_the_update_in_the_backward(name: str, tmp_path: Path) -> None:
    given = CASES[name]
    case = Case(given.build, given.loss, given.units, given.steps, given.eps)
    settings = config(tmp_path, optimizer={"overlap": "backward"}, train={"grad_clip": 0, "precision": "fp32"})
    assert_close(train_sharded(case, settings), train_plain(case))


@pytest.mark.parametrize("prefetch", [0, 8])
@pytest.mark.parametrize("name", ["skipping", "albert", "one-block", "lora"])
def test_at_other_prefetch_depths(name: str, prefetch: int, tmp_path: Path) -> None:
    case = CASES[name]
    found = train_sharded(case, config(tmp_path, tiers={"prefetch": prefetch}))
    assert_close(found, train_plain(case))


@pytest.mark.parametrize("floor", [300, 10**6])
@pytest.mark.parametrize("name", ["encoder-leaves", "every-leaf", "lora", "skipping", "albert", "tied", "captured"])
def test_with_small_units_joined(name: str, floor: int, tmp_path: Path) -> None:
    case = CASES[name]
    found = train_sharded(case, config(tmp_path, sharding={"min_unit": floor}))
    assert_close(found, train_plain(case))
