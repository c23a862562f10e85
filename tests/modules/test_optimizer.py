"""The optimizer as a ``torch.optim.Optimizer``: state dict, schedulers, groups, loss scaling."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tierzero as tz

from ..support.oracle import Case, assert_bits, built, config, hyper, record_state, sharded, take_steps
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,))
Optimizer = torch.optim.Optimizer


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    with sharded(built(STACK), config(tmp_path), STACK.units) as found:
        yield found


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.5**s, lambda s: 1.0]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda s: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.8)], optimizer=o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=3),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim == 2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1 and p is not model.first.bias], "lr": 1e-3, "eps": 1e-6},
        {"params": [model.first.bias], "lr": 0.0, "weight_decay": 0.0},
    ]


def schedule(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> list[list[float]]:
    rates = []
    for step in range(6):
        loss = regression(model, step, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(step))
        else:
            scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_the_rates_of_the_update(name: str, model: nn.Module) -> None:
    plain = built(STACK)
    trained = torch.optim.AdamW(groups(plain), betas=(0.9, 0.95))
    wanted = schedule(plain, trained, SCHEDULERS[name](trained))
    optimizer = tz.AdamW(groups(model), betas=(0.9, 0.95))
    scheduler = SCHEDULERS[name](optimizer)
    assert schedule(model, optimizer, scheduler) == wanted
    json.dumps({k: v for k, v in scheduler.state_dict().items() if not k.startswith("_") and k != "lr_lambdas"})
    state = tz.full_state_dict(model)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def test_every_scheduler_class_of_torch_is_covered() -> None:
    classes = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} <= SCHEDULERS.keys()


def test_state_dict_round_trip(tmp_path: Path) -> None:
    settings = config(tmp_path)
    first = Case(Stack, regression, (Block,), steps=3)
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(groups(model))
        take_steps(first, model, optimizer, 0, 1)
        optimizer.param_groups[0]["lr"] = 5e-3
        state = copy.deepcopy(optimizer.state_dict())
        for reloaded in (state, json.loads(json.dumps(state))):
            other = tz.AdamW(groups(model))
            other.load_state_dict(reloaded)
            assert other.state_dict() == state
        assert [entry["step"] for entry in state["state"].values()] == [3] * len(list(model.parameters()))
        with pytest.raises(tz.ConfigError, match="param groups"):
            tz.AdamW(model.parameters()).load_state_dict(state)
        wanted = take_steps(first, model, optimizer, 0, 1)
        record_state(model, wanted)
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(groups(model))
        take_steps(first, model, optimizer, 0, 1)
        other = tz.AdamW(groups(model))
        other.load_state_dict(state)
        found = take_steps(first, model, other, 0, 1)
        record_state(model, found)
    assert_bits(found, wanted)


def test_empty_groups_stay_groups(model: nn.Module) -> None:
    optimizer = tz.AdamW([{"params": []}, {"params": model.parameters()}, {"params": [], "lr": 0.5}], lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda s: 0.1, lambda s: 0.5, lambda s: 1.0])
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 5e-3, 0.5]
    regression(model, 0, 0).backward()
    optimizer.step()
    scheduler.step()
    assert [len(group["params"]) for group in optimizer.state_dict()["param_groups"]] == [0, 22, 0]


def test_zeroed_gradients_are_refused(model: nn.Module) -> None:
    """In PyTorch a parameter with a gradient of zero goes on stepping; here it has none."""
    optimizer = tz.AdamW(model.parameters())
    for zero_grad in (optimizer.zero_grad, model.zero_grad, model.blocks[1].zero_grad):
        with pytest.raises(tz.ConfigError, match=r"set_to_none=False.*dropped"):
            zero_grad(set_to_none=False)
        zero_grad(set_to_none=True)


def test_zero_rate_and_added_group(model: nn.Module) -> None:
    before = tz.full_state_dict(model)
    optimizer = tz.AdamW(model.blocks.parameters(), lr=0.0, weight_decay=0.3)
    optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 1e-2})
    for step in range(3):
        regression(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in tz.full_state_dict(model).items():
        assert torch.equal(value, before[name]) == (not name.startswith("last")), name
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.last.weight]})


def _reorder(optimizer: Optimizer) -> None:
    optimizer.param_groups.reverse()


def _move(optimizer: Optimizer) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    first.append(second.pop())


def _leave_out(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["params"] = optimizer.param_groups[1]["params"][2:]


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("change", [_reorder, _move, _leave_out])
def test_groups_that_the_user_rearranges(change: Callable[[Optimizer], None], overlap: str, tmp_path: Path) -> None:
    settings = config(tmp_path, optimizer={"overlap": overlap}, train={"precision": "fp32", "grad_clip": 0})
    plain = built(STACK)
    with sharded(built(STACK), settings, STACK.units) as model:
        for each, kind in ((plain, torch.optim.AdamW), (model, tz.AdamW)):
            parameters = list(each.parameters())
            both = [{"params": parameters[:4], "lr": 1e-2}, {"params": parameters[4:], "lr": 3e-2}]
            optimizer = kind(both, eps=1e-5)
            for step in range(5):
                if step == 2:
                    change(optimizer)
                regression(each, step, 0).backward()
                optimizer.step()
                each.zero_grad()
        for name, value in tz.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def test_state_dict_hooks_are_called(model: nn.Module) -> None:
    optimizer = tz.AdamW(model.parameters())
    called = []
    optimizer.register_state_dict_pre_hook(lambda its: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda its, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda its, state: called.append(state.pop("mine")))
    optimizer.register_load_state_dict_post_hook(lambda its: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["saving", 1, "loaded"]


def test_moments_in_a_state_dict_are_refused(model: nn.Module) -> None:
    """Those of ``torch.optim`` hold them; step counts that happen to agree must not hide that they are not taken."""
    plain = built(STACK)
    trained, optimizer = torch.optim.AdamW(plain.parameters()), tz.AdamW(model.parameters())
    for each, its in ((plain, trained), (model, optimizer)):
        regression(each, 0, 0).backward()
        its.step()
    with pytest.raises(tz.ConfigError, match=r"'first\.weight' has step, exp_avg, .*tierzero\.load_checkpoint"):
        optimizer.load_state_dict(trained.state_dict())


def test_step_with_a_closure(model: nn.Module) -> None:
    plain = built(STACK)
    found = []
    for each, its in ((model, tz.AdamW(model.parameters(), **hyper(STACK))), (plain, None)):
        optimizer = its or torch.optim.AdamW(plain.parameters(), **hyper(STACK))

        def closure(module: nn.Module = each, its: Optimizer = optimizer) -> torch.Tensor:
            its.zero_grad()
            loss = regression(module, 0, 0)
            loss.backward()
            return loss

        found.append([optimizer.step(closure).item() for _ in range(4)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "lr": ("lr", {"lr": -1.0}),
    "nan": ("lr", {"lr": float("nan")}),
    "betas": ("beta1", {"betas": (1.0, 0.9)}),
    "decay": ("weight_decay", {"weight_decay": -0.1}),
    "amsgrad": ("amsgrad", {"amsgrad": True}),
    "maximize": ("maximize", {"maximize": True}),
    "no pair": ("a pair", {"betas": (0.9, 0.99, 0.999)}),
    "text": ("must be numbers", {"lr": "1e-3 or so"}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_hyperparameters_are_refused_by_name(what: str, model: nn.Module) -> None:
    name, arguments = BAD[what]
    with pytest.raises(tz.ConfigError, match=f"the arguments .*{name}"):
        tz.AdamW(model.parameters(), **arguments)
    with pytest.raises(tz.ConfigError, match=f"param group 0 .*{name}"):
        tz.AdamW([{"params": model.parameters(), **arguments}])
    optimizer = tz.AdamW(model.parameters())
    optimizer.param_groups[0].update(arguments)
    regression(model, 0, 0).backward()
    if not {"amsgrad", "maximize"} & arguments.keys():
        with pytest.raises(tz.ConfigError, match=name):
            optimizer.step()


def test_hyperparameters_as_tensors_and_numpy(model: nn.Module) -> None:
    import numpy as np

    plain = built(STACK)
    trained = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95))
    optimizer = tz.AdamW(model.parameters(), lr=torch.tensor(1e-2), betas=(np.float64(0.9), 0.95), eps=np.float32(1e-8))
    for step in range(3):
        for each, its in ((model, optimizer), (plain, trained)):
            regression(each, step, 0).backward()
            its.step()
            its.zero_grad()
    state = tz.full_state_dict(model)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def test_loss_scaler_skips_an_overflowing_step(tmp_path: Path) -> None:
    settings = config(tmp_path, train={"precision": "fp16"})
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        scaler = tz.LossScaler(model, init_scale=2.0**10, growth_interval=3)
        scales, losses = [], []
        for step in range(9):
            loss = regression(model, 0, 0).float()
            factor = 1e30 if step == 4 else 1.0
            before = tz.full_state_dict(model)
            scaler.scale(loss * factor).backward()
            tz.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            unchanged = all(torch.equal(v, before[k]) for k, v in tz.full_state_dict(model).items())
            assert unchanged == (step == 4)
            scales.append(scaler.scale_value / 2**10)
            losses.append(loss.item())
        assert scales == [1, 1, 2, 2, 1, 1, 1, 2, 2]
        assert scaler.skipped_steps == 1
        assert losses[-1] < losses[0]
        assert all(entry["step"] == 8 for entry in optimizer.state_dict()["state"].values())
        assert torch.isfinite(tz.read_state(model.first.weight, "m")).all()
        again = tz.LossScaler(model)
        again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
        assert again.state_dict() == scaler.state_dict()


def test_scaled_and_unscaled_gradients_give_the_same_norm_and_update(tmp_path: Path) -> None:
    norms, states = [], []
    for scale in (1.0, 2.0**12):
        with sharded(built(STACK), config(tmp_path), STACK.units) as model:
            optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
            scaler = tz.LossScaler(model, init_scale=scale)
            for step in range(3):
                scaler.scale(regression(model, step, 0)).backward()
                norms.append(tz.clip_grad_norm_(model, 0.1).item())
                optimizer.step()
                optimizer.zero_grad()
            states.append(tz.full_state_dict(model))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-6)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-6, atol=1e-7)


def test_clipping_takes_the_parameters_as_pytorchs_function_does(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        regression(model, 0, 0).backward()
        norm = tz.clip_grad_norm_(model, math.inf)
        assert tz.clip_grad_norm_(model.parameters(), math.inf) == norm
        with pytest.raises(tz.ConfigError, match=r"'first.bias' is not among"):
            tz.clip_grad_norm_([model.first.weight], 1.0)
        with pytest.raises(tz.ConfigError, match="sharded"):
            tz.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
