"""``tierzero.read_state`` and ``write_state``: every kind of state, whole and this rank's, of one parameter or many."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import TIERS, Case, built, config, hyper, seeded_loss, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,), clip=0.05)
STEPS = 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int, whole: bool) -> list[float]:
    """Steps with clipping that acts; ``whole``: on the mean of all ranks' losses, in one process."""
    norms = []
    clip = torch.nn.utils.clip_grad_norm_ if whole else tz.clip_grad_norm_
    for step in range(STEPS):
        losses = [seeded_loss(STACK, model, step, each) for each in (range(ranks) if whole else [rank])]
        (sum(losses[1:], losses[0]) / len(losses)).backward()
        norms.append(float(clip(model.parameters(), STACK.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def take_over(rank: int, ranks: int, nvme: str, tier: str) -> None:
    """What ``torch.optim.AdamW`` has come to is written into a sharded model, which goes on like it."""
    plain = built(STACK)
    trained = torch.optim.AdamW(plain.parameters(), **hyper(STACK))
    train(plain, trained, rank, ranks, whole=True)
    with sharded(built(STACK, seed=1), config(Path(nvme), tier), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        train(model, optimizer, rank, ranks, whole=False)
        parameters = list(model.parameters())
        states = [trained.state[parameter] for parameter in plain.parameters()]
        tz.write_state(parameters, "master", [parameter.detach() for parameter in plain.parameters()])
        tz.write_state(parameters, "m", [state["exp_avg"] for state in states])
        tz.write_state(parameters, "v", [state["exp_avg_sq"] for state in states])
        tz.write_state(parameters, "step", [state["step"] for state in states])
        for have, want in zip(parameters, plain.parameters(), strict=True):
            assert torch.equal(tz.read_state(have, "weight"), want)
            assert torch.equal(tz.read_state(have, "v"), trained.state[want]["exp_avg_sq"])
        norms = train(model, optimizer, rank, ranks, whole=False)
        assert norms == pytest.approx(train(plain, trained, rank, ranks, whole=True), rel=1e-5)
        for have, want, state in zip(parameters, plain.parameters(), states, strict=True):
            torch.testing.assert_close(tz.read_state(have, "weight"), want.detach(), rtol=1e-5, atol=1e-6)
            assert tz.read_state(have, "step") == int(state["step"]) == 2 * STEPS


@pytest.mark.parametrize("tier", TIERS)
def test_taking_over_from_torch(tier: str, tmp_path: Path, two_ranks: RankPool) -> None:
    take_over(0, 1, str(tmp_path), tier)
    two_ranks.run(take_over, str(tmp_path), tier)


def local_parts(rank: int, ranks: int, nvme: str, stage: int) -> dict[str, dict[str, Any]]:
    """Every kind whole; each rank's part of it, which it reads by itself; all doubled, through its own part only."""
    settings = config(Path(nvme), "host", sharding={"stage": stage})
    found: dict[str, dict[str, Any]] = {}
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        train(model, optimizer, rank, ranks, whole=False)
        seeded_loss(STACK, model, 0, rank).backward()
        for kind in ("weight", "m", "gradient"):
            named = dict(model.named_parameters())
            wholes = tz.read_state(named.values(), kind)
            parts = tz.read_state(named.values(), kind, local=True)
            for parameter, whole, part in zip(named.values(), wholes, parts, strict=True):
                held = tz.local_elements(parameter)
                assert torch.equal(part, whole.flatten()[held.start : held.stop])
            tz.write_state(named.values(), kind, [2 * part for part in parts], local=True)
            for whole, doubled in zip(wholes, tz.read_state(named.values(), kind), strict=True):
                assert torch.equal(doubled, 2 * whole)
            found[kind] = {name: tz.local_elements(parameter) for name, parameter in named.items()}
        squares = sum(float(g.double().square().sum()) for g in tz.read_state(model.parameters(), "gradient"))
        assert float(tz.clip_grad_norm_(model, math.inf)) == pytest.approx(squares**0.5, rel=1e-6)
        optimizer.step()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_lies_on_a_rank(stage: int, tmp_path: Path, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(local_parts, str(tmp_path), stage)
    sizes = {name: parameter.numel() for name, parameter in built(STACK).named_parameters()}
    for name, held in first["weight"].items():
        assert (len(held) if stage == 0 else len(held) + len(second["weight"][name])) == sizes[name]


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("tier", TIERS)
def test_gradients_set_by_hand(tier: str, overlap: str, tmp_path: Path) -> None:
    """One scaled after its backward, one replaced, one where none had come: norm, clipping and update are theirs."""
    plain = built(STACK)
    trained = torch.optim.AdamW(plain.parameters(), **hyper(STACK))
    with sharded(built(STACK), config(tmp_path, tier, optimizer={"overlap": overlap}), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(STEPS):
            for each in (plain, model):
                # Without the last layer, whose gradient is absent.
                vectors = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
                each.blocks[1](each.blocks[0](each.first(vectors))).square().mean().backward()
            given = torch.full_like(plain.last.bias, 0.3)
            plain.first.weight.grad *= 3
            plain.blocks[0].up.bias.grad = plain.blocks[0].up.bias.detach().clone()
            plain.last.bias.grad = given.clone()
            mine = [model.first.weight, model.blocks[0].up.bias, model.last.bias]
            scaled = 3 * tz.read_state(mine[0], "gradient")
            tz.write_state(mine, "gradient", [scaled, tz.read_state(mine[1], "weight"), given])
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert float(tz.clip_grad_norm_(model, 0.1)) == pytest.approx(float(norm), rel=1e-5)
            for its in (trained, optimizer):
                its.step()
                its.zero_grad()
        for have, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(tz.read_state(have, "weight"), want.detach(), rtol=1e-5, atol=1e-6)
            assert tz.read_state(have, "step") == trained.state.get(want, {}).get("step", 0)


def test_many_are_read_together(tmp_path: Path) -> None:
    """A tile that holds parts of many parameters is read once, not once for each."""
    settings = config(tmp_path, "nvme", train={"precision": "bf16"})
    with sharded(built(STACK), settings, STACK.units) as model:
        tz.AdamW(model.parameters(), **hyper(STACK))
        engine = tz.api.running(model).engine

        def bytes_of(read: Any) -> tuple[int, list[torch.Tensor]]:
            before = engine.read_bytes
            values = read()
            return engine.read_bytes - before, values

        together, first = bytes_of(lambda: tz.read_state(model.parameters(), "master"))
        singly, second = bytes_of(lambda: [tz.read_state(p, "master") for p in model.parameters()])
        state = tz.stats(model)["tier_bytes"]["nvme"]
        assert together <= state < singly
        assert all(map(torch.equal, first, second))


def test_masters_stay_where_weights_do(tmp_path: Path) -> None:
    """In bf16: a weight that is written as it was keeps the rest of its master; another one gets none."""
    with sharded(built(STACK), config(tmp_path, "nvme", train={"precision": "bf16"}), STACK.units) as model:
        weight = model.first.weight
        master = torch.randn(24, 24, generator=torch.Generator().manual_seed(3))
        tz.write_state(weight, "master", master)
        assert torch.equal(tz.read_state(weight, "master"), master)
        rounded = tz.read_state(weight, "weight")
        rounded[0] = 7.0
        tz.write_state(weight, "weight", rounded)
        master[0] = 7.0
        assert torch.equal(tz.read_state(weight, "master"), master)
        x = torch.randn(2, 24, dtype=torch.bfloat16)
        assert torch.equal(model.first(x), nn.functional.linear(x, rounded, tz.read_state(model.first.bias, "weight")))


def test_refusals(tmp_path: Path) -> None:
    frozen = built(STACK)
    frozen.last.requires_grad_(False)
    with sharded(frozen, config(tmp_path, "nvme"), STACK.units) as model:
        weight, fixed = model.first.weight, model.last.weight
        before = tz.read_state(model.parameters(), "weight")
        for bad, pattern in (
            (lambda: tz.write_state(weight, "grad", 1.0), "kind is 'grad'; use one of 'weight', 'master'"),
            (lambda: tz.write_state(weight, "weight", torch.zeros(24)), r"'first.weight' is of shape \(24, 24\)"),
            (lambda: tz.write_state(weight, "weight", torch.zeros(9), local=True), "elements on this rank"),
            (
                lambda: tz.write_state([weight, fixed], "weight", [torch.zeros(24, 24)]),
                "2 parameters, but values for 1",
            ),
            (lambda: tz.write_state([weight, weight], "weight", [1.0, 2.0]), "given twice"),
            (lambda: tz.write_state(model, "weight", 0.0), "not a module"),
            (lambda: tz.write_state(torch.zeros(1), "weight", 0.0), "not a parameter of a model"),
            (lambda: tz.write_state(weight, "step", -1), "step of 'first.weight' is -1"),
            (lambda: tz.write_state(fixed, "step", 4), "'last.weight' is frozen: it has no step count"),
            (lambda: tz.write_state(weight, "step", 10**30), "step of 'first.weight' is 1000"),
            (lambda: tz.write_state(weight, "step", "many"), "step of 'first.weight' is 'many'"),
            (lambda: tz.write_state(weight, "m", None), "set by a tensor or a number, not None"),
            (lambda: tz.write_state(weight, "m", torch.zeros(24, 24, dtype=torch.complex64)), "dense real values"),
            (lambda: tz.write_state([weight], "m", 1.0), "take a list of as many values, not float"),
            (lambda: tz.write_state(weight, "v", -1.0), "v of 'first.weight' takes finite values of 0 or more"),
            (lambda: tz.write_state(weight, "m", math.nan), "m of 'first.weight' takes finite values"),
            (lambda: tz.read_state(None, "m"), "a parameter or several are needed, not NoneType"),
            (lambda: tz.read_state(weight, "gradient"), "has no gradient now"),
        ):
            with pytest.raises(tz.ConfigError, match=pattern):
                bad()
        for kind in ("m", "gradient", "master"):
            with pytest.raises(tz.ConfigError, match=f"'last.weight' is frozen: it has no {kind}"):
                tz.write_state([weight, fixed], kind, [0.0, 0.0])
        with tz.gathered(weight), pytest.raises(tz.ConfigError, match=r"open in tierzero.gathered"):
            tz.write_state(weight, "weight", 0.0)
        model.blocks[0].register_forward_hook(lambda *_: tz.write_state(weight, "weight", 0.0))
        with pytest.raises(tz.ConfigError, match="write its state between them"):
            model(torch.zeros(1, 24))
        assert all(map(torch.equal, before, tz.read_state(model.parameters(), "weight")))
        tz.write_state(fixed, "weight", 0.5)
        assert torch.equal(tz.read_state(fixed, "weight"), torch.full((24, 24), 0.5))


def mismatched(rank: int, ranks: int, nvme: str) -> None:
    """Whoever asks for something else than the other rank is told so, and nothing is changed anywhere."""
    with sharded(built(STACK), config(Path(nvme), "host"), STACK.units) as model:
        first, last = model.first.weight, model.last.weight
        before = tz.read_state([first, last], "master")
        for differing in (
            lambda: tz.read_state(last if rank else first, "m"),
            lambda: tz.read_state(first, "m" if rank else "v"),
            lambda: tz.write_state(first, "step", 50 + rank),
            lambda: tz.write_state(first, "master", float(rank)),
            lambda: tz.write_state(first, "master", torch.zeros(3 if rank else 24, 24)),
        ):
            with pytest.raises((tz.RankMismatchError, tz.ConfigError)):
                differing()
        assert all(map(torch.equal, before, tz.read_state([first, last], "master")))
        assert tz.read_state(first, "step") == 0
        with pytest.raises(tz.RankMismatchError):
            tz.read_state(model.first.bias, "m") if rank else tz.full_state_dict(model)


def test_ranks_that_ask_for_different_things(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(mismatched, str(tmp_path))


def test_gradients_of_some(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        model.first(torch.ones(1, 24)).sum().backward()
        found = tz.read_state(model.parameters(), "gradient")
        named = zip(model.named_parameters(), found, strict=True)
        assert [name for (name, _), value in named if value is not None] == ["first.weight", "first.bias"]
