"""Unusual uses of autograd: graphs kept, used twice or in part, gradients asked for by hand, gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz

from ..support.oracle import TIERS, Case, assert_close, built, config, hyper, sharded, train_plain, train_sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Block, Stack, Tied, language, regression, vectors

STACK = Case(lambda: Stack(6), regression, (Block,))
"""More units than are gathered at once."""


def gradients_of(model: nn.Module, plain: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if plain else tz.read_state(parameter, "gradient")
        assert gradient is not None
        found[name] = gradient
    return found


def assert_same_gradients(build: Case, backward: Callable[[nn.Module], None], settings: tz.Config) -> None:
    """``backward`` leaves the same gradients in the sharded model as in the plain one, twice in a row."""
    plain = built(build)
    with sharded(built(build), settings, build.units) as model:
        for _ in range(2):
            plain.zero_grad()
            model.zero_grad()
            backward(plain)
            backward(model)
            found = gradients_of(model, plain=False)
            for name, wanted in gradients_of(plain, plain=True).items():
                torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: n + text)


def backward_twice(model: nn.Module) -> None:
    loss = regression(model, 0, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_graph(model: nn.Module) -> None:
    out = model(vectors(0, 0))
    out.square().mean().backward(retain_graph=True)
    out.sin().sum().backward()


def part_of_the_outputs(model: nn.Module) -> None:
    out = model(vectors(0, 0))
    out[:2, :3].sum().backward()


def several_backwards(model: nn.Module) -> None:
    for step in range(3):
        regression(model, step, 0).backward()


def interleaved(model: nn.Module) -> None:
    """The first forward's backward comes after the second's."""
    losses = [regression(model, step, 0) for step in range(3)]
    for loss in losses:
        loss.backward()


def with_a_vector(model: nn.Module) -> None:
    out = model(vectors(0, 0))
    out.backward(torch.sin(out.detach()))


def gradient_penalty(model: nn.Module) -> None:
    x = vectors(0, 0).requires_grad_()
    out = torch.tanh(model(x)).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    model(vectors(5, 0))  # reuses the memory that the first forward's weights were gathered in
    (out + (slope.norm(dim=1) - 1).square().sum()).backward()


def backward_through_the_input(model: nn.Module) -> None:
    x = vectors(0, 0).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    model(x.grad).sum().backward()


BACKWARDS = (
    backward_twice,
    two_losses_of_one_graph,
    part_of_the_outputs,
    several_backwards,
    interleaved,
    with_a_vector,
    gradient_penalty,
    backward_through_the_input,
)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda function: function.__name__)
def test_gradients_equal_the_unsharded_models(backward: Callable[[nn.Module], None], tier: str, tmp_path: Path) -> None:
    assert_same_gradients(STACK, backward, config(tmp_path, tier, tiers={"prefetch": 0}))


def on_ranks(rank: int, size: int, nvme: str, tier: str) -> None:
    """Every rank on its own data, as one process that takes the mean of what each would do."""
    for backward in BACKWARDS:
        wanted: dict[str, torch.Tensor] = {}
        for each in range(size):
            plain = built(STACK)
            backward(Shifted(plain, each))
            for name, gradient in gradients_of(plain, plain=True).items():
                wanted[name] = wanted.get(name, 0) + gradient / size
        with sharded(built(STACK), config(Path(nvme), tier, tiers={"prefetch": 0}), STACK.units) as model:
            backward(Shifted(model, rank))
            found = gradients_of(model, plain=False)
        for name, want in wanted.items():
            torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: n + text)


class Shifted(nn.Module):
    """The model on other data for every rank."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model, self.rank = model, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x + 0.3 * self.rank)


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.long), "nvme"])
def test_gradients_on_two_ranks(tier: str, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(on_ranks, str(tmp_path), tier)


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_asked_for_by_hand(tier: str, tmp_path: Path) -> None:
    """``torch.autograd.grad`` gives the parameters' gradients and leaves none behind."""
    plain = built(STACK)
    wanted = torch.autograd.grad(regression(plain, 0, 0), list(plain.parameters()))
    with sharded(built(STACK), config(tmp_path, tier, tiers={"prefetch": 0}), STACK.units) as model:
        for _ in range(2):
            found = torch.autograd.grad(regression(model, 0, 0), list(model.parameters()))
            for have, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-8)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("tier", TIERS)
