"""Names of parameters are no file names: however long and odd, they train, are saved and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import TIERS, Case, assert_close, config, hyper, sharded, train_plain, train_sharded
from ..support.zoo import DIM, regression

ODD = ("a b/c", "ümläut 漢字", "x" * 300, "-rf", "$HOME", "new\nline")


def build() -> nn.Module:
    model = nn.Sequential()
    for name in ODD:
        model.add_module(name, nn.Linear(DIM, DIM))
        model.add_module(f"{name} tanh", nn.Tanh())
    for _ in range(12):  # paths of more than 4096 characters
        outer = nn.Sequential()
        outer.add_module("deep" * 100, model)
        model = outer
    return model


CASE = Case(build, regression, (nn.Linear,), steps=3)


@pytest.mark.parametrize("tier", TIERS)
def test_training(tier: str, tmp_path: Path) -> None:
    assert_close(train_sharded(CASE, config(tmp_path, tier)), train_plain(CASE))


def test_saving_and_loading(tmp_path: Path) -> None:
    for path in (tmp_path / "nvme", tmp_path / "other"):
        path.mkdir()
    with sharded(build(), config(tmp_path / "nvme"), CASE.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(CASE))
        regression(model, 0, 0).backward()
        optimizer.step()
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        wanted = tz.full_state_dict(model)
    with sharded(build(), config(tmp_path / "other", "host"), CASE.units) as model:
        tz.load_checkpoint(model, tz.AdamW(model.parameters(), **hyper(CASE)), tmp_path / "saved")
        found = tz.full_state_dict(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], values) for name, values in wanted.items())
