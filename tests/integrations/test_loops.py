"""The example loops train as unsharded models do; what a library cannot have is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tierzero as tz

from ..support.oracle import config
from .examples import example, unsharded

LOOPS = {"plain_loop": "torch", "accelerate_loop": "accelerate", "fabric_loop": "lightning_fabric"}
STEPS = 5


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Fabric makes a process group and sets variables; Accelerate keeps its state for the whole process."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.parametrize("loop", LOOPS)
def test_one_rank_trains_as_unsharded(loop: str, tmp_path: Path) -> None:
    pytest.importorskip(LOOPS[loop])
    found = example(loop).train(str(tmp_path), STEPS, "fp32")
    assert found == pytest.approx(unsharded(STEPS), rel=1e-5)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    found = tz.shard(nn.Linear(8, 8), config(tmp_path, "host"))
    yield found
    tz.close(found)


def test_a_state_of_accelerate_is_taken_up(tmp_path: Path, model: nn.Module) -> None:
    pytest.importorskip("accelerate")
    from tierzero.integrations.accelerate import TierZeroAccelerator

    accelerator = TierZeroAccelerator(cpu=True)
    optimizer = tz.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    prepared = accelerator.prepare(model, optimizer, schedule)
    assert prepared[0] is model

    def steps(count: int) -> torch.Tensor:
        for _ in range(count):
            accelerator.backward(model(torch.randn(3, 8)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared[1].step()
            prepared[2].step()
            prepared[1].zero_grad()
        return torch.stack([tz.read_state(model.weight, kind) for kind in ("master", "m", "v")])

    steps(3)
    accelerator.save_state(str(tmp_path / "state"))
    wanted = steps(3)
    accelerator.load_state(str(tmp_path / "state"))
    assert schedule.last_epoch == 3
    assert torch.equal(steps(3), wanted)
    assert accelerator.get_state_dict(model).keys() == {"weight", "bias"}
    with pytest.raises(tz.ConfigError, match="clipped by its norm"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(tz.ConfigError, match=r"torch\.optim\.sgd\.SGD cannot train"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1e-3))
    other = nn.Linear(2, 2)
    assert accelerator.prepare(other) is other


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"mixed_precision": "bf16"}, r"mixed_precision is 'bf16'"), ({"dynamo_backend": "eager"}, "train.compile")],
)
def test_settings_of_accelerate_that_cannot_be_had(setting: dict[str, Any], message: str, model: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate")
    from tierzero.integrations.accelerate import TierZeroAccelerator

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with pytest.raises(tz.ConfigError, match=message):
            TierZeroAccelerator(cpu=True, **setting).prepare(model)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_fp16_without_its_scaler_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from tierzero.integrations.accelerate import TierZeroAccelerator

    model = tz.shard(nn.Linear(8, 8), config(tmp_path, "host", train={"precision": "fp16"}))
    with pytest.raises(tz.ConfigError, match=r"tierzero\.LossScaler"):
        TierZeroAccelerator(cpu=True).prepare(model)
    tz.close(model)


def test_a_checkpoint_of_fabric_is_taken_up(tmp_path: Path) -> None:
    fabric_module = pytest.importorskip("lightning_fabric")
    from tierzero.integrations.lightning import TierZeroStrategy

    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, strategy=TierZeroStrategy())
    fabric.launch()
    inner = tz.shard(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)), config(tmp_path, "nvme"))
    model, optimizer = fabric.setup(inner, tz.AdamW(inner.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def steps(count: int) -> list[torch.Tensor]:
        for step in range(count):
            torch.manual_seed(step)
            with fabric.no_backward_sync(model):
                fabric.backward(model(torch.randn(3, 8)).square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return [*tz.full_state_dict(inner).values(), *tz.read_state(inner.parameters(), "v")]

    steps(3)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 3}
    fabric.save(tmp_path / "saved", state)
    wanted = steps(3)
    state["step"] = 99
    assert fabric.load(tmp_path / "saved", state) == {}
    assert (state["step"], schedule.last_epoch) == (3, 3)
    assert all(torch.equal(have, want) for have, want in zip(steps(3), wanted, strict=True))
    with pytest.raises(tz.CheckpointError, match="no 'epoch'"):
        fabric.load(tmp_path / "saved", state | {"epoch": 0})
    with pytest.raises(tz.ConfigError, match="use max_norm"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    with pytest.raises(tz.ConfigError, match="not sharded"):
        fabric.setup(nn.Linear(2, 2))
    tz.close(inner)


def test_precisions_of_fabric_are_refused(model: nn.Module) -> None:
    fabric_module = pytest.importorskip("lightning_fabric")
    from tierzero.integrations.lightning import TierZeroStrategy

    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, strategy=TierZeroStrategy(), precision="bf16-mixed")
    fabric.launch()
    with pytest.raises(tz.ConfigError, match=r"precision is MixedPrecision.*train\.precision"):
        fabric.setup(model)
