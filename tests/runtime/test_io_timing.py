"""Slow and jittery drives, the smallest legal pools: results do not change and pools keep to their budgets."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tierzero as tz
from tierzero.api import running
from tierzero.errors import BudgetError

from ..support.models import UNITS, net
from ..support.training import (
    Recipe,
    Result,
    assert_identical,
    configured,
    everything_in,
    sharded,
    take_steps,
    tight,
    train_sharded,
    whole_state,
)

RECIPE = Recipe(steps=10, accumulate=2)
UNCLIPPED = Recipe(steps=10, clip=None)


class Jitter:
    """Sleeps before some system calls, for reads and writes differently, so that their order varies."""

    def __init__(self, seed: int, longest_s: float = 0.004) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._longest_s = longest_s
        self._slow = "read" if seed % 2 else "write"
        self.calls = 0

    def __call__(self, op: str, path: Path, offset: int, nbytes: int) -> None:
        with self._lock:
            self.calls += 1
            chance, length = self._rng.random(), self._rng.uniform(0, self._longest_s)
        if chance < (0.6 if op == self._slow else 0.2):
            time.sleep(length)


def train_with_jitter(config: tz.Config, recipe: Recipe, seed: int) -> Result:
    model, result, jitter = net(), Result(), Jitter(seed)
    with sharded(model, config, recipe, poison=True) as optimizer:
        running(model).engine.fault = jitter
        take_steps(model, optimizer, lambda most: tz.clip_grad_norm_(model, most), recipe, result)
        result.state = whole_state(model)
    assert jitter.calls > 100
    return result


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    config = configured(tmp_path_factory.mktemp("nvme"), placement=everything_in("host"))
    return {"clipped": train_sharded(net(), config, RECIPE), "unclipped": train_sharded(net(), config, UNCLIPPED)}


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_jitter_with_the_smallest_pools(seed: int, prefetch: int, calm: dict[str, Result], tmp_path: Path) -> None:
    config = tight(net, configured(tmp_path, tiers={"prefetch": prefetch}, io={"queue_depth": 3}))
    assert_identical(train_with_jitter(config, RECIPE, seed), calm["clipped"], f"seed {seed}")


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("params", ["nvme", "host"])
def test_jitter_beside_updates_in_the_backward(seed: int, params: str, calm: dict[str, Result], tmp_path: Path) -> None:
    placement: dict[str, Any] = everything_in("nvme") | {"params": params}
    config = configured(
        tmp_path, placement=placement, train={"grad_clip": 0}, optimizer={"overlap": "backward"}, io={"verify": True}
    )
    assert_identical(train_with_jitter(tight(net, config), UNCLIPPED, seed), calm["unclipped"], f"seed {seed}")


@pytest.mark.parametrize("seed", [7, 8])
def test_jitter_with_split_gradients(seed: int, calm: dict[str, Result], tmp_path: Path) -> None:
    half = {"host": 0.5, "nvme": 0.5}
    config = configured(tmp_path, placement=everything_in(half), io={"block_size": 4096})
    assert_identical(train_with_jitter(tight(net, config), RECIPE, seed), calm["clipped"], f"seed {seed}")


@pytest.mark.parametrize("key", ["device", "host"])
def test_one_page_less_than_the_smallest_budget_is_refused(key: str, tmp_path: Path) -> None:
    config = tight(net, configured(tmp_path, tiers={"prefetch": 0}))
    smallest = getattr(config.tiers, key)
    with pytest.raises(BudgetError, match=f"tiers.{key}") as caught:
        tz.shard(net(), configured(tmp_path, tiers={"prefetch": 0, key: smallest - 4096}), units=UNITS)
    assert caught.value.missing == 4096
    assert not list(tmp_path.iterdir()), "nothing may be created for a plan that does not fit"


def test_pools_keep_to_generous_and_small_budgets_alike(tmp_path: Path) -> None:
    for budget in ("1MiB", "4MiB"):
        config = configured(tmp_path, tiers={"device": budget, "host": budget}, placement=everything_in("auto"))
        result = train_sharded(net(), config, Recipe(steps=3))  # which asserts every pool's peak
        limit = config.tiers.device
        assert limit is not None
        assert result.stats["peak_tier_bytes"]["device"] <= limit
        assert result.stats["peak_tier_bytes"]["host"] <= limit


@pytest.mark.parametrize(("overlap", "nbytes_each"), [("forward", 14), ("auto", 26)])
def test_tier_bytes_are_those_of_the_plan(overlap: str, nbytes_each: int, tmp_path: Path) -> None:
    """bf16 on one rank: 2 bytes of weights, 10 of remainder and moments, 2 of gradients per (padded) parameter; second
    slots for all but the gradients.
    """
    model = net()
    with sharded(model, configured(tmp_path, optimizer={"overlap": overlap}), RECIPE):
        stats, runtime = tz.stats(model), running(model)
        padded = sum(group.layout.numel for group in runtime.groups())
        pages = 4096 * (3 if overlap == "forward" else 5) * sum(len(group.tiles) for group in runtime.groups())
        for kind, nbytes in (("params", 2), ("optimizer", 10), ("gradients", 2)):
            assert stats["placement"][kind] == {"device": 0, "host": 0, "nvme": nbytes * padded}
        assert nbytes_each * padded <= stats["tier_bytes"]["nvme"] < nbytes_each * padded + pages
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.stat().st_blocks * 512 for path in files) >= nbytes_each * padded
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size], "emptied at the end"
