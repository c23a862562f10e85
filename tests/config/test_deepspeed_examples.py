"""Configurations of DeepSpeed as people have them, from Python and by the command."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tierzero as tz
from tierzero.cli.app import app
from tierzero.config import Config
from tierzero.config.deepspeed import translate

from ..support.deepspeed import INFINITY, TRAINER, ZERO_2_OFFLOAD, ZERO_3_CPU

ZERO = "zero_optimization"


def check(given: dict[str, Any], expected: dict[str, Any], differing: list[str], ranks: int | None = None) -> None:
    translation = translate(given, ranks)
    assert translation.config.given() == expected
    assert sorted(entry.key for entry in translation.differing) == sorted(differing)


def test_stage_2_with_the_optimizer_on_the_host() -> None:
    expected = {
        "train": {"batch_size": 64, "micro_batch": 4, "precision": "fp16", "grad_clip": 1.0},
        "placement": {"params": "device", "optimizer": "host", "gradients": "host"},
        "sharding": {"stage": 2},
        "optimizer": {"name": "adamw", "lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        "log": {"every": 10},
    }
    check(ZERO_2_OFFLOAD, expected, [])


def test_stage_3_on_the_host() -> None:
    expected = {
        "train": {"batch_size": 64, "micro_batch": 2, "precision": "bf16", "grad_clip": 0.0},
        "placement": {"params": "host", "optimizer": "host", "gradients": "host"},
        "sharding": {"stage": 3},
    }
    check(ZERO_3_CPU, expected, [], ranks=4)


def test_infinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = {
        "train": {"batch_size": 16, "precision": "bf16", "grad_clip": 0.5},
        "tiers": {"nvme": [str(tmp_path / "nvme")]},
        "placement": {"params": "nvme", "optimizer": "nvme", "gradients": "host"},
        "sharding": {"stage": 3},
        "io": {"block_size": 2**20, "queue_depth": 16},
    }
    check(INFINITY, expected, [f"{ZERO}.offload_param.max_in_cpu"])


def test_one_for_the_trainer() -> None:
    """Its defaults where it has some, and every "auto" that waits for a value is named."""
    expected = {
        "train": {"precision": "bf16", "grad_clip": 1.0},
        "placement": {"params": "device", "optimizer": "host", "gradients": "host"},
        "sharding": {"stage": 3},
        "optimizer": {
            "name": "adamw",
            "lr": 5e-5,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "schedule": "constant",
            "warmup": 0,
        },
        "log": {"every": 2000},
    }
    waiting = [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")]
    waiting += ["scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "bf16.enabled"]
    waiting += ["gradient_accumulation_steps", "gradient_clipping", "train_batch_size"]
    misplaced = [f"{ZERO}.aio.block_size", f"{ZERO}.aio.queue_depth"]
    saved = [f"{ZERO}.stage3_gather_16bit_weights_on_model_save"]
    check(TRAINER, expected, [*waiting, "train_micro_batch_size_per_gpu", "scheduler.type", *misplaced, *saved])
    advice = {entry.key: entry.why for entry in translate(TRAINER).differing}
    assert all("the Trainer" in advice[key] for key in waiting)
    assert "did you mean aio.block_size?" in advice[misplaced[0]]


def test_the_script_of_the_guide_trains(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    file = tmp_path / "ds.json"
    quiet = {**INFINITY, ZERO: {**INFINITY[ZERO], "offload_param": {"device": "nvme", "nvme_path": "nvme"}}}
    file.write_text(json.dumps({**quiet, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}))
    config = Config.from_deepspeed(file)
    torch.manual_seed(0)
    model = tz.shard(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)), config)
    section = config.optimizer
    optimizer = tz.AdamW(model.parameters(), section.lr, section.betas, section.eps, section.weight_decay)
    inputs = torch.randn(64, 16)
    losses = []
    for _ in range(8):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        tz.clip_grad_norm_(model, config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    placed = tz.stats(model)["placement"]
    tz.close(model)
    assert losses[-1] < losses[0] - 1
    assert all(
        {tier for tier, nbytes in placed[kind].items() if nbytes} == {"nvme"} for kind in ("params", "optimizer")
    )


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["import-config", *map(str, arguments)])


@pytest.fixture
def infinity(tmp_path: Path) -> Path:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**INFINITY, "odd\ud800": 1}))
    return file


def test_the_command_prints_toml_and_the_table_beside_it(infinity: Path) -> None:
    result = run(infinity)
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout) == translate(infinity).config.given()
    assert "# zero_optimization.offload_param.device" in result.stdout
    for entry in translate(infinity).entries:
        assert sum(line.startswith(f"  {entry.key} = ".encode("utf-8", "backslashreplace").decode())
                   for line in result.stderr.splitlines()) == 1  # fmt: skip
    assert "differs: look at these (1)" in result.stderr


def test_the_command_writes_a_new_file_only(infinity: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "run.toml"
    assert "cannot write" in run(infinity, "--out", out).stderr
    out.parent.mkdir()
    first = run(infinity, "--out", out)
    assert (first.exit_code, first.stderr) == (0, "")
    assert "mapped (" in first.stdout
    assert Config.load(out) == translate(infinity).config
    again = run(infinity, "--out", out)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_the_command_prints_one_object(infinity: Path) -> None:
    result = run(infinity, "--json", "--ranks", "4")
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert tomllib.loads(report["toml"]) == report["config"]
    assert {row["key"]: row["tierzero"] for row in report["keys"]}["aio.queue_depth"] == ["io.queue_depth"]
    assert [row["key"] for row in report["keys"]] == [entry.key for entry in translate(infinity).entries]


def test_the_command_says_in_a_line_what_must_change(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**TRAINER, "optimizer": {"type": "Lion"}}))
    result = run(file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f'tierzero: error: {file}: optimizer.type = "Lion": there are AdamW and Adam')
    assert result.stderr.count("\n") == 1


def test_a_peak_that_waits_to_be_filled_in_is_the_optimizers() -> None:
    given = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 10}},
    }
    assert translate(given).config.optimizer.lr == 3e-4
