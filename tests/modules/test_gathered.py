"""``tierzero.gathered``: the full parameter, to read and to change in place, on one rank and two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import TIERS, Case, built, config, hyper, seeded_loss, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Block, Stack, Tied, language, regression, vectors

STACK = Case(Stack, regression, (Block,))
TIED = Case(lambda: Tied(False), language, (Block, "embed"))


def edit(model: nn.Module, gathered: bool) -> None:
    """In-place changes of several kinds, some elements only."""
    chosen = [model.blocks[0].up.weight, model.last.bias, model.first.weight]

    def change() -> None:
        chosen[0].data.mul_(0.5)
        with torch.no_grad():
            chosen[1][3] = 7.0
            nn.init.normal_(chosen[2][:2], generator=torch.Generator().manual_seed(5))

    if gathered:
        with tz.gathered(chosen):
            change()
    else:
        change()


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("tier", TIERS)
def test_reading_and_changing_between_steps(tier: str, overlap: str, tmp_path: Path) -> None:
    plain = built(STACK)
    trained = torch.optim.AdamW(plain.parameters(), **hyper(STACK))
    settings = config(tmp_path, tier, optimizer={"overlap": overlap})
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(6):
            for each, its in ((plain, trained), (model, optimizer)):
                regression(each, step, 0).backward()
                its.step()
                its.zero_grad()
            if step % 2 == 0:
                edit(plain, gathered=False)
                edit(model, gathered=True)
            with tz.gathered(model.parameters()):
                for have, want in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(have.data, want.data, rtol=1e-5, atol=1e-6)
                    assert isinstance(have, nn.Parameter)
        for have, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(tz.read_state(have, "m"), trained.state[want]["exp_avg"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tier", TIERS)
def test_values_stay_after_leaving_and_entering_again(tier: str, tmp_path: Path) -> None:
    wanted = built(STACK).state_dict()
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        for _ in range(3):
            with tz.gathered(model.first.weight):
                copy = model.first.weight.detach().clone()
                kept = model.first.weight.data
            assert torch.equal(copy, wanted["first.weight"])
        assert torch.equal(kept, wanted["first.weight"])
        kept.zero_()  # a copy by now: changes outside are nobody's
        assert torch.equal(tz.full_state_dict(model)["first.weight"], wanted["first.weight"])


def test_unchanged_elements_keep_their_master(tmp_path: Path) -> None:
    """In bf16 the master is finer than the weight: reading must not round it."""
    settings = config(tmp_path, train={"precision": "bf16"})
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(3):
            regression(model, step, 0).float().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model.first.weight
        before = tz.read_state(weight, "master")
        assert not torch.equal(before, before.bfloat16().float())
        with tz.gathered(weight):
            assert torch.equal(weight.detach(), before.bfloat16()) or (weight.detach() - before).abs().max() < 0.01
        assert torch.equal(tz.read_state(weight, "master"), before)
        with tz.gathered(weight), torch.no_grad():
            weight[0, 0] = 2.0
        after = tz.read_state(weight, "master")
        assert after[0, 0] == 2.0
        assert torch.equal(after.flatten()[1:], before.flatten()[1:])


@pytest.mark.parametrize("tier", TIERS)
def test_forward_and_backward_inside(tier: str, tmp_path: Path) -> None:
    """The gathered parameter takes part in the model's forward and keeps its gradient."""
    plain = built(STACK)
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        with tz.gathered([model.blocks[1].up.weight, model.last.weight]):
            loss = regression(model, 0, 0)
            loss.backward()
        wanted = regression(plain, 0, 0)
        wanted.backward()
        assert loss.item() == wanted.item()
        for have, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(tz.read_state(have, "gradient"), want.grad, rtol=1e-6, atol=1e-8)


def test_changes_are_seen_by_the_next_forward(tmp_path: Path) -> None:
    plain = built(STACK)
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        model(vectors(0, 0))  # gathered units are in memory now
        edit(plain, gathered=False)
        edit(model, gathered=True)
        assert torch.equal(model(vectors(0, 0)), plain(vectors(0, 0)))


