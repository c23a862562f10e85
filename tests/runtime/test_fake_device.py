"""On a device with memory of its own and late copies, results are those of the host: no synchronisation is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.runtime import update as update_module
from tierzero.runtime.device import Event
from tierzero.runtime.pager import Pager
from tierzero.runtime.state import Gathered, UnitState
from tierzero.runtime.tile_io import TileIO
from tierzero.tiers import Buffer

from ..support.fake_device import FakeDevice
from ..support.models import net
from ..support.training import (
    Recipe,
    Result,
    assert_identical,
    configured,
    everything_in,
    tight,
    train_sharded,
)
from ..support.trials import wait_for_trials

RECIPE = Recipe(steps=10, accumulate=2)
UNCLIPPED = Recipe(steps=10, clip=None)
SPLIT = {"device": 0.3, "host": 0.3, "nvme": 0.4}
ROOM = {"device": "64MiB", "host": "64MiB"}

DeviceMaker = Callable[..., FakeDevice]


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMaker]:
    """Makes fake devices whose memory the host's kernels and files are kept out of; closed at the end."""
    devices: list[FakeDevice] = []
    memory, kernel = Buffer.memory, update_module.update_on_host

    def guarded_memory(self: Buffer, offset: int, nbytes: int) -> memoryview:
        assert not any(device.memory.owns(self.tensor) for device in devices), "device memory has no host address"
        return memory(self, offset, nbytes)

    def guarded_kernel(fmt: Any, weight: Any, parts: Any, gradient: Any, *rest: Any) -> None:
        for tensor in (weight, gradient, *parts.values()):
            assert not any(device.memory.owns(tensor) for device in devices), "the host's kernel got device memory"
        kernel(fmt, weight, parts, gradient, *rest)

    monkeypatch.setattr(Buffer, "memory", guarded_memory)
    monkeypatch.setattr(update_module, "update_on_host", guarded_kernel)

    def make(seed: int = 0, **faults: bool) -> FakeDevice:
        devices.append(FakeDevice(seed, **faults))
        return devices[-1]

    yield make
    for device in devices:
        device.close()


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Result:
    config = configured(tmp_path_factory.mktemp("nvme"), placement=everything_in("host"))
    return train_sharded(net(), config, RECIPE)


@pytest.fixture(scope="module")
def unclipped(tmp_path_factory: pytest.TempPathFactory) -> Result:
    config = configured(tmp_path_factory.mktemp("nvme"), placement=everything_in("host"))
    return train_sharded(net(), config, UNCLIPPED)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": everything_in("device"),
    "host": everything_in("host"),
    "nvme": everything_in("nvme"),
    "device-weights": {"params": "device", "optimizer": "nvme", "gradients": "host"},
    "device-gradients": {"params": "nvme", "optimizer": "host", "gradients": "device"},
    "split-state": {"params": SPLIT, "optimizer": {"host": 0.5, "nvme": 0.5}, "gradients": SPLIT},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_late_copies_change_no_bit(placement: str, on_host: Result, make_device: DeviceMaker, tmp_path: Path) -> None:
    config = configured(tmp_path, placement=PLACEMENTS[placement], tiers=ROOM)
    device = make_device()
    assert_identical(train_sharded(net(), config, RECIPE, device=device, poison=True), on_host, placement)
    assert device.copies > 0 or placement == "device"


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_late_copies_under_the_smallest_budgets(
    overlap: str, prefetch: int, seed: int, on_host: Result, make_device: DeviceMaker, tmp_path: Path
) -> None:
    config = configured(tmp_path, tiers={"prefetch": prefetch}, optimizer={"overlap": overlap})
    config = tight(net, config, device=make_device(seed))
    assert_identical(train_sharded(net(), config, RECIPE, device=make_device(seed), poison=True), on_host)


