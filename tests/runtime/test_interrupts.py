"""Ctrl-C at odd moments, as in a notebook: what comes next is right, whatever was under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.checkpoint import streaming
from tierzero.errors import TierError
from tierzero.runtime.pager import Pager
from tierzero.runtime.state import SlotState, UnitState
from tierzero.tiers import IoEngine
from tierzero.tiers.interrupts import held_back

from ..support.oracle import TIERS, Case, Outcome, assert_bits, built, config, hyper, record_state, sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,))
PLACEMENTS = [*TIERS, {"host": 0.5, "nvme": 0.5}]


class Once:
    """Lets one call of a function be followed by an interrupt: number ``nth`` after `arm`."""

    def __init__(self, original: Callable[..., Any], interrupt: Callable[[], object]) -> None:
        self.original = original
        self.interrupt = interrupt
        self.left = -1
        self.fired = 0

    def arm(self, nth: int) -> None:
        self.left = nth

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(*args, **kwargs)
        self.left -= 1
        if self.left == -1:
            self.fired += 1
            self.interrupt()
        return result


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def raise_at_once() -> None:
    raise KeyboardInterrupt


def train(model: nn.Module, once: Once | None, every: int) -> Outcome:
    """Six steps; before each one, an attempt at it that is interrupted somewhere else each time."""
    optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
    outcome = Outcome()
    for step in range(6):
        if once is not None:
            once.arm(step * every + 1)
            try:
                regression(model, step, 0).backward()
            except KeyboardInterrupt:
                assert once.left < 0
            once.arm(-1)
            optimizer.zero_grad()
        loss = regression(model, step, 0)
        loss.backward()
        outcome.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    record_state(model, outcome)
    return outcome


@pytest.mark.parametrize("tier", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    ("owner", "name", "interrupt", "every"),
    [
        (IoEngine, "submit", ctrl_c, 1),
        (SlotState, "put_away", raise_at_once, 5),
        (SlotState, "make_resident", raise_at_once, 5),
    ],
    ids=["transfers", "put-away", "make-resident"],
)
def test_the_next_step_is_right(
    owner: type,
    name: str,
    interrupt: Callable[[], object],
    every: int,
    tier: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        wanted = train(model, None, every)
    once = Once(getattr(owner, name), interrupt)
    monkeypatch.setattr(owner, name, lambda self, *args: once(self, *args))
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        found = train(model, once, every)
        assert [slot.name for slot in running(model).slots() if not slot.is_away] == []
    assert_bits(found, wanted)
    assert once.fired or (tier == "host" and name == "submit")


def test_an_interrupt_that_cannot_be_held_back_is_never_forgotten(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        with pytest.raises(SystemExit), running(model).engine.whole():
            raise SystemExit
        with pytest.raises(TierError, match=r"SystemExit while state was changing hands.*from a checkpoint"):
            regression(model, 0, 0)


def test_ctrl_c_is_held_back_until_the_end() -> None:
    done = []

    def section() -> None:
        with held_back(), held_back():
            ctrl_c()
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        section()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handled_sigterm_is_held_back_too_and_both_handlers_are_put_back() -> None:
    class Terminated(BaseException):
        pass

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    done = []

    def section() -> None:
        with held_back():
            os.kill(os.getpid(), signal.SIGTERM)
            ctrl_c()
            done.append(1)
        done.append(2)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(Terminated):
            section()
        assert done == [1]
        assert signal.getsignal(signal.SIGTERM) is terminate
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_waiting_for_a_gradient_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits next still waits for it."""
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        regression(model, 0, 0).backward()
        gradients = running(model).gradients
        waiting = list(gradients._in_flight)
        assert waiting
        future = gradients._in_flight[waiting[0]]
        with monkeypatch.context() as patch:
            patch.setattr(future, "done", lambda: False)
            patch.setattr(future, "result", lambda: raise_at_once())
            with pytest.raises(KeyboardInterrupt):
                gradients.finish()
        assert list(gradients._in_flight) == waiting
        gradients.finish()
        assert torch.isfinite(tz.clip_grad_norm_(model, 1.0))


