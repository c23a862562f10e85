"""``optimizer.ema`` and ``tierzero.averaged``: which average is kept, computing with it, what is refused meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tierzero as tz

from ..support.oracle import Case, built, config, hyper, seeded_loss, sharded
from ..support.rank_pool import RankPool
from ..support.training import assert_same_state, whole_state
from ..support.zoo import Block, Stack, Tied, language, regression, vectors

DECAY = 0.8
STACK = Case(Stack, regression, (Block,))
TIED = Case(lambda: Tied(False), language, (Block, "embed"))


def settings(nvme: Path, tier: object = "nvme", **sections: dict[str, Any]) -> tz.Config:
    sections["optimizer"] = {"ema": DECAY} | sections.get("optimizer", {})
    return config(nvme, tier, **sections)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: range, rank: int = 0) -> None:
    for step in steps:
        seeded_loss(case, model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def averages(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, tz.read_state(named.values(), "ema"), strict=True))


def loss_of(model: nn.Module, case: Case) -> float:
    with torch.no_grad():
        return seeded_loss(case, model, 99, 0).item()


@pytest.mark.parametrize(("case", "tier"), [(STACK, "nvme"), (TIED, "host")], ids=["stack", "tied"])
def test_it_is_the_average_of_pytorch(case: Case, tier: str, tmp_path: Path) -> None:
    """Which takes the weights over at its first update, so that comes before the first step."""
    plain = built(case)
    wanted = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    wanted.update_parameters(plain)
    theirs = torch.optim.AdamW(plain.parameters(), **hyper(case))
    with sharded(built(case), settings(tmp_path, tier), case.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(case))
        for step in range(10):
            train(plain, theirs, case, range(step, step + 1))
            train(model, optimizer, case, range(step, step + 1))
            wanted.update_parameters(plain)
        for name, value in averages(model).items():
            torch.testing.assert_close(value, wanted.module.get_parameter(name), rtol=1e-5, atol=1e-6)
        with tz.averaged(model):
            found = loss_of(model, case)
        assert found == pytest.approx(loss_of(wanted.module, case), rel=1e-5)
        assert abs(found - loss_of(model, case)) > 1e-4 * found


LONG = [("bf16", "none"), ("bf16", "backward"), ("fp32", "forward"), ("fp32", "none"), ("fp16", "forward")]


@pytest.mark.parametrize(
    ("precision", "overlap"),
    [
        *(("bf16", "forward"), ("fp32", "backward"), ("fp16", "none")),
        *(pytest.param(*each, marks=pytest.mark.long) for each in LONG),
    ],
)
def test_inside_the_model_has_these_weights_and_after_it_every_bit_is_as_before(
    precision: str, overlap: str, tmp_path: Path
) -> None:
    chosen = settings(tmp_path, train={"precision": precision, "grad_clip": 0}, optimizer={"overlap": overlap})
    with sharded(built(STACK), chosen, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        train(model, optimizer, STACK, range(4))
        if overlap == "forward":  # of which the last update is pending still, and the next units are fetched ahead
            loss_of(model, STACK)
        before = loss_of(model, STACK)
        with tz.averaged(model):
            inside, weights = loss_of(model, STACK), tz.full_state_dict(model)
            with tz.gathered(model.first.weight):
                assert torch.equal(model.first.weight.detach(), weights["first.weight"])
        state = whole_state(model)
        for name, value in averages(model).items():
            rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}[precision]
            torch.testing.assert_close(weights[name].float(), value, rtol=rounding, atol=2.0**-25)
        with sharded(built(STACK), config(tmp_path, train={"precision": precision}), STACK.units) as other:
            for name, parameter in other.named_parameters():
                tz.write_state(parameter, "weight", weights[name])
            assert loss_of(other, STACK) == inside != before
        assert loss_of(model, STACK) == before
        with tz.averaged(model):
            pass
        assert_same_state(whole_state(model), state)
        train(model, optimizer, STACK, range(4, 6))
        found = whole_state(model)
    with sharded(built(STACK), chosen, STACK.units) as model:
        train(model, tz.AdamW(model.parameters(), **hyper(STACK)), STACK, range(6))
        assert_same_state(found, whole_state(model))


def test_gradients_wait_for_their_step(tmp_path: Path) -> None:
    found = []
    for inside in (True, False):
        with sharded(built(STACK), settings(tmp_path), STACK.units) as model:
            optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
            for step in range(3):
                seeded_loss(STACK, model, step, 0).backward()
                if inside:
                    with tz.averaged(model):
                        loss_of(model, STACK)
                optimizer.step()
                optimizer.zero_grad()
            found.append(whole_state(model))
    assert_same_state(*found)


def test_it_moves_with_its_own_parameter_only(tmp_path: Path) -> None:
    with sharded(built(STACK), settings(tmp_path), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        train(model, optimizer, STACK, range(3))
        before, masters = averages(model), whole_state(model)
        model.first(vectors(0, 0)).sum().backward()  # no other parameter gets a gradient
        optimizer.step()
        optimizer.zero_grad()
        for name, value in averages(model).items():
            moved = name.startswith("first.")
            assert torch.equal(value, before[name]) != moved, name
            master = tz.read_state(model.get_parameter(name), "master")
            wanted = before[name] + torch.tensor(1 - DECAY) * (master - before[name])
            assert torch.equal(value, wanted if moved else before[name])
            assert torch.equal(master, masters[f"{name}/master"]) != moved


def test_a_step_that_overflowed_moves_nothing(tmp_path: Path) -> None:
    chosen = settings(tmp_path, train={"precision": "fp16"})
    with sharded(built(STACK), chosen, STACK.units) as model:
        scaler, optimizer = tz.LossScaler(model), tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(2):
            scaler.scale(seeded_loss(STACK, model, step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = whole_state(model)
        (scaler.scale(seeded_loss(STACK, model, 3, 0)) * torch.inf).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_state(whole_state(model), before)


def test_it_begins_with_the_weight_and_edits_are_of_the_weight_alone(tmp_path: Path) -> None:
    with sharded(built(STACK), settings(tmp_path, train={"precision": "bf16"}), STACK.units) as model:
        weight, optimizer = model.first.weight, tz.AdamW(model.parameters(), **hyper(STACK))
        for _ in range(2):  # until the first update, both have one value, however it came
            assert torch.equal(tz.read_state(weight, "ema"), tz.read_state(weight, "master"))
            with tz.gathered(weight), torch.no_grad():
                weight[1].fill_(0.3)
        tz.write_state(weight, "master", torch.full(weight.shape, 0.1))
        assert torch.equal(tz.read_state(weight, "ema"), torch.full(weight.shape, 0.1))
        train(model, optimizer, STACK, range(2))
        before = tz.read_state(weight, "ema")
        with tz.gathered(weight), torch.no_grad():
            weight.fill_(3.0)
        assert torch.equal(tz.read_state(weight, "ema"), before)
        assert torch.equal(tz.read_state(weight, "master"), torch.full(weight.shape, 3.0))
        tz.write_state(weight, "ema", before + 1)
        assert torch.equal(tz.read_state(weight, "ema"), before + 1)


def actions(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Callable[[], object]]:
    weight = model.first.weight

    def edit() -> None:
        with tz.gathered([model.last.bias, weight]), torch.no_grad():
            weight[0] = 5

    return {
        "a backward": lambda: seeded_loss(STACK, model, 0, 0).backward(),
        "optimizer.step": optimizer.step,
        "save_checkpoint": lambda: tz.save_checkpoint(model, optimizer, folder / "new"),
        "loading": lambda: tz.load_checkpoint(model, optimizer, folder / "saved"),
        "gathered: a change of 'first.weight'": edit,
        "write_state: 'm'": lambda: tz.write_state(weight, "m", 0.0),
        "read_state: 'ema'": lambda: tz.read_state(weight, "ema"),
        "offload": lambda: tz.offload(model),
        "averaged": lambda: tz.averaged(model).__enter__(),
    }


def test_what_is_refused_inside_and_leaves_no_trace(tmp_path: Path) -> None:
    with sharded(built(STACK), settings(tmp_path), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        train(model, optimizer, STACK, range(2))
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        state, loss = whole_state(model), loss_of(model, STACK)
        for what, action in actions(model, optimizer, tmp_path).items():
            with pytest.raises(tz.ConfigError, match=what) as refused, tz.averaged(model):
                action()
            assert "averaged" in str(refused.value)
            assert "\n" not in str(refused.value)
            optimizer.zero_grad()
            assert_same_state(whole_state(model), state, what)
            assert loss_of(model, STACK) == loss
        with pytest.raises(ZeroDivisionError), tz.averaged(model):
            print(loss_of(model, STACK) / 0)
        assert_same_state(whole_state(model), state)
        with pytest.raises(tz.ConfigError, match=r"held by tierzero.gathered"), tz.gathered(model.first.weight):
            tz.averaged(model).__enter__()
        model.first.register_forward_hook(lambda *_: tz.averaged(model).__enter__())
        with pytest.raises(tz.ConfigError, match="forward or backward"):
            loss_of(model, STACK)
        assert_same_state(whole_state(model), state)


def test_without_averages(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        with pytest.raises(tz.ConfigError, match=r"optimizer\.ema"), tz.averaged(model):
            pass
        with pytest.raises(tz.ConfigError, match=r"optimizer\.ema"):
            tz.read_state(model.first.weight, "ema")
    with pytest.raises(tz.ConfigError, match=r"optimizer\.ema.*from 0 below 1"):
        settings(tmp_path, optimizer={"ema": 1.0})


def test_a_failed_exchange_is_no_state_to_go_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierzero.runtime import averaging

    def failing(*given: Any, calls: list[int] = []) -> None:  # noqa: B006
        calls.append(1)
        if len(calls) == 3:
            raise OSError("a worker failed")

    with sharded(built(STACK), settings(tmp_path), STACK.units) as model:
        loss_of(model, STACK)
        monkeypatch.setattr(averaging, "exchange_average", failing)
        with pytest.raises(OSError, match="a worker failed"), tz.averaged(model):
            pass
        with pytest.raises(OSError, match="a worker failed"):
            loss_of(model, STACK)


def as_rank(rank: int, size: int, folder: str, stage: int, placement: dict[str, str]) -> dict[str, torch.Tensor]:
    chosen = settings(Path(folder), placement=placement, sharding={"stage": stage})
    with sharded(built(STACK), chosen, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        train(model, optimizer, STACK, range(3), rank)
        before, loss = whole_state(model), loss_of(model, STACK)
        with tz.averaged(model):
            inside, weights = loss_of(model, STACK), tz.full_state_dict(model)
        assert inside != loss
        assert all(torch.equal(value, before[f"{name}/ema"]) for name, value in weights.items())
        assert loss_of(model, STACK) == loss
        assert_same_state(whole_state(model), before)
        train(model, optimizer, STACK, range(3, 5), rank)
        return whole_state(model)


MEMORY = {"params": "host", "optimizer": "nvme", "gradients": "host"}


def test_on_two_ranks_whatever_is_sharded(tmp_path: Path, two_ranks: RankPool) -> None:
    found = [
        state
        for stage, placement in ((3, dict.fromkeys(MEMORY, "nvme")), (1, MEMORY))
        for state in two_ranks.run(as_rank, str(tmp_path), stage, placement)
    ]
    for state in found[1:]:
        assert_same_state(state, found[0])


def enter_alone(rank: int, size: int, folder: str) -> str:
    with sharded(built(STACK), settings(Path(folder)), STACK.units) as model:
        try:
            if rank == 0:
                with tz.averaged(model):
                    loss_of(model, STACK)
            else:
                loss_of(model, STACK)
        except tz.TierZeroError as error:
            return type(error).__name__
    return "nothing"


def test_a_rank_that_does_not_enter_is_told(tmp_path: Path, two_ranks: RankPool) -> None:
    assert two_ranks.run(enter_alone, str(tmp_path)) == ["RankMismatchError", "RankMismatchError"]
