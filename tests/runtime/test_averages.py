"""Averages of the weights: the same bits under every placement and schedule, and the bytes that they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.planner.memory_plan import plan_memory
from tierzero.runtime import update as update_module
from tierzero.runtime.build import budgets_here
from tierzero.runtime.draft import draft

from ..support.fake_device import FakeDevice
from ..support.models import UNITS, batch, net
from ..support.training import (
    Recipe,
    Result,
    assert_identical,
    bits,
    configured,
    everything_in,
    tight,
    train_sharded,
)

UNCLIPPED = Recipe(steps=5, clip=None)
EMA = {"ema": 0.7}
THIRDS = {"device": 0.3, "host": 0.3, "nvme": 0.4}
MIXED = {"params": "device", "optimizer": THIRDS, "gradients": "host"}
ROOM = {"device": "64MiB", "host": "64MiB"}


def settings(nvme: Path, precision: str = "bf16", **sections: dict[str, Any]) -> tz.Config:
    sections["optimizer"] = EMA | sections.get("optimizer", {})
    return configured(nvme, train={"precision": precision, "grad_clip": 0}, **sections)


def simplest(nvme: Path, precision: str, **options: Any) -> Result:
    config = settings(nvme, precision, placement=everything_in("host"), optimizer={"overlap": "none"})
    return train_sharded(net(), config, UNCLIPPED, **options)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return simplest(tmp_path_factory.mktemp("nvme"), "bf16")


WAYS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "backward": {"optimizer": {"overlap": "backward"}},
    "tiles": {"tiers": {"tile": 6144, "prefetch": 0}, "optimizer": {"overlap": "none"}},
    "split": {"placement": everything_in(THIRDS), "tiers": ROOM},
    "device": {"placement": everything_in("device"), "optimizer": {"overlap": "backward"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_placement_and_schedule_change_no_bit(way: str, wanted: Result, tmp_path: Path) -> None:
    assert_identical(train_sharded(net(), settings(tmp_path, **WAYS[way]), UNCLIPPED), wanted, way)


def test_nor_does_the_smallest_budget(wanted: Result, tmp_path: Path) -> None:
    assert_identical(train_sharded(net(), tight(net, settings(tmp_path)), UNCLIPPED), wanted)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_formats(precision: str, tmp_path: Path) -> None:
    found = train_sharded(net(), settings(tmp_path, precision), UNCLIPPED)
    assert_identical(found, simplest(tmp_path, precision))


@pytest.mark.parametrize("placement", [everything_in("device"), MIXED])
def test_on_a_device_with_memory_of_its_own(
    placement: dict[str, object], wanted: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, on_host = FakeDevice(1), update_module.move_average

    def guarded(fmt: Any, weight: Any, parts: Any, rate: float) -> None:
        assert not any(device.memory.owns(tensor) for tensor in (weight, *parts.values()))
        on_host(fmt, weight, parts, rate)

    monkeypatch.setattr(update_module, "move_average", guarded)
    try:
        config = settings(tmp_path, placement=placement, tiers=ROOM)
        assert_identical(train_sharded(net(), config, UNCLIPPED, device=device, poison=True), wanted)
    finally:
        device.close()


def test_the_training_is_that_without_them(wanted: Result, tmp_path: Path) -> None:
    plain = train_sharded(net(), configured(tmp_path), UNCLIPPED)
    assert (plain.losses, plain.norms) == (wanted.losses, wanted.norms)
    for name, value in plain.state.items():
        assert torch.equal(bits(value), bits(wanted.state[name])), name
    averages = {name: value for name, value in wanted.state.items() if name.endswith("/ema")}
    assert len(averages) == len(plain.state) / 4
    assert any(not torch.equal(value, wanted.state[f"{name[:-4]}/master"]) for name, value in averages.items())


def moved_and_kept(config: tz.Config) -> tuple[int, int]:
    """Bytes on NVMe that a step reads and writes, and that are kept there."""
    model = net(dim=96, hidden=(512, 512))
    planned = plan_memory(
        (drafted := draft(model, config, UNITS, 1)).shape(), drafted.request(config, 1), budgets_here(config, 1)
    )
    tz.shard(model, config, units=UNITS)
    try:
        optimizer = tz.AdamW(model.parameters())
        for step in range(4):
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = tz.stats(model)
        assert stats["tier_bytes"]["nvme"] == planned.nvme_state
        return stats["nvme_read_bytes"] + stats["nvme_write_bytes"], planned.nvme_state
    finally:
        tz.close(model)


def test_they_cost_four_bytes_of_space_and_eight_of_traffic(tmp_path: Path) -> None:
    """Per parameter, but for what fills pages up. Each update inside its step: nothing is left for the next one."""
    tiers, update = {"tile": 16384, "host": "64MiB"}, {"overlap": "none"}
    (plain, kept), (with_average, more) = (
        moved_and_kept(configured(tmp_path, tiers=tiers, optimizer=update | ema)) for ema in ({}, EMA)
    )
    parameters = sum(parameter.numel() for parameter in net(dim=96, hidden=(512, 512)).parameters())
    assert (more - kept) / parameters == pytest.approx(4, rel=0.02)
    assert (with_average - plain) / parameters == pytest.approx(8, rel=0.02)
