"""Users' hooks: on modules, before and after sharding, which read weights; on parameters; on autograd's nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import tierzero as tz

from ..support.compared import Act, adamw, assert_alike, gradients, trained
from ..support.oracle import TIERS, Case, assert_at_rest, built, config, sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,))


def _first(module: nn.Module) -> torch.Tensor:
    return next(module.parameters())


def before(module: nn.Module, args: Any) -> Any:
    return (args[0] * 1.1 + _first(module).mean(),)


def before_with_keywords(module: nn.Module, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return (args[0] * _first(module).norm(),), kwargs


def after(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 0.9 + _first(module).sum()


def after_with_keywords(module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    return after(module, args, out)


def before_backward(module: nn.Module, grads: Any) -> Any:
    return (grads[0] * 1.5 + _first(module).detach().mean(),)


def after_backward(module: nn.Module, into: Any, grads: Any) -> Any:
    return None if into[0] is None else (into[0] + 0.1 * _first(module).detach().mean(),)


ATTACH: dict[str, Callable[[nn.Module], object]] = {
    "before": lambda m: m.register_forward_pre_hook(before),
    "before with keywords": lambda m: m.register_forward_pre_hook(before_with_keywords, with_kwargs=True),
    "after": lambda m: m.register_forward_hook(after),
    "after, first and always": lambda m: m.register_forward_hook(after, prepend=True, always_call=True),
    "after with keywords": lambda m: m.register_forward_hook(after_with_keywords, with_kwargs=True),
    "before the backward": lambda m: m.register_full_backward_pre_hook(before_backward),
    "after the backward": lambda m: m.register_full_backward_hook(after_backward),
}


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return regression(model, step, 0)


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("late", [False, True], ids=["built with it", "sharded before it"])
@pytest.mark.parametrize("kind", ATTACH)
def test_hooks_of_the_model_a_unit_and_a_layer(kind: str, late: bool, tmp_path: Path) -> None:
    def attach(model: nn.Module) -> nn.Module:
        for module in (model, model.blocks[1], model.blocks[1].up):
            ATTACH[kind](module)
        return model

    def act(model: nn.Module) -> list[torch.Tensor]:
        return trained(attach(model) if late else model, loss)

    build = STACK.build if late else lambda: attach(STACK.build())
    assert_alike(build, act, tmp_path, "nvme", STACK.units)


def tensor_hooks(model: nn.Module) -> list[torch.Tensor]:
    """A gradient that its hooks change, with the help of the weight."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_hook(lambda gradient, own=parameter: gradient + 0.1 * own.detach())
        parameter.register_hook(lambda gradient: None)
    return trained(model, loss)


def hooks_of_nodes(model: nn.Module) -> list[torch.Tensor]:
    """The nodes that accumulate, found as libraries find them."""
    ran: list[int] = []
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
    nodes += [get_gradient_edge(model.last.weight).node]
    for node in nodes:
        node.register_hook(lambda *_: ran.append(1))
    loss(model, 0).backward()
    return [*gradients(model), torch.tensor(len(ran))]


def hook_of_several(model: nn.Module) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    chosen = [model.last.weight, model.blocks[1].up.weight]
    register_multi_grad_hook(chosen, lambda found: seen.extend(gradient.clone() for gradient in found))
    loss(model, 0).backward()
    return [*seen, *gradients(model)]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("act", [tensor_hooks, hooks_of_nodes, hook_of_several], ids=lambda function: function.__name__)
def test_hooks_of_parameters(act: Act, tier: str, tmp_path: Path) -> None:
    assert_alike(STACK.build, act, tmp_path, tier, STACK.units)


def test_hooks_that_look_for_the_gradient_are_refused_by_name(tmp_path: Path) -> None:
    """They would find none, and a step that they take would do nothing."""
    named = r"register_post_accumulate_grad_hook on parameter 'last\.weight'.*register_hook"
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        with pytest.raises(tz.ConfigError, match=named):
            model.last.weight.register_post_accumulate_grad_hook(print)
        with tz.gathered(model.last.weight), pytest.raises(tz.ConfigError, match=named):
            model.last.weight.register_post_accumulate_grad_hook(print)
    early = built(STACK)
    early.last.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(tz.ConfigError, match=named):
        tz.shard(early, config(tmp_path), units=STACK.units)


CALLS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "optimizer.step": lambda model, optimizer: optimizer.step(),
    "clip_grad_norm_": lambda model, optimizer: tz.clip_grad_norm_(model, 1.0),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_step_inside_a_backward_is_refused(call: str, tier: str, tmp_path: Path) -> None:
    """It would take the gradients that happen to be there already."""
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        optimizer = adamw(model)
        handle = model.blocks[1].up.weight.register_hook(lambda _: CALLS[call](model, optimizer))
        with pytest.raises(tz.ConfigError, match=rf"{call} in a backward.*overlap = 'backward'"):
            loss(model, 0).backward()
        handle.remove()
        optimizer.zero_grad()
        loss(model, 0).backward()
        optimizer.step()
        assert_at_rest(model)
