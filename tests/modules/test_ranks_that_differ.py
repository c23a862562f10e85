"""Ranks that do not do the same: trained where that is well defined, else stopped in seconds, by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tierzero as tz
from tierzero.planner.shape import Budgets
from tierzero.runtime.budgets import agreed
from tierzero.sharding.collectives import RankMismatchError, World

from ..support.oracle import Case, assert_close, config, hyper, sharded, train_plain, train_sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Block, Mixture, Routed, Stack, regression, vectors


class Towers(Stack):
    """Runs all blocks side by side; only some take part in the result."""

    def forward(self, x: torch.Tensor, used: int = 3) -> torch.Tensor:
        first = self.first(x)
        outputs = [block(first) for block in self.blocks]
        return self.last(torch.stack(outputs[:used]).sum(0))


def only_rank_zero(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Blocks 1 and 2 get gradients on rank 0 only, and there in every other step."""
    x = vectors(step, rank)
    return F.mse_loss(model(x, 3 if rank == 0 and step % 2 == 0 else 1), torch.sin(x))


def towers_in_one_unit(rank: int, size: int, nvme: str) -> None:
    for tier in ("host", "nvme"):
        case = Case(Towers, only_rank_zero, (), steps=10, eps=1e-6, clip=0.3)
        found = train_sharded(case, config(Path(nvme), tier), rank, size)
        assert_close(found, train_plain(case, size), tolerance=5e-5)
        assert (found.updates["blocks.1.up.weight"], found.updates["blocks.0.up.weight"]) == (5, 10)


