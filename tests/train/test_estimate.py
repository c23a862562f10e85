"""`tierzero estimate` against what real runs of the bundled configurations hold and move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tierzero as tz
from tierzero.cli.app import app
from tierzero.config import Config
from tierzero.models import GPT, bundled_model
from tierzero.planner.estimate import OFFLOADS, Estimate, Limits
from tierzero.sharding.stages import KINDS
from tierzero.train import _build
from tierzero.training.estimated import activations_of, estimate_config, estimate_parameters
from tierzero.training.ranks import Ranks, micro_batches

from ..support.live import Live
from ..support.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
SMALL = [path for path in sorted((ROOT / "configs").glob("*.toml")) if path.stem != "gpu"]
WITHIN = 0.05


def near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= WITHIN * max(wanted, 1)


def one_step(config: Config, rows: int) -> dict[str, Any]:
    """Figures of a step of ``rows`` sequences, and of the state that it leaves."""
    model = _build(config)
    try:
        optimizer = tz.AdamW(model.parameters())
        for step in range(2):
            ids = torch.full((rows, config.train.seq_len), step)
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        return tz.stats(model)
    finally:
        tz.close(model)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_a_bundled_configuration_holds_what_was_estimated(path: Path, tmp_path: Path) -> None:
    config = Config.load(path).override(["train.seq_len=16", "activations.recompute='unit'"])
    if config.tiers.nvme:
        config = config.override([f"tiers.nvme=['{tmp_path}']"])
    report = estimate_config(config, 1, 1, Limits(), device_is_host=True)
    found = one_step(config, 1)
    assert report.parameters == found["parameters"]
    row = next(row for row in report.rows if row.stage == config.sharding.stage)
    for kind in KINDS:
        wanted = sum(places.get(kind, 0) for places in row.state.values())
        assert near(sum(found["placement"][kind].values()), wanted), kind


def tiny(nvme: str) -> Config:
    return Config.from_dict(
        {
            "model": {"dim": 128, "layers": 8, "heads": 2, "vocab": 256},
            "train": {"batch_size": 2, "seq_len": 16},
            "tiers": {"nvme": [nvme], "tile": 8192, "prefetch": 0},
            "sharding": {"min_unit": 0},
        }
    )


def counted(rank: int, size: int, nvme: str, stage: int, placement: dict[str, str], budgets: dict[str, int]) -> Any:
    sections = {"placement": placement, "tiers": budgets, "sharding": {"stage": stage}}
    sections["optimizer"] = {"overlap": "forward"}  # an estimate is of the state, not of second slots
    keys = [f"{name}.{key}={json.dumps(value)}" for name, keys in sections.items() for key, value in keys.items()]
    return one_step(tiny(nvme).override(keys), 1)


def test_every_stage_on_two_ranks_is_as_estimated(tmp_path: Path) -> None:
    """Within the memory that it says, too: as budgets it is accepted, and suffices."""
    report = estimate_config(tiny(str(tmp_path)), 2, 1, Limits(), device_is_host=True)
    ranks = RankPool(2)
    try:
        for row in report.rows:
            if row.stage == 0:
                continue
            placement = {kind: tier for tier, kinds in row.state.items() for kind in kinds}
            assert row.activations is not None
            budgets = {"device": row.totals["device"] - row.activations, "host": 2 * row.totals["host"]}
            for found in ranks.run(counted, str(tmp_path), row.stage, placement, budgets):
                check_against(row, found)
    finally:
        ranks.close()


def check_against(row: Estimate, found: dict[str, Any]) -> None:
    for kind in KINDS:
        for tier, kinds in row.state.items():
            assert near(found["placement"][kind][tier], kinds.get(kind, 0)), (row, kind, tier)
    for name, nbytes in row.volume.items():
        # What the end of the forward leaves gathered need not be gathered for the backward.
        kept = 0.2 * nbytes if (row.stage, name) == (3, "all_gather") else 0
        assert nbytes * (1 - WITHIN) - kept <= found["comm_bytes"][name] <= nbytes * (1 + WITHIN), (row, name)
    assert near(found["peak_tier_bytes"]["nvme"], row.totals["nvme"])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(64, 4, 2, 256, 32, 3), (96, 6, 4, 1000, 64, 2)])
def test_activations_are_what_a_forward_keeps(precision: str, shape: tuple[int, ...]) -> None:
    dim, layers, heads, vocab, seq_len, rows = shape
    config = Config.from_dict(
        {
            "model": {"dim": dim, "layers": layers, "heads": heads, "vocab": vocab},
            "train": {"seq_len": seq_len, "batch_size": rows, "precision": precision},
        }
    )
    estimated = activations_of(config, rows)
    model: GPT = bundled_model(config).to({"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    ids = torch.zeros(rows, seq_len, dtype=torch.int64)
    with Live(model) as live:
        loss = model(ids, ids)
        kept = live.nbytes()
    assert near(kept, estimated.kept("none"))
    assert loss.requires_grad
    inputs = rows * seq_len * dim * {"bf16": 2, "fp32": 4}[precision]
    assert estimated.inputs == (inputs,) * layers
    assert estimated.kept("unit") == estimated.around + layers * inputs
    assert estimated.kept(2) == estimated.around + -(-layers // 2) * inputs
    assert estimated.peak(2) == estimated.kept(2) + 2 * estimated.blocks[0]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["estimate", *words])
    return result.exit_code, result.stdout, result.stderr


def test_json_is_one_object_with_every_row() -> None:
    code, out, _ = run("--params", "7e9", "--ranks", "8", "--gpu", "--device", "80GB", "--host", "100GB", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["parameters"] == 7_000_000_000
    rows = {(row["stage"], row["offload"]): row for row in found["rows"]}
    assert rows[0, "none"]["total_bytes"]["device"] == pytest.approx(14 * 7e9, rel=1e-3)
    assert rows[1, "none"]["total_bytes"]["device"] == pytest.approx((4 + 10 / 8) * 7e9, rel=1e-3)
    assert rows[2, "none"]["total_bytes"]["device"] == pytest.approx((2 + 12 / 8) * 7e9, rel=1e-3)
    assert rows[3, "none"]["total_bytes"]["device"] == pytest.approx(14 / 8 * 7e9, rel=1e-3)
    assert rows[0, "none"]["fits"] is False
    assert found["cheapest"] == {"stage": 1, "offload": "none"}
    assert sum(rows[3, "none"]["comm_bytes"].values()) == pytest.approx(3 * 2 * 7e9, rel=1e-3)


def test_fp16_has_a_master_of_its_own() -> None:
    report = estimate_parameters(1_000_000, "fp16", 4, 1, Limits(), device_is_host=False)
    totals = {row.stage: sum(sum(places.values()) for places in row.state.values()) for row in report.rows}
    for stage, wanted in enumerate((16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4)):
        assert totals[stage] == pytest.approx(wanted * 1_000_000, rel=0.01)


def test_what_does_not_fit_says_by_how_much() -> None:
    report = estimate_parameters(10**9, "bf16", 2, 1, Limits(device=10**9), device_is_host=False)
    row = next(row for row in report.rows if (row.stage, row.offload) == (0, "none"))
    assert row.missing == {"device": row.totals["device"] - 10**9}
    assert report.cheapest is not None
    assert OFFLOADS.index(report.cheapest.offload) > 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "either a configuration file or --params"),
        (("--params", "many"), "no number of parameters"),
        (("--params", "1e9", "--ranks", "0"), "--ranks"),
        (("--params", "1e9", "--ranks", "3", "--nodes", "2"), "cannot be divided among 2 nodes"),
        (("--params", "1e9", "--precision", "int8"), "use bf16, fp16 or fp32"),
        (("--params", "1e9", "--device", "much"), "is no size"),
        (("nowhere.toml",), "nowhere.toml"),
        ((str(ROOT / "configs/quickstart.toml"), "--ranks", "7"), "cannot be divided among 7 ranks"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words: tuple[str, ...], part: str) -> None:
    code, out, err = run(*words)
    assert code == 2
    assert part in out + err


def test_a_huge_model_is_estimated_at_once() -> None:
    config = Config.from_dict(
        {"model": {"dim": 16384, "layers": 128, "heads": 128, "vocab": 50304}, "train": {"batch_size": 64}}
    )
    own = micro_batches(config, Ranks(0, 64, 0, 8))
    report = estimate_config(config, 64, 8, Limits(device=80 * 10**9), device_is_host=False)
    assert own == (1, 1)
    assert report.parameters > 4e11
    assert all(row.activations for row in report.rows)
