"""Ctrl-C at odd moments, as in a notebook: what comes next is right, whatever was under way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.errors import TierError
from tierzero.runtime.state import SlotState
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
