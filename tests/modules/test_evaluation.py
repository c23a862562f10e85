"""Evaluation between training steps, and exceptions in the middle of one: the next good step is as if nothing was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running

from ..support.oracle import (
    TIERS,
    Case,
    Outcome,
    assert_at_rest,
    assert_bits,
    assert_close,
    built,
    config,
    hyper,
    record_state,
    sharded,
    train_plain,
    train_sharded,
)
from ..support.zoo import Block, Normed, Stack, regression, vectors

STACK = Case(lambda: Stack(6), regression, (Block,), steps=8)


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(vectors(900, 0))
        return out


def infer(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(vectors(901, 0))
        return out.clone()


def part(model: nn.Module) -> torch.Tensor:
    """A submodule alone, as generation or feature extraction calls it."""
    with torch.no_grad():
        out: torch.Tensor = model.blocks[2](vectors(902, 0))
        return out


def forward_without_backward(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(vectors(903, 0))
    return out.detach()


def abandoned(model: nn.Module) -> torch.Tensor:
    """An evaluation that stops early and leaves its later units fetched."""
    with torch.no_grad():
        for index in range(2):
            x = model.blocks[index](vectors(904, 0))
    out: torch.Tensor = x
    return out


INTERRUPTIONS = (evaluate, infer, part, forward_without_backward, abandoned)


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[nn.Module], torch.Tensor]
) -> list[torch.Tensor]:
    seen = []
    for step in range(STACK.steps):
        if step % 3 == 0:
            model.eval()
            seen.append(between(model))
            model.train()
        loss = regression(model, step, 0)
        if step % 3 == 1:
            seen.append(between(model))  # between a forward and its backward
        loss.backward()
        if step % 3 == 2:
            seen.append(between(model))
        optimizer.step()
        optimizer.zero_grad()
    seen.append(between(model))
    return seen


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("between", INTERRUPTIONS, ids=lambda function: function.__name__)
def test_evaluation_between_steps(between: Callable[[nn.Module], torch.Tensor], tier: str, tmp_path: Path) -> None:
    plain = built(STACK)
    wanted = run(plain, torch.optim.AdamW(plain.parameters(), **hyper(STACK)), between)
    outcome = Outcome()
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        found = run(model, tz.AdamW(model.parameters(), **hyper(STACK)), between)
        record_state(model, outcome)
        assert_at_rest(model)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(outcome.weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tier", TIERS)
def test_inference_only(tier: str, tmp_path: Path) -> None:
    """A model that is never trained, with nothing to train and no optimizer."""

    def build() -> nn.Module:
        return Normed().requires_grad_(False).eval()

    plain = built(Case(build, regression))
    with sharded(built(Case(build, regression)), config(tmp_path, tier), (nn.Linear,)) as model:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(model(vectors(1, 0)), plain(vectors(1, 0)), rtol=0, atol=0)
        torch.testing.assert_close(model(vectors(2, 0)), plain(vectors(2, 0)), rtol=0, atol=0)


def test_inference_reads_ahead(tmp_path: Path) -> None:
    """From the second forward on the next unit is on its way while one computes, without any step to learn from."""
    with sharded(built(STACK), config(tmp_path), (Block, "first", "last")) as model:
        runtime = running(model)
        units = {unit.title: unit for unit in runtime.units}
        seen = []
        for block in range(5):
            following = f"blocks.{block + 1}"
            model.blocks[block].up.register_forward_hook(
                lambda module, given, out, unit=units[following]: seen.append(runtime.pager.is_here(unit))
            )
        with torch.no_grad():
            for step in range(3):
                model(vectors(step, 0))
        assert seen[5:] == [True] * 10


def test_evaluation_sees_the_update_of_the_step_before(tmp_path: Path) -> None:
    plain = built(STACK)
    trained = torch.optim.AdamW(plain.parameters(), **hyper(STACK))
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for each, its in ((plain, trained), (model, optimizer)):
            regression(each, 0, 0).backward()
            its.step()
        torch.testing.assert_close(model.blocks[5](vectors(1, 0)), plain.blocks[5](vectors(1, 0)))
        torch.testing.assert_close(evaluate(model), evaluate(plain))


class Failing(Stack):
    """Raises in the forward or the backward of block 2 when told to."""

    def __init__(self) -> None:
        super().__init__(6)
        self.fail_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2 and self.fail_in == "forward":
                raise ZeroDivisionError("in the user's forward")
            if index == 2 and self.fail_in == "backward":
                x.register_hook(fail)
        return self.last(x)


def fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("in the user's backward")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_good_step_after_an_exception(where: str, tier: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if step in (0, 3) and hasattr(model, "failed"):
            model.fail_in = where
            with pytest.raises(ZeroDivisionError, match=f"in the user's {where}"):
                regression(model, 77, rank).backward()
            model.fail_in = ""
            model.zero_grad()
            assert [slot.name for slot in running(model).slots() if not slot.is_away] == []
        return regression(model, step, rank)

    def build(failing: bool) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = Failing()
            if failing:
                model.failed = True
            return model

        return make

    wanted = train_sharded(Case(build(False), loss, (Block,)), config(tmp_path, tier))
    assert_bits(train_sharded(Case(build(True), loss, (Block,)), config(tmp_path, tier)), wanted)
    assert_close(wanted, train_plain(Case(build(False), loss, (Block,))))


def test_interrupt_in_the_forward(tmp_path: Path) -> None:
    class Interrupted(Stack):
        armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.first(x))
            if self.armed:
                raise KeyboardInterrupt
            return self.last(x)

    case = Case(Interrupted, regression, (Block,))
    with sharded(built(case), config(tmp_path), case.units) as model:
        model.armed = True
        with pytest.raises(KeyboardInterrupt):
            regression(model, 0, 0)
        model.armed = False
        wanted = regression(built(case), 0, 0)
        assert regression(model, 0, 0).item() == wanted.item()
