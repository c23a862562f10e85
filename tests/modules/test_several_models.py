"""Several sharded models in one process, on one NVMe path: teacher and student, one after another, side by side."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.runtime.accounts import peak_tier_bytes

from ..support.oracle import TIERS, Case, built, config, hyper, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import Block, Stack, regression, vectors

TEACHER = Case(lambda: Stack(4), regression, (Block,))
STUDENT = Case(lambda: Stack(2), regression, (Block,))


def distill(teacher: nn.Module, student: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The teacher is asked before the student's forward and between its forward and backward."""
    x = vectors(step, rank)
    with torch.no_grad():
        first = teacher(x)
    out = student(x)
    with torch.no_grad():
        second = teacher(x + 1)
    return F.mse_loss(out, first) + 0.1 * F.mse_loss(out, second)


def distilled(teacher: nn.Module, student: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    for step in range(10):
        loss = sum(distill(teacher, student, step, rank) for rank in ranks) / len(ranks)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def teacher_and_student(rank: int, size: int, nvme: str, tier: str) -> None:
    teacher, student = built(TEACHER, 1), built(STUDENT)
    trained = torch.optim.AdamW(student.parameters(), **hyper(STUDENT))
    distilled(teacher, student, trained, list(range(size)))
    settings = config(Path(nvme), tier)
    frozen = built(TEACHER, 1).requires_grad_(False)
    with sharded(frozen, settings, TEACHER.units) as first, sharded(built(STUDENT), settings, STUDENT.units) as second:
        optimizer = tz.AdamW(second.parameters(), **hyper(STUDENT))
        distilled(first, second, optimizer, [rank])
        states = tz.full_state_dict(first), tz.full_state_dict(second)
    for name, value in teacher.state_dict().items():
        assert torch.equal(states[0][name], value), name
    for name, value in student.state_dict().items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tier", TIERS)
def test_teacher_and_student(tier: str, tmp_path: Path) -> None:
    teacher_and_student(0, 1, str(tmp_path), tier)


def test_teacher_and_student_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(teacher_and_student, str(tmp_path), "nvme")


def test_shares_of_the_same_budgets(tmp_path: Path) -> None:
    """Whatever the models take at their peak, together it is within what the configuration states."""
    settings = config(
        tmp_path,
        tiers={"device": "200KB", "host": "600KB", "nvme_limit": "1MB"},
        placement={"params": "device", "optimizer": "nvme", "gradients": "host"},
    )
    with pytest.raises(tz.ConfigError, match=r"share is 1.5; use a fraction"):
        tz.shard(built(STUDENT), settings, STUDENT.units, share=1.5)
    student = tz.shard(built(STUDENT), settings, STUDENT.units, share=0.6)
    with pytest.raises(tz.ConfigError, match=r"share = 0.5 of these budgets is more than the 0.4"):
        tz.shard(built(TEACHER), settings, TEACHER.units, share=0.5)
    with pytest.raises(tz.BudgetError, match=r"tiers\.device = 2,000 bytes"):
        tz.shard(built(TEACHER), settings, TEACHER.units, share=0.01)
    teacher = tz.shard(built(TEACHER).requires_grad_(False), settings, TEACHER.units, share=0.4)
    distilled(teacher, student, tz.AdamW(student.parameters(), **hyper(STUDENT)), [0])
    runtimes = running(student), running(teacher)
    for tier, stated in (("device", 200_000), ("host", 600_000), ("nvme", 1_000_000)):
        assert 0 < sum(peak_tier_bytes(runtime)[tier] for runtime in runtimes) <= stated
        capacities = [sum(p.capacity for p in runtime.pools.values() if p.tier.value == tier) for runtime in runtimes]
        assert sum(capacities) <= stated
    tz.close(teacher)
    tz.close(tz.shard(built(TEACHER), settings, TEACHER.units, share=0.4))
    tz.close(student)


def test_one_optimizer_over_two_models(tmp_path: Path) -> None:
    """As a generator with an encoder: gradients flow through both, one step updates both."""
    plain = [built(STUDENT), built(TEACHER, 1)]
    settings = config(tmp_path)
    with sharded(built(STUDENT), settings, STUDENT.units) as one, sharded(built(TEACHER, 1), settings, (Block,)) as two:
        models: list[list[nn.Module]] = [plain, [one, two]]
        for kind, pair in zip((torch.optim.AdamW, tz.AdamW), models, strict=True):
            optimizer = kind([*pair[0].parameters(), *pair[1].parameters()], **hyper(STUDENT))
            for step in range(5):
                pair[1](torch.tanh(pair[0](vectors(step, 0)))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for sharded_one, wanted in zip((one, two), plain, strict=True):
            state = tz.full_state_dict(sharded_one)
            for name, value in wanted.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_models_one_after_another_leave_nothing(tmp_path: Path) -> None:
    process = psutil.Process()
    counts = []
    for round_ in range(7):
        model = tz.shard(built(STUDENT), config(tmp_path), units=STUDENT.units)
        optimizer = tz.AdamW(model.parameters(), **hyper(STUDENT))
        regression(model, 0, 0).backward()
        optimizer.step()
        tz.close(model)
        del model, optimizer
        gc.collect()
        if round_ in (2, 6):
            files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
            counts.append((process.num_fds(), process.num_threads(), len(files)))
    assert counts[0] == counts[1]
    assert counts[0][2] == 0


AFTER_CLOSE: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda m: m(vectors(0, 0)),
    "state": tz.full_state_dict,
    "reading": lambda m: m.first.weight.sum(),
    "gathered": lambda m: tz.gathered(m.first.weight).__enter__(),
    "shard again": lambda m: tz.shard(m),
}


@pytest.mark.parametrize("use", AFTER_CLOSE)
def test_a_closed_model_says_so(use: str, tmp_path: Path) -> None:
    model = tz.shard(built(STUDENT), config(tmp_path), units=STUDENT.units)
    tz.close(model)
    tz.close(model)
    with pytest.raises(tz.ConfigError, match=r"closed|sharded already"):
        AFTER_CLOSE[use](model)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_model_that_is_dropped_after_a_step_gives_everything_back(tier: str, tmp_path: Path) -> None:
    model = Stack()
    tz.shard(model, config(tmp_path, tier), units=(Block,))
    optimizer = tz.AdamW(model.parameters())
    regression(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    runtime = weakref.ref(running(model))
    running(model).flush()
    del model, optimizer
    deadline = time.monotonic() + 20
    while runtime() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert runtime() is None
    while list(tmp_path.rglob("*.tier")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(tmp_path.rglob("*.tier"))
