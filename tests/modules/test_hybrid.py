"""Hybrid sharding on four ranks: divided inside pairs, a copy in each pair, the values of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tierzero as tz

from ..support.cases import CASES
from ..support.oracle import (
    Case,
    Outcome,
    assert_bits,
    assert_close,
    built,
    config,
    hyper,
    record_state,
    sharded,
    take_steps,
    train_plain,
)
from ..support.rank_pool import RankPool

SHARDS = 2


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    ranks = RankPool(4)
    yield ranks
    ranks.close()


def ten_steps(name: str) -> Case:
    case = CASES[name]
    return Case(case.build, case.loss, case.units, max(10, case.steps), max(case.eps, 1e-6), 0.3)


def train(case: Case, settings: tz.Config, rank: int, size: int, folder: Path | None = None) -> Outcome:
    mesh = init_device_mesh("cpu", (size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    with sharded(built(case), settings, case.units, mesh=mesh) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(case))
        outcome = take_steps(case, model, optimizer, rank, size)
        record_state(model, outcome)
        state = tz.full_state_dict(model)
        for name, weight in outcome.weights.items():
            assert torch.equal(state[name], weight), name
        if folder is not None:
            tz.save_checkpoint(model, optimizer, folder)
        stats = tz.stats(model)
        moved, parameters = stats["comm_bytes"], 4 * stats["parameters"]
        assert moved["all_reduce"] >= 2 * moved["reduce_scatter"] / SHARDS > 0
        assert sum(stats["placement"]["optimizer"].values()) <= 0.75 * 2 * parameters
        return outcome


def as_rank(rank: int, size: int, name: str, nvme: str) -> None:
    case = ten_steps(name)
    wanted = train_plain(case, size)
    found = {}
    for stage in (3, 2, 1):
        settings = config(Path(nvme), "nvme" if stage == 3 else "host", sharding={"stage": stage})
        found[stage] = train(case, settings, rank, size)
        assert_close(found[stage], wanted, tolerance=5e-5)
    for stage in (2, 1):
        assert_bits(found[stage], found[3])


@pytest.mark.parametrize(
    "name",
    [
        "odd",
        "mixture",
        pytest.param("tied", marks=pytest.mark.long),
        pytest.param("skipping", marks=pytest.mark.long),
    ],
)
def test_a_mesh_of_two_dimensions_divides_and_replicates(name: str, tmp_path: Path, four_ranks: RankPool) -> None:
    four_ranks.run(as_rank, name, str(tmp_path))


def save_as_rank(rank: int, size: int, folder: str, nvme: str) -> dict[str, torch.Tensor]:
    return train(ten_steps("tied"), config(Path(nvme)), rank, size, Path(folder)).weights


def test_its_checkpoint_loads_on_one_rank(tmp_path: Path, four_ranks: RankPool) -> None:
    weights = four_ranks.run(save_as_rank, str(tmp_path / "saved"), str(tmp_path))
    for other in weights[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in weights[0].items())
    case = ten_steps("tied")
    with sharded(built(case), config(tmp_path), case.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(case))
        tz.load_checkpoint(model, optimizer, tmp_path / "saved")
        state = tz.full_state_dict(model)
        assert all(torch.equal(state[name], weight) for name, weight in weights[0].items())


def refused(rank: int, size: int) -> str:
    try:
        tz.shard(built(ten_steps("odd")), mesh=init_device_mesh("cpu", (2, 2, 1)))
    except tz.ConfigError as error:
        return str(error)
    return "nothing"


def test_a_mesh_of_three_dimensions_is_refused(four_ranks: RankPool) -> None:
    assert all("one dimension" in message and "or of two" in message for message in four_ranks.run(refused))