def test_gradient_of_a_gradient_of_the_parameters(tier: str, tmp_path: Path) -> None:
    """As meta-learning does it: differentiate through a step taken by hand."""

    def second_order(model: nn.Module) -> tuple[torch.Tensor, ...]:
        parameters = list(model.parameters())
        first = torch.autograd.grad(regression(model, 0, 0), parameters, create_graph=True)
        regression(model, 3, 0)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters, allow_unused=True)

    wanted = second_order(built(STACK))
    with sharded(built(STACK), config(tmp_path, tier, tiers={"prefetch": 0}), STACK.units) as model:
        for have, want in zip(second_order(model), wanted, strict=True):
            assert (have is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tier", TIERS)
def test_backward_limited_to_some_inputs(tier: str, tmp_path: Path) -> None:
    """``loss.backward(inputs=...)`` accumulates into those parameters only."""
    plain = built(STACK)
    regression(plain, 0, 0).backward(inputs=[plain.last.weight, plain.blocks[1].up.bias])
    with sharded(built(STACK), config(tmp_path, tier, tiers={"prefetch": 0}), STACK.units) as model:
        regression(model, 0, 0).backward(inputs=[model.last.weight, model.blocks[1].up.bias])
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(tz.read_state(parameter, "gradient"), other.grad, msg=name)
            else:
                assert parameter.grad is None, name


def test_backward_after_the_weights_changed_is_refused(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        late = regression(model, 0, 0)
        regression(model, 1, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"changed between this forward and its backward"):
            late.backward()


@pytest.mark.parametrize("tier", TIERS)
def test_accumulation_with_a_changing_number_of_backwards(tier: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        for micro in range(step % 3):
            regression(model, 100 * step + micro, rank).backward()
        return regression(model, step, rank)

    case = Case(Stack, loss, (Block,), steps=7, clip=0.2)
    assert_close(train_sharded(case, config(tmp_path, tier)), train_plain(case))


@pytest.mark.parametrize("tier", TIERS)
def test_part_of_a_tied_weight_by_index(tier: str, tmp_path: Path) -> None:
    """Rows of another unit's weight, chosen by index outside its forward."""

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        rows = model.embed.weight[torch.tensor([3, 1, 3])]
        return language(model, step, rank) + F.softplus(rows).mean()

    case = Case(lambda: Tied(False), loss, (Block, "embed"))
    assert_close(train_sharded(case, config(tmp_path, tier)), train_plain(case))


class Sum(torch.autograd.Function):
    """Keeps all its inputs for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return sum((x @ weight.t() for weight in weights), torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *weights = ctx.saved_tensors
        return sum(grads[0] @ weight for weight in weights), *(grads[0].t() @ x for _ in weights)


class Summing(nn.Module):
    """One function saves the weights of more units than are gathered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Sum.apply(x, *(layer.weight for layer in self.layers))


@pytest.mark.parametrize("tier", TIERS)
def test_one_function_saves_the_weights_of_many_units(tier: str, tmp_path: Path) -> None:
    case = Case(Summing, regression, (nn.Linear,))
    assert_close(train_sharded(case, config(tmp_path, tier, tiers={"prefetch": 0})), train_plain(case))


class UsedOutside(nn.Module):
    """Reentrant checkpoints around blocks whose weights the model's own forward uses as well: a gradient that arrives
    twice in one backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x + 0.01 * sum(block.up.weight.square().sum() for block in self.blocks)


def test_gradients_that_arrive_twice_accumulate_alike_wherever_they_lie(tmp_path: Path) -> None:
    case = Case(UsedOutside, regression, (Block,))
    found = []
    for gradients in ("host", "nvme", {"host": 0.5, "nvme": 0.5}):
        settings = config(tmp_path, "host", placement={"gradients": gradients})
        with sharded(built(case), settings, case.units) as model:
            for step in range(4):
                regression(model, step, 0).backward()
            found.append(gradients_of(model, plain=False))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])
