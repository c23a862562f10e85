"""torch.func over a sharded model: other weights in place of its own, vmap, forward mode; reverse mode is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tierzero as tz

from ..support.compared import Act, assert_alike, gradients
from ..support.oracle import Case, assert_at_rest, built, config, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Block, Stack, regression, vectors

STACK = Case(lambda: Stack(4), regression, (Block,))
X = vectors(0, 0)


def other_weights(model: nn.Module) -> list[torch.Tensor]:
    """All of them, then one of a unit and one of the root, with their gradients; then its own again."""
    halves = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
    given = {
        name: torch.full(shape, 0.01, requires_grad=True)
        for name, shape in (("blocks.1.up.weight", (37, DIM)), ("last.weight", (DIM, DIM)))
    }
    found = [functional_call(model, halves, (X,)), functional_call(model, given, (X,))]
    found[-1].square().mean().backward()
    return [*found, *(weight.grad for weight in given.values()), *gradients(model), model(X)]


def its_own_weights(model: nn.Module) -> list[torch.Tensor]:
    functional_call(model, dict(model.named_parameters()), (X,)).square().mean().backward()
    functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (X,)).square().mean().backward()
    return gradients(model)


def mapped(model: nn.Module) -> list[torch.Tensor]:
    out = vmap(model)(X)
    out.square().mean().backward()
    with torch.no_grad():
        return [out, vmap(model, in_dims=0, out_dims=1)(X), *gradients(model)]


def forward_mode(model: nn.Module) -> list[torch.Tensor]:
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X))))
        found = [dual.primal, dual.tangent]
    return [*found, *jvp(model, (X,), (X,)), jacfwd(model)(X[:2])]


def tangents_of_copies(model: nn.Module) -> list[torch.Tensor]:
    copies = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return list(jvp(lambda given: functional_call(model, given, (X,)), (copies,), (copies,)))


def by_autograd(model: nn.Module) -> list[torch.Tensor]:
    """The way round for what is refused."""
    functional = torch.autograd.functional
    return [
        functional.jacobian(model, X[:2]),
        functional.jacobian(model, X[:2], vectorize=True),
        functional.hessian(lambda x: model(x).square().mean(), X[:1]),
        functional.vjp(model, X, torch.ones(5, DIM))[1],
    ]


ALIKE = (other_weights, its_own_weights, mapped, forward_mode, tangents_of_copies, by_autograd)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.long), "nvme"])
@pytest.mark.parametrize("act", ALIKE, ids=lambda function: function.__name__)
def test_values_are_those_of_the_unsharded_model(act: Act, tier: str, tmp_path: Path) -> None:
    assert_alike(STACK.build, act, tmp_path, tier, STACK.units)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x).square().mean()
    return out


REFUSED = {
    "grad": lambda m: grad(lambda x: mean_square(m, x))(X),
    "vjp": lambda m: vjp(m, X),
    "jacrev": lambda m: jacrev(m)(X),
    "hessian": lambda m: hessian(lambda x: mean_square(m, x))(X),
    "per sample": lambda m: vmap(grad(lambda x: mean_square(m, x[None])))(X),
    "a unit": lambda m: grad(lambda x: mean_square(m.blocks[1], x))(X),
}


@pytest.mark.parametrize("what", REFUSED)
def test_reverse_mode_is_refused_and_leaves_the_model_whole(what: str, tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        wanted = model(X)
        with pytest.raises(tz.ConfigError, match=r"cannot be differentiated by torch\.func\.grad.*torch\.autograd"):
            REFUSED[what](model)
        assert_at_rest(model)
        assert torch.equal(model(X), wanted)


def mapped_on_ranks(rank: int, size: int, nvme: str) -> None:
    x = vectors(0, rank)
    plain = built(STACK)
    (sum(plain(vectors(0, each)).square().mean() for each in range(size)) / size).backward()
    with sharded(built(STACK), config(Path(nvme)), STACK.units) as model:
        out = vmap(model)(x)
        out.square().mean().backward()
        torch.testing.assert_close(out, plain(x))
        for have, want in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(have, want)
        for have, want in zip(jvp(model, (x,), (x,)), jvp(plain, (x,), (x,)), strict=True):
            torch.testing.assert_close(have, want)


def test_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(mapped_on_ranks, str(tmp_path))
