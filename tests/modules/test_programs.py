"""Random programs of public calls, in any order that a loop may have: PyTorch's values, and the same bits wherever the
state lives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tierzero as tz

from ..support.oracle import config, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import Block, Stack, regression, vectors

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
Call = tuple[Any, ...]
Log = list[torch.Tensor]

NAMES = ("first.weight", "blocks.0.up.bias", "blocks.1.down.weight", "blocks.1.norm.weight", "last.weight")
NAME = st.sampled_from(NAMES)
CALLS = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 3)),
    st.tuples(st.just("backward"), st.integers(0, 3)),
    st.tuples(st.just("part"), st.integers(0, 1)),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("zero_grad")),
    st.tuples(st.just("clip"), st.sampled_from([0.01, 0.5, 1e9])),
    st.tuples(st.just("evaluate")),
    st.tuples(st.just("edit"), NAME),
    st.tuples(st.just("write"), NAME, st.sampled_from(["weight", "m", "v", "gradient", "step"])),
    st.tuples(st.just("read"), st.sampled_from(["weight", "m", "v", "gradient", "step"])),
    st.tuples(st.just("freeze"), NAME),
    st.tuples(st.just("thaw"), NAME),
    st.tuples(st.just("rate"), st.sampled_from([0.0, 1e-3, 1e-2])),
    st.tuples(st.just("away")),
    st.tuples(st.just("save")),
    st.tuples(st.just("load")),
    st.tuples(st.just("fail")),
)
PLACES = st.sampled_from(["nvme", "host", "device", {"device": 0.3, "host": 0.3, "nvme": 0.4}])


class FaultError(RuntimeError):
    pass


def stop(*_: Any) -> None:
    raise FaultError


class Sharded:
    """The calls on a sharded model."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.optimizer: torch.optim.Optimizer = tz.AdamW(model.parameters(), **HYPER)
        self.saved: Path | None = None
        self.saves = 0

    def read(self, kind: str) -> Log:
        found = tz.read_state(self.model.parameters(), kind)  # type: ignore[call-overload]
        return [value for value in found if value is not None]

    def write(self, name: str, kind: str, value: torch.Tensor) -> None:
        tz.write_state(self.model.get_parameter(name), kind, value)  # type: ignore[arg-type]

    def clip(self, most: float) -> torch.Tensor:
        return tz.clip_grad_norm_(self.model, most)

    def edit(self, name: str) -> None:
        parameter = self.model.get_parameter(name)
        with tz.gathered(parameter), torch.no_grad():
            parameter.mul_(0.5)

    def away(self) -> None:
        tz.offload(self.model)
        tz.reload(self.model)

    def save(self) -> None:
        self.saves += 1
        self.saved = tz.save_checkpoint(self.model, self.optimizer, self.folder / f"saved-{self.saves}") or (
            self.folder / f"saved-{self.saves}"
        )

    def load(self) -> None:
        if self.saved is not None:
            tz.load_checkpoint(self.model, self.optimizer, self.saved)


