"""Frozen parts: nothing is written or kept for them, and what is frozen may change while training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import TIERS, Case, assert_close, config, hyper, sharded, train_plain, train_sharded
from ..support.zoo import Adapted, Block, Lora, Stack, language, regression

LORA = Case(Lora, language, (Adapted, "embed", "head"))


class Large(nn.Module):
    """A frozen base of 4 MiB on NVMe, adapters of a few KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 512).requires_grad_(False)
        self.a = nn.Linear(512, 2, bias=False)
        self.b = nn.Linear(2, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def test_frozen_weights_are_only_read(tmp_path: Path) -> None:
    placement = {"params": "device", "frozen": "nvme", "optimizer": "device", "gradients": "device"}
    settings = config(tmp_path, placement=placement)
    model = nn.Sequential(*(Large() for _ in range(4)))
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    with sharded(model, settings, (Large,)):
        optimizer = tz.AdamW(model.parameters(), lr=1e-3)
        before = tz.full_state_dict(model)
        for step in range(4):
            model(torch.randn(3, 512)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                found = tz.stats(model)
                assert found["nvme_write_bytes"] == 0
                assert found["nvme_read_bytes"] >= 4 * frozen // 2
        state = tz.stats(model)["placement"]
        assert state["params"]["nvme"] >= 4 * frozen
        assert state["params"]["host"] == 0 < state["params"]["device"] < 4 * (adapters + 4 * 2048)
        assert sum(state["optimizer"].values()) < 3 * 4 * (adapters + 4 * 2048)
        assert sum(state["gradients"].values()) < 4 * (adapters + 4 * 2048)
        after = tz.full_state_dict(model)
        for name, value in before.items():
            assert torch.equal(after[name], value) == ("base" in name), name
        with pytest.raises(ValueError, match=r"'0\.base\.weight' is frozen"):
            tz.read_state(model[0].base.weight, "m")


def test_all_frozen_but_one_bias(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Stack().requires_grad_(False)
        model.first.bias.requires_grad_(True)
        return model

    case = Case(build, regression, (Block,))
    assert_close(train_sharded(case, config(tmp_path)), train_plain(case))


def toggling(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Block 1 rests in steps 2 to 4, the head in step 3; the others always train."""
    model.blocks[1].requires_grad_(not 2 <= step <= 4)
    for parameter in model.last.parameters():
        parameter.requires_grad = step != 3
    return regression(model, step, rank)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("tier", TIERS)
def test_freezing_and_unfreezing_while_training(tier: str, overlap: str, tmp_path: Path) -> None:
    case = Case(Stack, toggling, (Block,), steps=8, clip=0.2)
    found = train_sharded(case, config(tmp_path, tier, optimizer={"overlap": overlap}))
    assert_close(found, train_plain(case))
    assert (found.updates["first.bias"], found.updates["last.bias"], found.updates["blocks.1.up.bias"]) == (8, 7, 5)


def test_unfreezing_what_was_frozen_at_sharding_is_refused_by_name(tmp_path: Path) -> None:
    with sharded(Lora(), config(tmp_path), LORA.units) as model:
        for unfreeze in (
            lambda: model.layers[1].base.requires_grad_(True),
            lambda: setattr(model.layers[1].base.weight, "requires_grad", True),
            lambda: model.requires_grad_(True),
        ):
            with pytest.raises(tz.ConfigError, match=r"frozen when the model was sharded"):
                unfreeze()
        assert not model.layers[1].base.weight.requires_grad
        optimizer = tz.AdamW(model.parameters(), **hyper(LORA))
        language(model, 0, 0).backward()
        optimizer.step()


def test_unfreezing_while_the_values_are_there_is_refused(tmp_path: Path) -> None:
    with sharded(Lora(), config(tmp_path), LORA.units) as model:
        frozen = model.layers[0].base.weight
        with pytest.raises(tz.ConfigError, match=r"base\.weight' was frozen when"), tz.gathered(frozen):
            frozen.requires_grad_(True)
        unfreeze = model.layers[0].base.register_forward_pre_hook(_unfreeze)
        with pytest.raises(tz.ConfigError, match=r"base\.weight' was frozen when"):
            language(model, 0, 0)
        unfreeze.remove()
        assert not frozen.requires_grad
        language(model, 0, 0).backward()
        assert tz.read_state(model.layers[0].b.weight, "gradient").any()


def _unfreeze(module: nn.Module, given: object) -> None:
    module.weight.requires_grad_(True)


@pytest.mark.parametrize("tier", TIERS)
def test_parameters_without_gradient_stay_as_they_are(tier: str, tmp_path: Path) -> None:
    """As torch.optim: no step counted, no decay, moments untouched, even while others train."""

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = torch.ones(2, 24) * (step + 1)
        return (model.first(x) if step in (1, 2) else model.last(x)).square().mean()

    case = Case(Stack, loss, (Block, "first", "last"), steps=6)
    found, wanted = train_sharded(case, config(tmp_path, tier)), train_plain(case)
    assert_close(found, wanted)
    assert (found.updates["first.weight"], found.updates["last.weight"]) == (2, 4)
    assert torch.equal(found.weights["blocks.0.up.weight"], wanted.weights["blocks.0.up.weight"])
    assert found.updates["blocks.0.up.weight"] == 0
