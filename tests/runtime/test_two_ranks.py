"""Two real processes: bit-identical among themselves, and the loss curve of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..support.models import net
from ..support.ranks import Job, run_ranks
from ..support.training import Recipe, Result, assert_identical, assert_same_state, everything_in, train_plain

ROOM = {"device": "64MiB", "host": "128MiB"}
SPLIT = {"device": 0.3, "host": 0.3, "nvme": 0.4}
OFFLOADED = {"params": "host", "optimizer": "nvme", "gradients": "host"}
CLIPPED = {"steps": 12}
UNCLIPPED = {"steps": 10, "clip": None}
ACCUMULATED = {"steps": 10, "accumulate": 2}


def clipped(stage: int = 3, tight: bool = False, **config: Any) -> dict[str, Any]:
    return {"recipe": CLIPPED, "tight": tight, "poison": True, "config": {"sharding": {"stage": stage}} | config}


def unclipped(overlap: str, stage: int, placement: Any, **train: str) -> dict[str, Any]:
    config = {
        "sharding": {"stage": stage},
        "placement": everything_in(placement),
        "tiers": ROOM,
        "train": {"grad_clip": 0} | train,
        "optimizer": {"overlap": overlap},
    }
    return {"recipe": UNCLIPPED, "poison": True, "config": config}


RUNS: dict[str, dict[str, Any]] = {
    "stage3/host": clipped(placement=everything_in("host"), tiers={"prefetch": 0}, optimizer={"overlap": "none"}),
    "stage3/nvme": clipped(),
    "stage3/split": clipped(placement=everything_in(SPLIT), tiers=ROOM),
    "stage3/tight": clipped(tight=True, tiers={"prefetch": 1}),
    "stage3/deep": clipped(tiers={"prefetch": 16, "tile": 65536}, optimizer={"overlap": "none"}),
    "stage3/mixed": clipped(placement={"params": "host", "optimizer": "nvme", "gradients": "nvme"}),
    "stage0/host": clipped(0, placement=everything_in("host"), optimizer={"overlap": "none"}),
    "stage0/nvme": clipped(0),
    "stage0/split": clipped(0, placement=everything_in(SPLIT), tiers=ROOM),
    "stage2/host": clipped(2, placement=everything_in("host"), optimizer={"overlap": "none"}),
    "stage2/nvme": clipped(2, placement=OFFLOADED | {"gradients": "nvme"}),
    "stage1/host": clipped(1, placement=everything_in("host"), optimizer={"overlap": "none"}),
    "stage1/nvme": clipped(1, placement=OFFLOADED),
    "stage1/tight": clipped(1, placement=OFFLOADED, tight=True, tiers={"prefetch": 1}),
    "plain/forward3": unclipped("forward", 3, "host"),
    "plain/backward2": unclipped("backward", 2, "host"),
    "plain/backward1": unclipped("backward", 1, "host"),
    "plain/backward3": unclipped("backward", 3, "nvme"),
    "plain/forward0": unclipped("forward", 0, "nvme"),
    "plain/backward0": unclipped("backward", 0, "nvme"),
    "fp32/stage3": {**clipped(train={"precision": "fp32"}), "recipe": ACCUMULATED},
    "fp32/stage2": {**clipped(2, train={"precision": "fp32"}, placement=OFFLOADED), "recipe": ACCUMULATED},
    "fp32/stage1": {**clipped(1, train={"precision": "fp32"}, placement=OFFLOADED), "recipe": ACCUMULATED},
    "fp32/stage0": {**clipped(0, train={"precision": "fp32"}), "recipe": ACCUMULATED},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(Job(folder / "job", RUNS, folder / "nvme"))


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("stage3/", "stage0/"))])
def test_placement_changes_no_bit_within_a_stage(name: str, results: dict[str, Result]) -> None:
    assert_identical(results[name], results[name.split("/")[0] + "/host"], name)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("plain/")])
def test_without_clipping_overlap_and_stage_change_no_bit(name: str, results: dict[str, Result]) -> None:
    """Two ranks' gradients are summed in one addition, so that even the stages agree."""
    assert_identical(results[name], results["plain/forward3"], name)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("stage1/", "stage2/"))])
def test_what_is_sharded_changes_no_bit(name: str, results: dict[str, Result]) -> None:
    assert_identical(results[name], results["stage3/host"], name)


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation_is_alike_in_the_sharded_stages(stage: int, results: dict[str, Result]) -> None:
    assert_identical(results[f"fp32/stage{stage}"], results["fp32/stage3"], f"stage {stage}")


@pytest.mark.parametrize("name", [f"fp32/stage{stage}" for stage in range(4)])
def test_the_loss_curve_is_that_of_the_whole_batch(name: str, results: dict[str, Result]) -> None:
    wanted = train_plain(net(), Recipe(**ACCUMULATED))
    torch.testing.assert_close(results[name].losses, wanted.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(results[name].norms, wanted.norms, rtol=1e-5, atol=0)


def test_ranks_hold_shards_and_move_what_the_stages_say(results: dict[str, Result]) -> None:
    """Bytes per step: stage 3 gathers each unit twice and reduces once, stage 0 only all-reduces."""
    three, zero = results["stage3/nvme"].stats, results["stage0/nvme"].stats
    parameters = three["parameters"]
    assert three["state_bytes"] < 0.6 * zero["state_bytes"]
    assert three["comm_bytes"]["all_reduce"] == 0
    assert zero["comm_bytes"]["all_gather"] == zero["comm_bytes"]["reduce_scatter"] == 0
    padding = 1.05
    whole = 2 * parameters
    assert 2 * whole <= zero["comm_bytes"]["all_reduce"] <= 2 * padding * whole
    assert whole <= three["comm_bytes"]["reduce_scatter"] <= padding * whole
    assert three["comm_bytes"]["all_gather"] <= 2 * padding * whole


def test_another_seed_or_data_would_be_noticed(results: dict[str, Result]) -> None:
    with pytest.raises(AssertionError, match="differs in"):
        assert_same_state(results["plain/forward3"].state, results["stage3/host"].state)