def test_gradients_on_one_rank_only(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(towers_in_one_unit, str(tmp_path))


def told(model: nn.Module, act: Callable[[], None]) -> str:
    """What this rank is told about the others within seconds of what it does. Closes the model."""
    started = time.monotonic()
    try:
        act()
    except RankMismatchError as error:
        assert time.monotonic() - started < 20
        return str(error)
    finally:
        tz.close(model)
    return "nothing was said"


def towers_in_several_units(rank: int, size: int, nvme: str) -> str:
    """Rank 1's backward has no use for the weights that rank 0's gathers."""
    model = tz.shard(Towers(6), config(Path(nvme), tiers={"prefetch": 0}), units=(Block,))

    def act() -> None:
        model(vectors(0, rank), 6 if rank == 0 else 1).sum().backward()
        tz.clip_grad_norm_(model, 1.0)

    return told(model, act)


def test_units_needed_on_one_rank_only_are_named(tmp_path: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(towers_in_several_units, str(tmp_path)):
        assert "rank 0: 'blocks." in message
        assert "rank 1: 'blocks." in message or "rank 1: a call of every rank" in message


def different_experts(rank: int, size: int, nvme: str) -> str:
    model = tz.shard(Mixture(), config(Path(nvme)), units=(nn.Linear,))

    def act() -> None:
        for step in range(3):
            model(vectors(step, rank), (0, 1) if rank == 0 else (2, 3)).square().sum().backward()

    return told(model, act)


def test_different_units_are_named(tmp_path: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(different_experts, str(tmp_path)):
        assert "rank 0: 'layers.0.experts.0'" in message
        assert "rank 1: 'layers.0.experts.2'" in message


def different_order(rank: int, size: int, nvme: str) -> str:
    model = tz.shard(Routed(6), config(Path(nvme), tiers={"prefetch": 0}), units=(Block,))
    try:
        for step in range(3):
            order = (0, 1, 2, 3, 4, 5) if rank == 0 or step < 2 else (5, 4, 3, 2, 1, 0)
            model(vectors(step, rank), order).square().sum().backward()
    except RankMismatchError as error:
        return str(error)
    finally:
        tz.close(model)
    return "nothing was said"


def test_another_order_is_named(tmp_path: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(different_order, str(tmp_path)):
        assert "rank 0: 'blocks." in message
        assert "rank 1: 'blocks." in message or "rank 1: a call of every rank" in message


def evaluation_between(rank: int, size: int, nvme: str) -> None:
    case = Case(Stack, evaluating, (Block,), steps=10, eps=1e-6)
    found = train_sharded(case, config(Path(nvme)), rank, size)
    assert_close(found, train_plain(case, size), tolerance=5e-5)


def evaluating(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    if step % 3 == 1:
        with torch.no_grad():
            model(vectors(500, rank))
        with torch.inference_mode():
            model.blocks[1](vectors(501, rank))
    return regression(model, step, rank)


def test_evaluation_between_steps(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(evaluation_between, str(tmp_path))


def good_after_bad(rank: int, size: int, nvme: str) -> None:
    """Every rank raises in the same forward, then in the same backward; the next steps are as if nothing was."""
    results = []
    for failing in (False, True):
        torch.manual_seed(0)
        with sharded(Stack(), config(Path(nvme)), (Block,)) as model:
            optimizer = tz.AdamW(model.parameters(), **hyper(Case(Stack, regression)))
            for step in range(10):
                if failing and step in (1, 4):
                    broken_pass(model, in_backward=step == 4)
                    optimizer.zero_grad()
                regression(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(tz.full_state_dict(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def broken_pass(model: nn.Module, in_backward: bool) -> None:
    def raise_here(*_: object) -> None:
        raise ZeroDivisionError

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if not in_backward:
            raise_here()
        out.register_hook(raise_here)

    handle = model.blocks[1].register_forward_hook(hook)
    try:
        model(vectors(0, 0)).sum().backward()
    except ZeroDivisionError:
        return
    finally:
        handle.remove()
    raise AssertionError("nothing was raised")


def test_good_steps_after_bad_ones(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(good_after_bad, str(tmp_path))


def one_reads_while_the_other_trains(rank: int, size: int, nvme: str) -> str:
    """The usual slip: ``if rank == 0: state = tz.full_state_dict(model)``."""
    model = tz.shard(Stack(), config(Path(nvme)), units=(Block,))

    def act() -> None:
        if rank == 0:
            tz.full_state_dict(model)
        regression(model, 0, rank).backward()
        tz.clip_grad_norm_(model, 1.0)

    return told(model, act)


def test_a_call_that_only_one_rank_makes_is_named(tmp_path: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(one_reads_while_the_other_trains, str(tmp_path)):
        assert "(rank 0: a call of every rank, rank 1: '(root)')" in message


def one_skips_its_backward(rank: int, size: int, nvme: str) -> str:
    """A loop that goes on at a bad loss, which only one rank has."""
    model = tz.shard(Stack(), config(Path(nvme)), units=(Block,))

    def act() -> None:
        for step in range(2):
            loss = regression(model, step, rank)
            if rank == 0:
                loss.backward()
            tz.clip_grad_norm_(model, 1.0)

    return told(model, act)


def test_a_backward_that_one_rank_leaves_out_is_named(tmp_path: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(one_skips_its_backward, str(tmp_path)):
        assert "make backward and calls such as clip_grad_norm_" in message


ORDERS = (((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (0, 2)), ((0, 1, 2), ()), ((0, 1, 2), (0, 1, 2)))


def a_unit_left_out(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    return F.mse_loss(model(x, ORDERS[step % 4][rank]), torch.sin(x))


def units_left_out_at_stage_0(rank: int, size: int, nvme: str) -> None:
    """Without gathers a rank may leave a unit out: its part of the mean is zero, its pending update its own."""
    case = Case(Routed, a_unit_left_out, (Block,), steps=12, eps=1e-6)
    wanted = train_plain(case, size)
    for tier in ("host", "nvme"):
        for prefetch in (0, 1):
            settings = config(Path(nvme), tier, sharding={"stage": 0})
            settings = settings.override([f"tiers.prefetch={prefetch}"])
            assert_close(train_sharded(case, settings, rank, size), wanted, tolerance=5e-5)


def test_a_unit_that_one_rank_leaves_out(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(units_left_out_at_stage_0, str(tmp_path))


class Part(Block):
    """Can leave its norm out."""

    partly = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) if self.partly else super().forward(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.ModuleList([Part(), Part()]), nn.ModuleList([Part(), Part()])

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        for block in self.trunk:
            x = block(x)
        total: torch.Tensor = sum(self.heads[head](x) for head in heads)
        return total


def a_new_head_and_a_missing_gradient(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    model.trunk[1].partly = step % 3 == 1 and rank == 1
    x = vectors(step, rank)
    return F.mse_loss(model(x, (0,) if step % 3 == 0 else (0, 1)), torch.sin(x))


def reductions_in_one_order(rank: int, size: int, nvme: str) -> None:
    case = Case(Heads, a_new_head_and_a_missing_gradient, (Part,), steps=9, eps=1e-6)
    wanted = train_plain(case, size)
    for stage in (0, 2, 3):
        found = train_sharded(case, config(Path(nvme), "host", sharding={"stage": stage}), rank, size)
        assert_close(found, wanted, tolerance=5e-5)


def test_reductions_come_in_one_order_on_all_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(reductions_in_one_order, str(tmp_path))


def agreed_budgets(rank: int, size: int) -> tuple[int, int]:
    free = Budgets(None, None, 1000 - rank, 2000 + rank, device_is_host=True, nvme=False)
    found = agreed(free, World(rank, size, group=dist.distributed_c10d._get_default_group()))
    return found.device_free, found.host_free


def test_ranks_plan_with_what_the_scarcest_has(two_ranks: RankPool) -> None:
    """Plans that differ would gather in different orders."""
    assert two_ranks.run(agreed_budgets) == [(999, 2000), (999, 2000)]


class PartlyFrozen(nn.Module):
    """Its trainable gradients are complete before its frozen weight is read for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
        self.trained, self.extra = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y = torch.tanh(self.trained(torch.tanh(self.frozen(x))))
        return x + (torch.tanh(self.extra(y)) if extra else y)


class PartlyFrozenStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(PartlyFrozen() for _ in range(3))

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, extra)
        return x


def partly_frozen_as_rank(rank: int, size: int, nvme: str) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = vectors(step, rank)
        return F.mse_loss(model(x, rank == 0 or step % 2 == 0), torch.sin(x))

    case = Case(PartlyFrozenStack, loss, (PartlyFrozen,), steps=6, eps=1e-6)
    wanted = train_plain(case, size)
    for stage in (1, 2, 3):
        sections = {"sharding": {"stage": stage}, "optimizer": {"overlap": "backward"}}
        settings = config(Path(nvme), "host", train={"precision": "fp32", "grad_clip": 0}, **sections)
        assert_close(train_sharded(case, settings, rank, size), wanted, tolerance=5e-5)


def test_partly_frozen_units_with_updates_in_the_backward(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(partly_frozen_as_rank, str(tmp_path))


def differently_configured(rank: int, size: int, nvme: str) -> str:
    settings = config(Path(nvme), "host", optimizer={"state_dtype": "int8" if rank else "bf16"})
    with pytest.raises(tz.RankMismatchError) as caught:
        tz.shard(Stack(), settings, (Block,))
    return str(caught.value)


def test_ranks_with_different_configurations_are_told_the_key(tmp_path: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(differently_configured, str(tmp_path)):
        assert message == (
            "shard: optimizer.state_dtype is 'bf16' on rank 0 and 'int8' on rank 1; all ranks need the same"
        )