class Plain:
    """The same calls on PyTorch's own model and optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
        self.saved: Any = None

    def state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        zeros = torch.zeros_like(parameter)
        return self.optimizer.state.get(
            parameter, {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        )

    def read(self, kind: str) -> Log:
        names = {"m": "exp_avg", "v": "exp_avg_sq", "step": "step"}
        if kind == "weight":
            return [parameter.detach().clone() for parameter in self.model.parameters()]
        if kind == "gradient":
            return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        return [self.state(parameter)[names[kind]].clone() for parameter in self.model.parameters()]

    def write(self, name: str, kind: str, value: torch.Tensor) -> None:
        parameter = self.model.get_parameter(name)
        if kind == "weight":
            parameter.data.copy_(value)
        elif kind == "gradient":
            parameter.grad = value.clone()
        else:
            state = self.optimizer.state[parameter] = self.state(parameter)
            state[{"m": "exp_avg", "v": "exp_avg_sq", "step": "step"}[kind]].copy_(value)

    def clip(self, most: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def edit(self, name: str) -> None:
        self.model.get_parameter(name).data.mul_(0.5)

    def away(self) -> None:
        return

    def save(self) -> None:
        state = {parameter: {k: v.clone() for k, v in s.items()} for parameter, s in self.optimizer.state.items()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.saved = ([parameter.detach().clone() for parameter in self.model.parameters()], state, rates)

    def load(self) -> None:
        if self.saved is None:
            return
        weights, state, rates = self.saved
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
            parameter.grad = None
        self.optimizer.state.clear()
        for parameter, its in state.items():
            self.optimizer.state[parameter] = {k: v.clone() for k, v in its.items()}
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def mean(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).mean()


def run(program: Sequence[Call], it: Sharded | Plain, ranks: Sequence[int] = (0,)) -> Log:
    """``ranks``: whose data the gradients are of, all ranks' for the plain model."""
    log: Log = []
    for number, (call, *its) in enumerate(program):
        model = it.model
        if call == "backward":
            mean([regression(model, its[0], rank) for rank in ranks]).backward()
        elif call == "part":
            mean([model.blocks[its[0]](vectors(number, rank)).square().mean() for rank in ranks]).backward()
        elif call == "step":
            it.optimizer.step()
        elif call == "zero_grad":
            it.optimizer.zero_grad()
        elif call == "clip":
            log.append(torch.as_tensor(it.clip(its[0])))
        elif call == "evaluate":
            with torch.no_grad():
                log.append(model(vectors(number, 0)))
        elif call == "write":
            name, kind = its
            shape = () if kind == "step" else model.get_parameter(name).shape
            value = torch.rand(shape, generator=torch.Generator().manual_seed(number))
            it.write(name, kind, torch.tensor(3.0) if kind == "step" else value)
        elif call == "read":
            log.extend(it.read(its[0]))
        elif call in ("freeze", "thaw"):
            model.get_parameter(its[0]).requires_grad_(call == "thaw")
        elif call == "rate":
            it.optimizer.param_groups[0]["lr"] = its[0]
        elif call == "fail":
            handle = model.blocks[1].register_forward_hook(stop)
            with pytest.raises(FaultError):
                regression(model, 0, 0)
            handle.remove()
        else:
            getattr(it, call)(*its)
    for kind in ("weight", "m", "v", "step"):
        log.extend(it.read(kind))
    return log


@dataclass(frozen=True)
class Setting:
    place: Any
    overlap: str
    prefetch: int

    def config(self, folder: Path) -> tz.Config:
        return config(folder, self.place, optimizer={"overlap": self.overlap}, tiers={"prefetch": self.prefetch})


def sharded_run(rank: int, size: int, program: Sequence[Call], folder: str, setting: Setting) -> Log:
    torch.manual_seed(0)
    with sharded(Stack(2), setting.config(Path(folder)), (Block,)) as model:
        return run(program, Sharded(model, Path(folder)), (rank,))


def run_alone(function: Callable[..., Log], *args: Any) -> list[Log]:
    return [function(0, 1, *args)]


def check(program: Sequence[Call], setting: Setting, ranks: RankPool | None = None) -> None:
    torch.manual_seed(0)
    wanted = run(program, Plain(Stack(2)), range(2 if ranks else 1))
    logs, run_all = [], ranks.run if ranks else run_alone
    for each in (Setting("host", "none", 0), setting):
        with tempfile.TemporaryDirectory() as folder:
            every = run_all(sharded_run, program, folder, each)
        assert all(torch.equal(*values) for values in zip(every[0], every[-1], strict=True)), "ranks differ"
        logs.append(every[0])
    simplest, found = logs
    assert len(found) == len(simplest) == len(wanted)
    for number, (have, same, want) in enumerate(zip(found, simplest, wanted, strict=True)):
        assert torch.equal(have, same), f"value {number} depends on where the state lives"
        close = torch.allclose(have.float(), want.float(), rtol=1e-4, atol=1e-5)
        assert close, f"value {number} is not PyTorch's: {have} instead of {want}"


PROGRAMS = st.lists(CALLS, min_size=4, max_size=24)
SETTINGS = st.builds(Setting, PLACES, st.sampled_from(["none", "forward", "both"]), st.integers(0, 2)).filter(
    lambda setting: setting.overlap != "both" or setting.place == "nvme"
)
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(program=PROGRAMS, setting=SETTINGS)
def test_any_program(program: list[Call], setting: Setting) -> None:
    check(program, setting)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(program=PROGRAMS, setting=SETTINGS)
def test_any_program_on_two_ranks(two_ranks: RankPool, program: list[Call], setting: Setting) -> None:
    check(program, setting, two_ranks)


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(program=PROGRAMS, setting=SETTINGS)
def test_many_programs(program: list[Call], setting: Setting) -> None:
    check(program, setting)


@pytest.mark.long
@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(program=PROGRAMS, setting=SETTINGS)
def test_many_programs_on_two_ranks(two_ranks: RankPool, program: list[Call], setting: Setting) -> None:
    check(program, setting, two_ranks)
