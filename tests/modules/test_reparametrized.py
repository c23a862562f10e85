"""Weights computed from others, also where that happens outside the unit's forward, and parametrizations added late."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import tierzero as tz

from ..support.compared import assert_alike, trained
from ..support.oracle import TIERS, Case, assert_close, built, config, sharded, train_plain, train_sharded
from ..support.zoo import DIM, Block, Reparametrized, Stack, regression, vectors


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


class Doubled(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    def right_inverse(self, values: torch.Tensor) -> torch.Tensor:
        return values / 2


class Symmetric(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.triu() + values.triu(1).t()


def pruned_and_doubled() -> nn.Module:
    model = Stack()
    prune.l1_unstructured(model.blocks[1].up, "weight", 0.5)
    parametrize.register_parametrization(model.last, "weight", Doubled())
    return model


def prune_two(model: nn.Module) -> None:
    prune.l1_unstructured(model.last, "weight", 0.5)
    prune.l1_unstructured(model.blocks[1].up, "weight", 0.5)


def parametrize_two(model: nn.Module) -> None:
    parametrize.register_parametrization(model.last, "weight", Symmetric())
    parametrize.register_parametrization(model.blocks[1].up, "bias", Doubled())


def make_orthogonal(model: nn.Module) -> None:
    torch.manual_seed(0)
    parametrizations.orthogonal(model.last)
    parametrizations.spectral_norm(model.blocks[1].up)


def take_off(model: nn.Module) -> None:
    prune.remove(model.blocks[1].up, "weight")
    parametrize.remove_parametrizations(model.last, "weight")


def assign(model: nn.Module) -> None:
    model.last.weight = torch.eye(DIM)


CHANGES: tuple[tuple[Callable[[nn.Module], None], Callable[[], nn.Module], bool], ...] = (
    (prune_two, Stack, False),
    (parametrize_two, Stack, True),
    (make_orthogonal, Stack, True),
    (take_off, pruned_and_doubled, True),
    (assign, pruned_and_doubled, True),
)
"""What is done to a sharded model, to which model, and whether it sets values: then inside `tierzero.gathered` only."""


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.long), "nvme"])
@pytest.mark.parametrize(("change", "build", "sets"), CHANGES, ids=[change.__name__ for change, *_ in CHANGES])
def test_changes_after_sharding(
    change: Callable[[nn.Module], None], build: Callable[[], nn.Module], sets: bool, tier: str, tmp_path: Path
) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return regression(model, step, 0)

    def act(model: nn.Module) -> list[torch.Tensor]:
        before = trained(model, loss)
        values_are_there = tz.gathered(model.parameters()) if sets else contextlib.nullcontext()
        plain = not hasattr(model.first.weight, "_tierzero")
        with contextlib.nullcontext() if plain else values_are_there:
            change(model)
        return before + trained(model, loss)

    assert_alike(build, act, tmp_path, tier, (Block,))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("change", "build"), [(change, build) for change, build, sets in CHANGES if sets], ids=lambda it: it.__name__
)
def test_setting_values_that_are_away_is_refused(
    change: Callable[[nn.Module], None], build: Callable[[], nn.Module], tier: str, tmp_path: Path
) -> None:
    with sharded(build(), config(tmp_path, tier), (Block,)) as model:
        before = [tz.read_state(parameter, "weight") for parameter in model.parameters()]
        with pytest.raises((RuntimeError, tz.NotResidentError)) as refusal:
            change(model)
        assert "tierzero.gathered" in str(refusal.value) + str(refusal.value.__cause__)
        after = [tz.read_state(parameter, "weight") for parameter in model.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
