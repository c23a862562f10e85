"""In fp32 on one rank, training is that of plain PyTorch with ``torch.optim`` and its ``clip_grad_norm_``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.models import net
from ..support.training import (
    Recipe,
    configured,
    everything_in,
    parameter_groups,
    relative_error,
    train_plain,
    train_sharded,
)

TOLERANCE = 1e-6
FP32 = {"precision": "fp32"}


@pytest.mark.parametrize(
    ("placement", "adamw"),
    [
        pytest.param("device", True, id="device-adamw"),
        pytest.param("nvme", False, id="nvme-adam"),
        pytest.param("device", False, id="device-adam", marks=pytest.mark.long),
        pytest.param("nvme", True, id="nvme-adamw", marks=pytest.mark.long),
    ],
)
def test_fifty_steps_follow_torch(placement: str, adamw: bool, tmp_path: Path) -> None:
    recipe = Recipe(steps=50, accumulate=3, clip=0.68, adamw=adamw)
    config = configured(tmp_path, train=FP32, placement=everything_in(placement), tiers={"device": "64MiB"})
    found, wanted = train_sharded(net(), config, recipe), train_plain(net(), recipe)
    assert min(wanted.norms) < 0.68 < max(wanted.norms), "clipping must act on some steps only"
    for name, weight in wanted.state.items():
        error = relative_error(found.state[f"{name}/weight"], weight)
        assert error <= TOLERANCE, f"{name}: {error:.2e}"
    torch.testing.assert_close(found.losses, wanted.losses, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-5, atol=0)


def test_moments_and_step_counts_follow_torch(tmp_path: Path) -> None:
    recipe = Recipe(steps=12, clip=None)
    plain = net()
    optimizer = torch.optim.AdamW(parameter_groups(plain, recipe), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(recipe.steps):
        plain(*recipe.batches(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = train_sharded(net(), configured(tmp_path, train=FP32), Recipe(steps=12, clip=None, schedule=False))
    for name, parameter in plain.named_parameters():
        state = optimizer.state[parameter]
        assert relative_error(found.state[f"{name}/m"], state["exp_avg"]) <= 1e-5, name
        assert relative_error(found.state[f"{name}/v"], state["exp_avg_sq"]) <= 1e-5, name


def test_a_parameter_without_a_gradient_does_not_step(tmp_path: Path) -> None:
    """As in ``torch.optim``: no decay, no moments and no step count for it, until it gets a gradient."""

    def partly(model: Any) -> Any:
        original = model.blocks[1].forward
        calls = iter(range(100))
        # Skipped in every other step: its parameters get no gradient then.
        model.blocks[1].forward = lambda x: original(x) if next(calls) % 2 else x
        return model

    recipe = Recipe(steps=10)
    found = train_sharded(partly(net()), configured(tmp_path, train=FP32), recipe)
    wanted = train_plain(partly(net()), recipe)
    for name, weight in wanted.state.items():
        assert relative_error(found.state[f"{name}/weight"], weight) <= TOLERANCE, name


def test_frozen_and_unknown_parameters_stay(tmp_path: Path) -> None:
    def frozen(model: Any) -> Any:
        model.blocks[0].up.weight.requires_grad_(False)
        model.embed.weight.requires_grad_(False)
        return model

    recipe = Recipe(steps=10, groups=False)
    found = train_sharded(frozen(net()), configured(tmp_path, train=FP32), recipe)
    wanted = train_plain(frozen(net()), recipe)
    start = dict(net().named_parameters())
    for name, weight in wanted.state.items():
        assert relative_error(found.state[f"{name}/weight"], weight) <= TOLERANCE, name
    for name in ("embed.weight", "blocks.0.up.weight"):
        assert torch.equal(found.state[f"{name}/weight"], start[name])


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_follows_torch_at_its_precision(tied: bool, tmp_path: Path) -> None:
    """fp32 masters under bf16 arithmetic: the loss curve is that of fp32 training to a percent."""
    recipe = Recipe(steps=20)
    found = train_sharded(net(tied=tied), configured(tmp_path), recipe)
    wanted = train_plain(net(tied=tied), recipe)
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-2, atol=0)
    for name, weight in wanted.state.items():
        if weight.numel() > 1:
            assert relative_error(found.state[f"{name}/master"], weight) <= 0.02, name
