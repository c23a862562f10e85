"""Failing drives and failing user code: the error says what happened, nothing hangs, nothing wrong is trained on."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.errors import TierError
from tierzero.runtime import gradient_home

from ..support.models import Net, batch, net
from ..support.training import (
    Recipe,
    Result,
    assert_identical,
    assert_same_state,
    configured,
    everything_in,
    relative_error,
    sharded,
    take_steps,
    train_plain,
    train_sharded,
    whole_state,
)

RECIPE = Recipe(steps=8, schedule=False)


class FailAt:
    """Fails one system call: the ``nth`` of ``op`` after it was armed."""

    def __init__(self, op: str, code: int, nth: int = 0) -> None:
        self.op, self.code, self.left = op, code, nth
        self.hits = 0

    def __call__(self, op: str, path: Path, offset: int, nbytes: int) -> None:
        if op != self.op:
            return
        if self.left == 0:
            self.hits += 1
            self.left = -1
            raise OSError(self.code, "injected")
        self.left -= 1


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, clip: float | None = 1.18) -> float:
    loss = model(*batch(step))
    loss.backward()
    if clip is not None:
        tz.clip_grad_norm_(model, clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def until_error(
    model: nn.Module, optimizer: torch.optim.Optimizer, start: int, steps: int = 4, clip: float | None = 1.18
) -> TierError:
    """Trains on until something is raised."""

    def train_on() -> None:
        for step in range(start, start + steps):
            one_step(model, optimizer, step, clip)
        running(model).flush()

    with pytest.raises(TierError) as caught:
        train_on()
    return caught.value


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize(
    ("op", "code", "nth"),
    [("read", errno.EIO, 0), ("read", errno.EIO, 9), ("write", errno.EIO, 5), ("write", errno.ENOSPC, 0)],
)
def test_a_failed_transfer_is_reported_and_the_checkpoint_is_whole(
    overlap: str, op: str, code: int, nth: int, tmp_path: Path
) -> None:
    """The error names file and cause within the step; a fresh run from the last checkpoint goes on bit for bit."""
    config = configured(tmp_path / "nvme", optimizer={"overlap": overlap})
    config.tiers.nvme[0].mkdir()
    model = net()
    with sharded(model, config, RECIPE) as optimizer:
        for step in range(4):
            one_step(model, optimizer, step)
        tz.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
        one_step(model, optimizer, 4)
        fault = running(model).engine.fault = FailAt(op, code, nth)
        error = until_error(model, optimizer, 5)
        assert fault.hits == 1
        assert error.errno == code
        assert str(tmp_path / "nvme") in str(error)
        assert "\n" not in str(error)
    wanted = train_sharded(net(), configured(tmp_path / "nvme", placement=everything_in("host")), RECIPE)
    again = net(seed=3)
    with sharded(again, config, RECIPE) as optimizer:
        tz.load_checkpoint(again, optimizer, tmp_path / "checkpoint")
        losses = [one_step(again, optimizer, step) for step in range(4, 8)]
        assert losses == wanted.losses[4:]
        assert_same_state(whole_state(again), wanted.state)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nth", [0, 3, 11, 20])
def test_going_on_after_a_failed_transfer_is_right_or_refused(overlap: str, op: str, nth: int, tmp_path: Path) -> None:
    """Whoever catches the error and trains on gets either the results of a run without it, or the error again."""
    model, config = net(), configured(tmp_path, optimizer={"overlap": overlap})
    clean = everything_in("host")
    wanted = train_sharded(net(), configured(tmp_path, placement=clean), RECIPE)
    with sharded(model, config, RECIPE) as optimizer:
        for step in range(3):
            one_step(model, optimizer, step)
        running(model).flush()
        fault = running(model).engine.fault = FailAt(op, errno.EIO, nth)
        losses: list[float] = []
        step = 3
        failures = 0
        while step < RECIPE.steps and failures < 3:
            try:
                losses.append(one_step(model, optimizer, step))
                step += 1
            except TierError:
                # The user's reflex: drop the gradients and try the same batch again.
                failures += 1
                assert step < RECIPE.steps
                try:
                    optimizer.zero_grad()
                except TierError:
                    break
        assert fault.hits == 1
        if failures and step < RECIPE.steps:
            return  # refused
        try:
            state = whole_state(model)
        except TierError:
            return  # refused
    assert losses == wanted.losses[3:], f"trained on wrongly after {failures} errors"
    assert_same_state(state, wanted.state, f"after {failures} errors")


@pytest.mark.parametrize("nth", [0, 4])
def test_a_gradient_lost_on_the_way_is_never_forgotten(nth: int, tmp_path: Path) -> None:
    """An update beside the backward counts as done once it has begun; one that cannot end must not count."""
    placement = everything_in("host") | {"gradients": "nvme"}
    config = configured(tmp_path, placement=placement, train={"grad_clip": 0}, optimizer={"overlap": "backward"})
    model = net()
    with sharded(model, config, RECIPE) as optimizer:
        running(model).engine.fault = FailAt("write", errno.ENOSPC, nth)
        for attempt in range(2):
            assert until_error(model, optimizer, attempt, clip=None).errno == errno.ENOSPC


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the backward")


class Fuse:
    """Makes a block fail on demand: in its forward, or in the backward through its output."""

    def __init__(self, model: Net, block: int = 1) -> None:
        self.armed = ""
        original = model.blocks[block].forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if self.armed == "forward":
                raise ArithmeticError("in the forward")
            out: torch.Tensor = original(x)
            return _Explode.apply(out) if self.armed == "backward" else out

        model.blocks[block].forward = forward


def train_with_accidents(
    model: Net, optimizer: torch.optim.Optimizer, clip: Callable[[float], object], where: str, drop: bool
) -> list[float]:
    """Ten steps with an exception before some of them; ``drop``: the user calls ``zero_grad`` after it."""
    fuse, losses = Fuse(model), []
    for step in range(10):
        if step in (1, 2, 5):
            fuse.armed = where
            with pytest.raises(ArithmeticError):
                model(*batch(100 + step)).backward()
            fuse.armed = ""
            if drop:
                optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(float(loss.detach()))
        clip(0.6)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "kept"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_exceptions_leave_what_plain_pytorch_leaves(where: str, drop: bool, placement: str, tmp_path: Path) -> None:
    """Also where gradients that had arrived before the exception are kept: they count in the next step."""
    plain, model = net(), net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    wanted = train_with_accidents(
        plain, optimizer, lambda most: torch.nn.utils.clip_grad_norm_(plain.parameters(), most), where, drop
    )
    config = configured(tmp_path, train={"precision": "fp32"}, placement=everything_in(placement))
    with sharded(model, config, Recipe(groups=False), poison=True) as optimizer:
        losses = train_with_accidents(model, optimizer, lambda most: tz.clip_grad_norm_(model, most), where, drop)
        torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=0)
        state = tz.full_state_dict(model)
    for name, weight in plain.named_parameters():
        assert relative_error(state[name], weight.detach()) < 1e-6, name


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_leak_no_memory(where: str, tmp_path: Path) -> None:
    """After a failed pass and a good step, the pools hold what they hold without the failure."""
    model = net()
    with sharded(model, configured(tmp_path), RECIPE) as optimizer:
        runtime, fuse = running(model), Fuse(model)

        def used() -> dict[str, int]:
            one_step(model, optimizer, 0)
            runtime.flush()
            return {name: runtime.pools[name].used for name in ("buckets", "host")}

        before = used()
        for step in range(20):
            fuse.armed = where
            with pytest.raises(ArithmeticError):
                model(*batch(step)).backward()
            fuse.armed = ""
            if step % 2:
                optimizer.zero_grad()
        assert used() == before


def test_an_engine_that_failed_still_closes_and_its_path_is_free(tmp_path: Path) -> None:
    model = net()
    with sharded(model, configured(tmp_path), RECIPE) as optimizer:
        one_step(model, optimizer, 0)
        running(model).engine.fault = FailAt("write", errno.EIO)
        until_error(model, optimizer, 1)
        with pytest.raises(TierError, match=re.escape(str(tmp_path))):
            one_step(model, optimizer, 2)
    wanted = train_sharded(net(), configured(tmp_path, placement=everything_in("host")), RECIPE)
    assert_identical(train_sharded(net(), configured(tmp_path), RECIPE), wanted)


def test_take_steps_reports_plain_losses() -> None:
    """The loop that the comparisons of these tests share is the one of plain PyTorch."""
    model, result = net(), Result()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recipe = Recipe(steps=2, accumulate=2, clip=None, schedule=False)
    take_steps(model, optimizer, torch.tensor, recipe, result)
    wanted = [sum(float(model(*batch(2 * step + micro)).detach()) / 2 for micro in range(2)) for step in range(2)]
    assert result.losses == pytest.approx(wanted, rel=1e-6)
    assert train_plain(net(), Recipe(steps=1)).losses[0] == pytest.approx(float(net()(*batch(0)).detach()))


def test_a_failed_merge_of_gradients_leaks_no_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a GPU has no memory left for it."""
    model = net()
    with sharded(model, configured(tmp_path), RECIPE) as optimizer:
        runtime = running(model)
        model(*batch(0)).backward()
        runtime.gradients.finish()

        def fails(*_: object) -> float:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(gradient_home, "_accumulate", fails)
            model(*batch(1)).backward()
            with pytest.raises(torch.OutOfMemoryError):
                runtime.gradients.finish()
        while True:
            try:
                optimizer.zero_grad()
                break
            except torch.OutOfMemoryError:
                continue
        tz.full_state_dict(model)
        assert (runtime.pools["host"].used, runtime.pools["buckets"].used) == (0, 0)
        one_step(model, optimizer, 2)