@pytest.mark.parametrize("placement", ["nvme", "host", "device", "device-weights"])
def test_late_copies_beside_updates_in_the_backward(
    placement: str, unclipped: Result, make_device: DeviceMaker, tmp_path: Path
) -> None:
    config = configured(
        tmp_path,
        placement=PLACEMENTS[placement],
        tiers=ROOM,
        train={"grad_clip": 0},
        optimizer={"overlap": "backward"},
    )
    assert_identical(train_sharded(net(), config, UNCLIPPED, device=make_device(), poison=True), unclipped, placement)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(name, marks=() if name in ("device-weights", "split-state") else pytest.mark.long)
        for name in PLACEMENTS
        if name != "device"
    ],
)
def test_late_copies_beside_trials_in_the_backward(
    placement: str, make_device: DeviceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = tz.clip_grad_norm_

    def wait_and_clip(model: nn.Module, most: float) -> torch.Tensor:
        wait_for_trials(model)
        return clip(model, most)

    monkeypatch.setattr(tz, "clip_grad_norm_", wait_and_clip)
    config = configured(tmp_path, placement=PLACEMENTS[placement], tiers=ROOM)
    kept: list[int] = []
    for recipe in (replace(RECIPE, clip=1e3), RECIPE):
        wanted = train_sharded(net(), config.override(["optimizer.overlap=none"]), recipe)
        model, both = net(), config.override(["optimizer.overlap=both"])

        def note(step: int, model: nn.Module = model) -> None:
            kept.append(step and tz.stats(model)["kept_bytes"])

        assert_identical(train_sharded(model, both, recipe, note, device=make_device(), poison=True), wanted)
    assert any(kept) or placement == "device-gradients"  # there all weights are read ahead, which is cheaper


@pytest.mark.parametrize("fault", ["forget_waits", "forget_synchronize"])
@pytest.mark.parametrize("placement", ["nvme", "host", "device-gradients"])
def test_lost_synchronisation_is_noticed(
    fault: str, placement: str, on_host: Result, make_device: DeviceMaker, tmp_path: Path
) -> None:
    """What the tests above rest on: with one kind of ordering taken out of the device, results differ."""
    config = configured(tmp_path, placement=PLACEMENTS[placement], tiers=ROOM)
    broken = train_sharded(net(), config, RECIPE, device=make_device(**{fault: True}), poison=True)
    with pytest.raises(AssertionError, match=r"differs|losses|norms"):
        assert_identical(broken, on_host)


def test_poisoned_pools_change_no_bit_on_the_host(on_host: Result, unclipped: Result, tmp_path: Path) -> None:
    for placement in ("nvme", "host", SPLIT):
        for overlap, recipe, wanted in (("forward", RECIPE, on_host), ("backward", UNCLIPPED, unclipped)):
            config = configured(
                tmp_path,
                placement=everything_in(placement),
                tiers=ROOM,
                train={"grad_clip": 0},
                optimizer={"overlap": overlap},
            )
            assert_identical(train_sharded(net(), config, recipe, poison=True), wanted, f"{placement} {overlap}")


def test_a_buffer_given_back_too_early_is_noticed(
    on_host: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the test above rests on: a pager that evicts what it has just handed out computes with NaN."""
    demand = Pager.demand

    def hasty(self: Pager, unit: UnitState) -> list[Gathered]:
        gathered = demand(self, unit)
        self.forget(unit)
        return gathered

    monkeypatch.setattr(Pager, "demand", hasty)
    broken = train_sharded(net(), configured(tmp_path, tiers={"prefetch": 0}), RECIPE, poison=True)
    with pytest.raises(AssertionError, match="losses"):
        assert_identical(broken, on_host)


@pytest.mark.parametrize(
    "placement",
    [
        PLACEMENTS["nvme"],
        PLACEMENTS["split-state"],
        {"params": {"device": 0.5, "host": 0.5}, "optimizer": "host"},
    ],
    ids=str,
)
def test_a_device_that_is_behind_changes_no_bit(
    placement: dict[str, Any], make_device: DeviceMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tile is wanted again before the host knows that the copies out of its staging memory have ended: usual where
    the device is slower than the host, whose waits for it are late here.
    """
    recipe = Recipe(steps=2)
    wanted = train_sharded(net(), configured(tmp_path, placement=everything_in("host")), recipe)
    config = configured(tmp_path, placement=placement, tiers={"prefetch": 0})
    budget = tight(net, config, device=make_device()).tiers.device
    config = configured(tmp_path, placement=placement, tiers=ROOM | {"prefetch": 0, "device": budget})
    passed = TileIO.passed

    async def late(self: TileIO, event: Event) -> None:
        await asyncio.sleep(0.1)
        await passed(self, event)

    monkeypatch.setattr(TileIO, "passed", late)
    assert_identical(train_sharded(net(), config, recipe, device=make_device(), poison=True), wanted)


@pytest.mark.parametrize("gradients", ["nvme", {"host": 0.5, "nvme": 0.5}])
def test_an_update_on_the_device_takes_gradients_from_anywhere(
    gradients: Any, on_host: Result, make_device: DeviceMaker, tmp_path: Path
) -> None:
    placement = {"params": "device", "optimizer": "device", "gradients": gradients}
    config = configured(tmp_path, placement=placement, tiers=ROOM)
    assert_identical(train_sharded(net(), config, RECIPE, device=make_device(), poison=True), on_host)
