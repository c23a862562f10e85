"""What a program sets around a model: defaults of PyTorch, autocast, modes that watch operations, threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tierzero as tz

from ..support.compared import assert_alike, trained
from ..support.oracle import TIERS, Case, assert_at_rest, built, config, sharded
from ..support.zoo import Block, Stack, Tied, language, regression, vectors

STACK = Case(Stack, regression, (Block,))
X = vectors(0, 0)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
    "anomalies": torch.autograd.detect_anomaly,
    "profiler": lambda: torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True),
    "operations counted": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("what", AROUND)
def test_training_inside(what: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return F.mse_loss(model(X * (step + 1)), torch.sin(X).to(model(X).dtype))

    def act(model: nn.Module) -> list[torch.Tensor]:
        with AROUND[what]():
            return trained(model, loss)

    assert_alike(STACK.build, act, tmp_path, "nvme", STACK.units)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_sharding_under_other_defaults(device: str, tmp_path: Path) -> None:
    """Also a checkpoint, the state and a parameter's values."""
    plain, model = built(STACK), built(STACK)
    with torch.device(device), default_dtype(torch.bfloat16), sharded(model, config(tmp_path), STACK.units):
        regular = model(X)
        tz.save_checkpoint(model, None, tmp_path / "saved")
        tz.load_checkpoint(model, None, tmp_path / "saved")
        with tz.gathered(model.last.weight):
            gathered = model.last.weight.detach().clone()
        state = tz.full_state_dict(model)
    torch.testing.assert_close(regular, plain(X))
    assert torch.equal(gathered, plain.last.weight)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("recompute", ["unit", 2])
def test_autocast_is_that_of_the_forward(recompute: str | int, tmp_path: Path) -> None:
    """Also of a weight that another unit uses, and for the backward outside of it."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language(model, step, 0).float()

    def act(model: nn.Module) -> list[torch.Tensor]:
        return trained(model, loss)

    sections = {"activations": {"recompute": recompute}}
    assert_alike(lambda: Tied(True), act, tmp_path, "nvme", (Block, "embed"), **sections)


class Waiting(Stack):
    """Its forward waits for another thread's use of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        self.meanwhile()
        return self.last(x)


def in_a_thread(act: Callable[[], object]) -> list[str]:
    """What it raised."""
    raised: list[str] = []

    def run() -> None:
        try:
            act()
        except tz.ConfigError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised


@pytest.mark.parametrize("tier", TIERS)
def test_a_second_thread_in_the_middle_of_a_forward_is_refused(tier: str, tmp_path: Path) -> None:
    """It would take the weights away under the first one's hands, or wait for ever."""
    case = Case(Waiting, regression, (Block,))
    with sharded(built(case), config(tmp_path, tier), case.units) as model:
        early = regression(model, 1, 0)
        uses: tuple[Callable[[], object], ...] = (
            lambda: model(X),
            lambda: model.blocks[1](X),
            lambda: model.blocks[2].up.weight.sum(),
            early.backward,
        )
        wanted = built(case)(X)
        for use in uses:
            raised: list[str] = []
            model.meanwhile = lambda use=use, raised=raised: raised.extend(in_a_thread(use))
            assert torch.equal(model(X), wanted)
            assert [message for message in raised if "let them take turns" in message], raised
            model.meanwhile = lambda: None
        assert_at_rest(model)


@pytest.mark.parametrize("tier", TIERS)
def test_threads_that_take_turns(tier: str, tmp_path: Path) -> None:
    """A forward in one thread, its backward in another, inference in a third."""
    plain = built(STACK)
    regression(plain, 0, 0).backward()
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        losses: list[torch.Tensor] = []
        assert in_a_thread(lambda: losses.append(regression(model, 0, 0))) == []
        assert in_a_thread(losses[0].backward) == []
        assert in_a_thread(lambda: model(X)) == []
        for have, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(tz.read_state(have, "gradient"), want.grad)
