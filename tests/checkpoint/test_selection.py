"""Adapters alone: of a checkpoint and of a running model, without the rest ever being held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import tierzero as tz
from tierzero import reaching
from tierzero.api import running
from tierzero.cli.app import app

from ..support.oracle import Case, built, config, hyper, sharded
from ..support.zoo import Adapted, Lora, language

LORA = Case(Lora, language, (Adapted, "embed", "head"))
ADAPTERS = {f"layers.{layer}.{part}.weight" for layer in range(3) for part in "ab"}


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = tz.AdamW(model.parameters(), **hyper(LORA))
    language(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_adapters_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    with sharded(built(LORA), config(tmp_path / "nvme"), LORA.units) as model:
        tz.save_checkpoint(model, trained(model), tmp_path / "saved")
        wanted = tz.full_state_dict(model)
    tz.export_safetensors(tmp_path / "saved", tmp_path / "out", only=["*.a.weight", "*.b.weight"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == ADAPTERS
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    with pytest.raises(tz.ConfigError, match=r"no tensor of the checkpoint matches '\*lora\*'"):
        tz.export_safetensors(tmp_path / "saved", tmp_path / "none", only=["*lora*"])
    assert not (tmp_path / "none").exists()
    command = ["export", str(tmp_path / "saved"), str(tmp_path / "command"), "--only", "*.a.weight"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert len(load_file(tmp_path / "command" / "model.safetensors")) == 3
    assert CliRunner().invoke(app, [*command, "--format", "dcp"]).exit_code == 2


def test_adapters_of_a_running_model(tmp_path: Path) -> None:
    with sharded(built(LORA), config(tmp_path), LORA.units) as model:
        trained(model)
        everything = tz.full_state_dict(model)
        runtime = running(model)
        for unit in runtime.units:
            runtime.pager.forget(unit)
        found = tz.full_state_dict(model, only=["layers.1.?.weight"])
        assert found.keys() == {"layers.1.a.weight", "layers.1.b.weight"}
        assert all(torch.equal(value, everything[name]) for name, value in found.items())
        assert not [
            unit.title for unit in runtime.units if runtime.pager.is_here(unit) and "layers.1" not in unit.title
        ]


def test_more_than_is_free_is_not_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "available_bytes", lambda: 1000)
    monkeypatch.setattr(reaching, "_WORTH_ASKING", 1000)
    with sharded(built(LORA), config(tmp_path), LORA.units) as model:
        with pytest.raises(tz.BudgetError, match="enter with fewer") as refused, tz.gathered(model.parameters()):
            pytest.fail("gathered")
        assert refused.value.missing == 4 * sum(p.numel() for p in model.parameters()) - 1000
        with tz.gathered(model.layers[0].a.weight):
            assert model.layers[0].a.weight.data.any()
