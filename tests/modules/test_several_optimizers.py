"""Several optimizers on one model, one after the other, or of some of the parameters only; clipping with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import TIERS, Case, Outcome, assert_close, built, config, record_state, sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,), eps=1e-6)
Make = Callable[..., torch.optim.Optimizer]
Clip = Callable[[nn.Module, float], torch.Tensor]
Recipe = Callable[[nn.Module, Make, Clip], Iterator[torch.Tensor]]


def _make(module: Any) -> Make:
    return lambda parameters, lr=1e-2: module.AdamW(parameters, lr=lr, eps=STACK.eps, weight_decay=0.1)


def side_by_side(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    parameters = list(model.parameters())
    first, second = make(parameters[:5]), make(parameters[5:], lr=3e-2)
    for step in range(5):
        regression(model, step, 0).backward()
        yield clip(model, 0.01)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def in_turns(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    """Gradients of the one that waits go on accumulating, on top of clipped ones."""
    parameters = list(model.parameters())
    both = make(parameters[:5]), make(parameters[5:], lr=3e-2)
    for step in range(6):
        regression(model, step, 0).backward()
        yield clip(model, 0.05)
        both[step % 2].step()
        both[step % 2].zero_grad()


def some_parameters(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    optimizer = make(list(model.parameters())[3:])
    for step in range(5):
        regression(model, step, 0).backward()
        yield clip(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()


def gradients_set_to_none(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    optimizer = make(model.parameters())
    for step in range(4):
        regression(model, step, 0).backward()
        yield clip(model, 0.05)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def backward_after_clipping(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    optimizer = make(model.parameters())
    for step in range(4):
        regression(model, step, 0).backward()
        yield clip(model, 0.05)
        regression(model, step + 1, 0).backward()
        yield clip(model, 0.08)
        optimizer.step()
        optimizer.zero_grad()


def one_after_the_other(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    for lr in (1e-2, 2e-2):
        optimizer = make(model.parameters(), lr=lr)
        for step in range(3):
            loss = regression(model, step, 0)
            loss.backward()
            yield loss.detach()
            optimizer.step()
            optimizer.zero_grad()


def side_by_side_unclipped(model: nn.Module, make: Make, clip: Clip) -> Iterator[torch.Tensor]:
    return side_by_side(model, make, lambda model, norm: torch.zeros(()))


RECIPES: tuple[Recipe, ...] = (
    side_by_side,
    in_turns,
    some_parameters,
    gradients_set_to_none,
    backward_after_clipping,
    one_after_the_other,
)


def _compare(recipe: Recipe, settings: tz.Config) -> None:
    wanted, found = Outcome(), Outcome()
    plain = built(STACK)
    norm = torch.nn.utils.clip_grad_norm_
    wanted.norms = [n.item() for n in recipe(plain, _make(torch.optim), lambda m, most: norm(m.parameters(), most))]
    with sharded(built(STACK), settings, STACK.units) as model:
        found.norms = [n.item() for n in recipe(model, _make(tz), tz.clip_grad_norm_)]
        record_state(model, found)
    wanted.weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    wanted.updates, wanted.moments = found.updates, dict.fromkeys(wanted.weights)
    assert_close(found, wanted)


@pytest.mark.parametrize("tier", [*TIERS, {"host": 0.5, "nvme": 0.5}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_those_of_the_unsharded_model(recipe: Recipe, tier: object, tmp_path: Path) -> None:
    _compare(recipe, config(tmp_path, tier))


@pytest.mark.parametrize("recipe", [side_by_side_unclipped, one_after_the_other])
def test_with_the_update_in_the_backward(recipe: Recipe, tmp_path: Path) -> None:
    settings = {"optimizer": {"overlap": "backward"}, "train": {"grad_clip": 0, "precision": "fp32"}}
    _compare(recipe, config(tmp_path, **settings))


def test_an_optimizer_whose_moments_are_gone_is_refused(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        first, second = _make(tz)(model.parameters()), _make(tz)(model.parameters())
        for optimizer in (first, second):
            regression(model, 0, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        regression(model, 0, 0).backward()
        with pytest.raises(tz.ConfigError, match="another optimizer has updated parameter"):
            first.step()
        second.step()
        assert {entry["step"] for entry in second.state_dict()["state"].values()} == {2}


def test_state_of_another_step_is_refused(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        optimizer = _make(tz)(model.parameters())
        state = optimizer.state_dict()
        regression(model, 0, 0).backward()
        optimizer.step()
        with pytest.raises(tz.ConfigError, match=r"of step 0 .* are of step 1; .*tierzero.load_checkpoint"):
            optimizer.load_state_dict(state)


def test_a_refused_step_counts_nothing(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        parameters = list(model.parameters())
        optimizer = _make(tz)([{"params": parameters[:5]}, {"params": parameters[5:]}])
        regression(model, 0, 0).backward()
        optimizer.param_groups[1]["lr"] = float("nan")
        with pytest.raises(tz.ConfigError, match="lr is nan"):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = 1e-2
        optimizer.step()
        assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {1}
