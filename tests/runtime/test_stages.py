"""The ZeRO stages' arithmetic, counted in real runs on 1, 2 and 4 ranks: persistent bytes and collective volume."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.models import GPT
from tierzero.profiling.stages import formula_bytes

from ..support.rank_pool import RankPool

STEPS = 3
PADDING = 1.03
"""What alignment may add to this model, which is small."""

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(dim=64, layers=10, heads=2, vocab=128, seq_len=32, tied=False)


def settings(nvme: Path, stage: int, precision: str, **sections: dict[str, Any]) -> tz.Config:
    return tz.Config.from_dict(
        {
            "train": {"precision": precision},
            "tiers": {"nvme": [str(nvme)], "tile": 4096, "prefetch": 0, "device": "64MiB", "host": "256MiB"},
            "sharding": {"stage": stage, "min_unit": 0},
        }
        | sections
    )


def train(rank: int, size: int, config: tz.Config) -> dict[str, Any]:
    """Trains on rows of its own; the last step's figures and every loss."""
    network = tz.shard(model(), config)
    try:
        optimizer = tz.AdamW(network.parameters(), lr=1e-3)
        losses = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(128, (4, 33), generator=generator)[rank * 4 // size : (rank + 1) * 4 // size]
            loss = network(ids[:, :-1], ids[:, 1:])
            loss.backward()
            losses.append(loss.item())
            tz.clip_grad_norm_(network, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return tz.stats(network) | {"losses": losses}
    finally:
        tz.close(network)


def figures(rank: int, size: int, nvme: str, stage: int, precision: str) -> dict[str, Any]:
    return train(rank, size, settings(Path(nvme), stage, precision))


Figures = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What every rank counted in a run at a stage, by stage and precision; each is run once."""
    nvme = tmp_path_factory.mktemp("nvme")
    return functools.cache(lambda stage, precision: ranks.run(figures, str(nvme), stage, precision))


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        *[(stage, "bf16") for stage in range(4)],
        *[pytest.param(stage, "fp16", marks=pytest.mark.long) for stage in range(3)],
        (3, "fp16"),
    ],
)
def test_persistent_bytes_are_the_formulas(stage: int, precision: str, ranks: RankPool, found: Figures) -> None:
    wanted = formula_bytes(stage, ranks.size, precision)
    for own in found(stage, precision):
        for kind, size in wanted.items():
            held = sum(own["placement"][kind].values())
            assert size * own["parameters"] <= held <= PADDING * size * own["parameters"], (kind, size)
        total = sum(wanted.values())
        assert total * own["parameters"] <= own["state_bytes"] <= 1.25 * total * own["parameters"]


def test_the_formulas_are_the_papers() -> None:
    n = 4
    totals = {
        precision: [sum(formula_bytes(stage, n, precision).values()) for stage in range(4)]
        for precision in ("fp16", "bf16")
    }
    assert totals["fp16"] == [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
    assert totals["bf16"] == [14, 4 + 10 / n, 2 + 12 / n, 14 / n]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collective_volume_is_the_formulas(stage: int, ranks: RankPool, found: Figures) -> None:
    """Weights and gradients of 2 bytes. At stage 3 the forward's last units are still there for the backward."""
    for own in found(stage, "bf16"):
        moved = {name: nbytes / (2 * own["parameters"]) for name, nbytes in own["comm_bytes"].items()}
        if ranks.size == 1:
            assert moved == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
        elif stage == 0:
            assert moved["all_gather"] == moved["reduce_scatter"] == 0
            assert 2 <= moved["all_reduce"] <= 2 * PADDING
        else:
            assert moved["all_reduce"] == 0
            assert 1 <= moved["reduce_scatter"] <= PADDING
            gathers = 2 if stage == 3 else 1
            kept = 0.25 if stage == 3 else 0
            assert gathers - kept <= moved["all_gather"] <= gathers * PADDING


def test_all_stages_train_alike(ranks: RankPool, found: Figures) -> None:
    """An all-reduce of more than two ranks adds in another order than a reduce-scatter."""
    curves = [[own["losses"] for own in found(stage, "fp32")] for stage in range(4)]
    assert curves[1] == curves[2] == curves[3]
    for zero, three in zip(curves[0], curves[3], strict=True):
        assert zero == (pytest.approx(three, rel=1e-6) if ranks.size > 2 else three)
    assert curves[0][0][0] > curves[0][0][-1]


def refused(rank: int, size: int, nvme: str, stage: int, placement: dict[str, str]) -> str:
    try:
        tz.shard(model(), settings(Path(nvme), stage, "bf16", placement=placement))
    except tz.ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("stage", "kind", "advice"),
    [(2, "params", "use stage 3"), (1, "params", "use stage 3"), (1, "gradients", "use stage 2 or more")],
)
def test_what_is_kept_whole_cannot_be_offloaded(
    stage: int, kind: str, advice: str, ranks: RankPool, tmp_path: Path
) -> None:
    for place in ("nvme", {"host": 0.5, "nvme": 0.5}):
        for message in ranks.run(refused, str(tmp_path), stage, {kind: place}):
            assert message.startswith(f"placement.{kind}: sharding.stage = {stage} keeps all {kind}")
            assert advice in message


def kept_figures(rank: int, size: int, nvme: str, reshard: bool | list[str]) -> dict[str, Any]:
    sharding = {"stage": 3, "min_unit": 0, "reshard_after_forward": reshard}
    return train(rank, size, settings(Path(nvme), 3, "bf16", sharding=sharding))


def test_units_kept_gathered_are_gathered_once(ranks: RankPool, tmp_path: Path) -> None:
    if ranks.size != 2:
        pytest.skip("two ranks say it")
    blocks = sum(parameter.numel() for parameter in model().blocks.parameters())
    share = blocks / sum(parameter.numel() for parameter in model().parameters())
    wanted = ranks.run(kept_figures, str(tmp_path), True)
    for reshard, gathers in ((False, 1.0), (["blocks.*"], 2 - share), (["blocks.0", "blocks.1"], 2 - 0.2 * share)):
        for found, plain in zip(ranks.run(kept_figures, str(tmp_path), reshard), wanted, strict=True):
            moved = found["comm_bytes"]["all_gather"] / (2 * found["parameters"])
            assert gathers - 0.3 * (gathers > 1) <= moved <= gathers * PADDING
            assert found["losses"] == plain["losses"]


def test_a_unit_to_keep_that_is_none_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, 3, "bf16", sharding={"reshard_after_forward": ["block"]})
    with pytest.raises(tz.ConfigError, match=r"reshard_after_forward: no unit is named 'block'; there are \(root\)"):
        tz.shard(model(), config)
