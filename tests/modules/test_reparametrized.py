"""Weights computed from others, also where that happens outside the unit's forward, and parametrizations added late."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import tierzero as tz

from ..support.oracle import TIERS, Case, assert_close, built, config, sharded, train_plain, train_sharded
from ..support.zoo import DIM, Reparametrized, regression, vectors


def old_weight_norm(linear: nn.Linear) -> nn.Module:
    """The older way: a hook computes the weight before the module's forward, and so before the unit's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed: nn.Module = nn.utils.weight_norm(linear)
        return normed


def test_weights_computed_by_a_hook(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(old_weight_norm(nn.Linear(DIM, DIM)), nn.Tanh(), old_weight_norm(nn.Linear(DIM, DIM)))

    case = Case(build, regression, (nn.Linear,), eps=1e-6)
    for tier in TIERS:
        assert_close(train_sharded(case, config(tmp_path, tier)), train_plain(case))


@pytest.mark.parametrize("tier", TIERS)
def test_computed_weight_read_from_outside(tier: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return regression(model, step, rank) + 0.1 * model.normed.weight.square().sum()

    case = Case(Reparametrized, loss, (nn.Linear,), eps=1e-5)
    assert_close(train_sharded(case, config(tmp_path, tier)), train_plain(case))


def test_state_dict_round_trip(tmp_path: Path) -> None:
    plain = built(Case(Reparametrized, regression))
    with sharded(built(Case(Reparametrized, regression)), config(tmp_path), (nn.Linear,)) as model:
        assert tz.full_state_dict(model).keys() == plain.state_dict().keys()
        tz.save_checkpoint(model, None, tmp_path / "saved")
    torch.manual_seed(9)
    with sharded(Reparametrized(), config(tmp_path), (nn.Linear,)) as model:
        tz.load_checkpoint(model, None, tmp_path / "saved")
        other = Reparametrized()
        other.load_state_dict(tz.full_state_dict(model))
        x = vectors(0, 0)
        assert torch.equal(model.eval()(x), other.eval()(x))


def test_parametrization_added_after_sharding_is_refused(tmp_path: Path) -> None:
    """It would make new parameters that nothing has sharded; the model stays as it was."""
    with sharded(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), config(tmp_path), (nn.Linear,)) as model:
        before = model(vectors(0, 0))
        with pytest.raises(RuntimeError, match="PagedParameter"):
            parametrizations.weight_norm(model[0])
        assert torch.equal(model(vectors(0, 0)), before)
        F.mse_loss(model(vectors(0, 0)), vectors(1, 0)).backward()
        assert tz.read_state(model[0].weight, "gradient").abs().sum() > 0