def interrupted_after(seconds: float, call: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()


def test_write_backs_outlive_an_interrupt_of_whoever_waits_for_them(tmp_path: Path) -> None:
    """The updated state exists nowhere but in memory until it is written."""
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        runtime = running(model)
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(2):
            regression(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.engine.fault = lambda op, *_: time.sleep(0.2 if op == "write" else 0)
        interrupted_after(0.1, lambda: tz.full_state_dict(model))
        runtime.engine.fault = None
        interrupted = tz.full_state_dict(model)
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        regression(model, 2, 0).backward()
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        tz.load_checkpoint(model, optimizer, tmp_path / "saved")
        loaded = tz.full_state_dict(model)
    assert all(torch.equal(loaded[name], interrupted[name]) for name in loaded)


@pytest.mark.parametrize("tier", TIERS)
def test_half_a_checkpoint_is_never_trained_on(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        read = Once(streaming._take, lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)))
        read.arm(2)
        monkeypatch.setattr(streaming, "_take", read)
        with pytest.raises(KeyboardInterrupt):
            tz.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert read.fired
        for act in (lambda: regression(model, 0, 0), lambda: tz.full_state_dict(model)):
            with pytest.raises(tz.CheckpointError, match=r"holds half of .*saved.*load another checkpoint"):
                act()
        monkeypatch.undo()
        tz.load_checkpoint(model, optimizer, tmp_path / "saved")
        regression(model, 0, 0)


def test_a_damaged_tile_of_a_checkpoint_leaks_no_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        runtime = running(model)
        tz.save_checkpoint(model, None, tmp_path / "saved")
        before = runtime.pools["host"].used

        def damaged(*_: object) -> None:
            raise tz.CheckpointError("damaged")

        monkeypatch.setattr(streaming, "_take", damaged)
        with pytest.raises(tz.CheckpointError):
            tz.load_checkpoint(model, None, tmp_path / "saved")
        assert runtime.pools["host"].used == before
        assert not any(runtime.tile_io._in_use.values())
        with pytest.raises(tz.CheckpointError, match="holds half of"):
            regression(model, 0, 0)
        monkeypatch.undo()
        tz.load_checkpoint(model, None, tmp_path / "saved")
        regression(model, 0, 0)


def test_an_interrupted_edit_is_never_forgotten(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        engine = running(model).engine
        fired = []

        def fault(op: str, *_: object) -> None:
            if op == "write" and not fired:
                fired.append(op)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)

        def edit() -> None:
            with tz.gathered(model.first.weight), torch.no_grad():
                model.first.weight.mul_(2)
                engine.fault = fault

        with pytest.raises(KeyboardInterrupt):
            edit()
        engine.fault = None
        with pytest.raises(TierError, match=r"while the weight of parameter 'first.weight' was being changed"):
            regression(model, 0, 0)


def test_an_interrupt_between_two_groups_of_a_unit_leaks_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        model = built(STACK)
        for block in model.blocks:
            block.norm.requires_grad_(False)
        return model

    with sharded(build(), config(tmp_path), STACK.units) as model:
        runtime = running(model)
        reserve, calls = Pager._reserve, []

        def once(self: Pager, record: Any, nbytes: int, unit: UnitState, required: bool) -> bool:
            calls.append(unit.title)
            if calls.count(unit.title) == 2:
                raise KeyboardInterrupt
            return reserve(self, record, nbytes, unit, required)

        monkeypatch.setattr(Pager, "_reserve", once)
        with pytest.raises(KeyboardInterrupt):
            regression(model, 0, 0)
        monkeypatch.undo()
        for unit in runtime.units:
            runtime.pager.forget(unit)
        assert runtime.pools["arena"].used == 0


@pytest.mark.parametrize("placement", [*TIERS, {"params": "host", "optimizer": "nvme", "gradients": "host"}], ids=str)
def test_updates_go_on_when_the_wait_for_them_is_interrupted(
    placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever comes next waits for them."""
    sections = {"placement": placement} if isinstance(placement, dict) else {}
    settings = config(tmp_path, "nvme" if sections else placement, optimizer={"overlap": "none"}, **sections)
    found = []
    for interrupted in (False, True):
        with sharded(built(STACK), settings, STACK.units) as model:
            runtime = running(model)
            optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
            for step in range(2):
                regression(model, step, 0).backward()
                if step == 1 and interrupted:
                    runtime.engine.fault = lambda *_: time.sleep(0.02)
                    apply = Once(runtime.updater.apply, ctrl_c)
                    apply.arm(1)
                    monkeypatch.setattr(runtime.updater, "apply", apply)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                seen = regression(model, 5, 0)
            found.append([seen, *tz.full_state_dict(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_gradient_that_an_interrupt_left_with_the_parameter_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        gradients = running(model).gradients
        arrive, left = gradients.arrive, []

        def interrupted(slot: SlotState) -> None:
            if not left:
                left.append(slot)
                raise KeyboardInterrupt
            arrive(slot)

        monkeypatch.setattr(gradients, "arrive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regression(model, 0, 0).backward()
        model.zero_grad()
        with torch._C.DisableTorchFunctionSubclass():
            assert all(parameter.grad is None for parameter in model.parameters())