def test_nested_and_failing(tmp_path: Path) -> None:
    wanted = built(STACK).state_dict()
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        with tz.gathered(model.first.weight):
            with tz.gathered([model.first.weight, model.first.bias]):
                pass
            assert torch.equal(model.first.weight.data, wanted["first.weight"])
        with pytest.raises(ZeroDivisionError), tz.gathered(model.first.weight):
            raise ZeroDivisionError
        with pytest.raises(tz.NotResidentError):
            _ = model.first.weight.data
        with pytest.raises(tz.ConfigError, match="not a parameter"), tz.gathered(torch.zeros(3)):
            pass


def test_gradients_are_not_said_to_be_missing(tmp_path: Path) -> None:
    """Clipping and stepping by ``.grad`` would do nothing, in silence."""
    calls: list[Callable[[nn.Module], object]] = [
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        lambda m: torch.optim.SGD(m.parameters(), lr=1.0).step(),
        lambda m: m.first.weight.grad,
        lambda m: setattr(m.first.weight, "grad", torch.zeros(DIM, DIM)),
    ]
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        regression(model, 0, 0).backward()
        wanted = tz.read_state(model.first.weight, "gradient")
        for call in calls:
            with tz.gathered(model.parameters()), pytest.raises(tz.NotResidentError, match=r"first\.weight"):
                call(model)
        with tz.gathered(model.first.weight):
            assert type(copy.deepcopy(model.first.weight)) is nn.Parameter
            regression(model, 0, 0).backward()
        torch.testing.assert_close(tz.read_state(model.first.weight, "gradient"), 2 * wanted)
        with tz.gathered(model.first.weight):
            model.first.weight.grad = None
            assert model.first.weight.grad is None


def test_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        wanted = tz.full_state_dict(model)
        for replaced in (torch.zeros(3), wanted["first.bias"].half()):
            with (
                pytest.raises(tz.ConfigError, match=r"'first\.bias' was replaced"),
                tz.gathered(model.first.parameters()),
            ):
                model.first.bias.data = replaced
        assert all(torch.equal(value, wanted[name]) for name, value in tz.full_state_dict(model).items())


def gathered_on_ranks(rank: int, size: int, nvme: str) -> None:
    plain = built(TIED)
    trained = torch.optim.AdamW(plain.parameters(), **hyper(TIED))
    with sharded(built(TIED), config(Path(nvme)), TIED.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(TIED))
        for step in range(10):
            (sum(seeded_loss(TIED, plain, step, each) for each in range(size)) / size).backward()
            trained.step()
            trained.zero_grad()
            seeded_loss(TIED, model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 1:
                with tz.gathered([model.embed.weight, model.blocks[1].norm.bias]), torch.no_grad():
                    torch.testing.assert_close(model.embed.weight.data, plain.embed.weight.data, rtol=1e-4, atol=1e-4)
                    for each in (model, plain):
                        each.head.weight[7:9] *= 0.5
                        each.blocks[1].norm.bias += 0.25
        state = tz.full_state_dict(model)
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(state[name], wanted, rtol=1e-4, atol=1e-4)


def test_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(gathered_on_ranks, str(tmp_path))


def test_read_state_refuses_what_is_not_there(tmp_path: Path) -> None:
    with sharded(Stack(), config(tmp_path), (Block,)) as model:
        weight = model.first.weight
        with pytest.raises(tz.ConfigError, match=r"kind is 'momentum'; use one of 'weight', 'master'"):
            tz.read_state(weight, "momentum")  # type: ignore[arg-type]
        with pytest.raises(tz.ConfigError, match=r"'first.weight' has no gradient now"):
            tz.read_state(weight, "gradient")
        regression(model, 0, 0).backward()
        assert tz.read_state(weight, "gradient").any()
        model.zero_grad()
        with pytest.raises(tz.ConfigError, match="has no gradient now"):
            tz.read_state(weight, "gradient")
