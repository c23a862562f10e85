"""``tierzero.offload`` and ``reload``: memory is given back for a while, and nothing of the training changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.runtime.parked import FileCopies

from ..support.fake_device import FakeDevice
from ..support.oracle import Case, Outcome, assert_bits, built, config, hyper, record_state, seeded_loss, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,))
PLACES: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "optimizer": "device", "gradients": "device"},
    "host": {"params": "host", "optimizer": "host", "gradients": "host"},
    "mixed": {"params": "device", "optimizer": {"host": 0.5, "nvme": 0.5}, "gradients": "nvme"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"},
}


def train(
    settings: tz.Config, pause: Callable[[nn.Module], None], rank: int = 0, device: FakeDevice | None = None
) -> Outcome:
    """Steps with two backwards; ``pause`` comes before the first, between the backwards and between the steps."""
    outcome = Outcome()
    with sharded(built(STACK), settings, STACK.units, device=device) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(3):
            pause(model)
            for half in range(2):
                loss = seeded_loss(STACK, model, 2 * step + half, rank)
                loss.backward()
                outcome.losses.append(loss.item())
                if half == 0:
                    pause(model)
            outcome.norms.append(float(tz.clip_grad_norm_(model, 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        pause(model)
        record_state(model, outcome)
    return outcome


def away_and_back(to: str = "nvme") -> Callable[[nn.Module], None]:
    def pause(model: nn.Module) -> None:
        before = tz.stats(model)["tier_bytes"]
        tz.offload(model, to=to)
        away = tz.stats(model)["tier_bytes"]
        given = before["device"] + (before["host"] if to == "nvme" else 0)
        assert away["device"] == 0
        assert away["host"] == 0 or to == "host"
        assert away["nvme"] <= before["nvme"] + given + 64 * 4096
        with pytest.raises(tz.ConfigError, match=r"was offloaded; call tierzero\.reload"):
            model(torch.zeros(1, 24))
        tz.reload(model)
        assert tz.stats(model)["tier_bytes"]["nvme"] == before["nvme"]

    return pause


def settings_of(nvme: Path, place: str, overlap: str = "forward") -> tz.Config:
    return config(nvme, placement=PLACES[place], optimizer={"overlap": overlap}, train={"precision": "bf16"})


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_bit_for_bit(place: str, overlap: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, place, overlap)
    assert_bits(train(settings, away_and_back()), train(settings, lambda model: None))
    assert not list(tmp_path.rglob("*.tier"))


@pytest.mark.parametrize("to", ["nvme", "host"])
@pytest.mark.parametrize("place", ["device", "mixed"])
def test_memory_that_the_host_cannot_address(place: str, to: str, tmp_path: Path) -> None:
    device = FakeDevice(longest_s=0.001)
    settings = settings_of(tmp_path, place)
    assert_bits(train(settings, away_and_back(to), device=device), train(settings, lambda model: None))
    device.close()


def on_ranks(rank: int, ranks: int, nvme: str, place: str, stage: int) -> None:
    settings = settings_of(Path(nvme), place)
    settings = tz.Config.from_dict({**settings.model_dump(by_alias=True), "sharding": {"stage": stage}})
    assert_bits(train(settings, away_and_back(), rank), train(settings, lambda model: None, rank))


@pytest.mark.parametrize(("place", "stage"), [("mixed", 3), ("host", 2), ("device", 0)])
def test_on_two_ranks(place: str, stage: int, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(on_ranks, str(tmp_path), place, stage)


def test_the_memory_is_the_systems(tmp_path: Path) -> None:
    """Resident bytes of the process fall by what lay in memory, and come back."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    big = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    settings = tz.Config.from_dict({"tiers": {"nvme": [str(tmp_path)]}, "placement": PLACES["host"]})
    model = tz.shard(big, settings, units=(nn.Linear,))
    optimizer = tz.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()  # gradients take memory with the first touch
    optimizer.step()
    tz.read_state(model[0].weight, "weight")
    state = tz.stats(model)["state_bytes"]
    assert state > 100 << 20
    whole = resident()
    tz.offload(model)
    assert resident() < whole - 0.9 * state
    tz.reload(model)
    assert resident() > whole - 0.1 * state
    tz.close(model)


def test_uses_while_away_are_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "host")
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        weight = model.first.weight
        seeded_loss(STACK, model, 0, 0).backward()
        later = seeded_loss(STACK, model, 1, 0)
        tz.offload(model)
        tz.offload(model)
        for use in (
            lambda: later.backward(retain_graph=True),
            optimizer.step,
            lambda: tz.clip_grad_norm_(model, 1.0),
            lambda: tz.read_state(weight, "m"),
            lambda: tz.write_state(weight, "step", 1),
            lambda: weight.sum().item(),
            lambda: tz.gathered(weight).__enter__(),
            lambda: tz.full_state_dict(model),
            lambda: tz.save_checkpoint(model, optimizer, tmp_path / "saved"),
            lambda: tz.load_checkpoint(model, optimizer, tmp_path / "saved"),
        ):
            with pytest.raises(tz.ConfigError, match=r"was offloaded; call tierzero\.reload"):
                use()
        assert tz.stats(model)["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        tz.reload(model)
        tz.reload(model)
        later.backward()  # a graph of before
        optimizer.step()
        found = Outcome()
        record_state(model, found)
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(2):
            seeded_loss(STACK, model, step, 0).backward()
        optimizer.step()
        wanted = Outcome()
        record_state(model, wanted)
    assert_bits(found, wanted)
    with pytest.raises(tz.ConfigError, match="tiers were closed"):
        tz.reload(model)


def test_wrong_calls(tmp_path: Path) -> None:
    with sharded(built(STACK), settings_of(tmp_path, "host"), STACK.units) as model:
        with pytest.raises(tz.ConfigError, match="to is 'disk'; use 'nvme' or 'host'"):
            tz.offload(model, to="disk")  # type: ignore[arg-type]
        with pytest.raises(tz.ConfigError, match="device memory is host memory here"):
            tz.offload(model, to="host")
        with tz.gathered(model.first.weight), pytest.raises(tz.ConfigError, match="between steps"):
            tz.offload(model)
        handle = model.blocks[0].register_forward_hook(lambda *_: tz.offload(model))
        with pytest.raises(tz.ConfigError, match="between steps"):
            model(torch.zeros(1, 24))
        handle.remove()
        model(torch.zeros(1, 24))
        tz.offload(model)  # closed while it is away
    assert not list(tmp_path.rglob("*.tier"))
    in_memory = tz.Config.from_dict({"placement": PLACES["host"]})
    with sharded(built(STACK), in_memory, STACK.units) as model:
        with pytest.raises(tz.ConfigError, match=r"set tiers\.nvme"):
            tz.offload(model)
        model(torch.zeros(1, 24))


def test_no_room_for_the_copies(tmp_path: Path) -> None:
    """The model is as it was, and goes on."""
    settings = settings_of(tmp_path, "mixed")
    taken = Path(tmp_path).joinpath("probe")
    taken.mkdir()
    with sharded(built(STACK), settings_of(taken, "mixed"), STACK.units) as model:
        filed = tz.stats(model)["tier_bytes"]["nvme"]
    limited = tz.Config.from_dict(
        {**settings.model_dump(by_alias=True), "tiers": {**settings.tiers.model_dump(), "nvme_limit": filed + 8192}}
    )

    def pause(model: nn.Module) -> None:
        with pytest.raises(tz.BudgetError, match=r"tiers\.nvme_limit"):
            tz.offload(model)

    assert_bits(train(limited, pause), train(settings, lambda model: None))


def fail_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: FileCopies) -> None:
        raise tz.TierError("state.tier: No space left on device") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileCopies, "write", write)


def one_rank_fails(rank: int, ranks: int, nvme: str) -> None:
    def pause(model: nn.Module) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                fail_write(patch)
            with pytest.raises(tz.TierError, match="No space left" if rank == 1 else "another rank could not offload"):
                tz.offload(model)

    settings = settings_of(Path(nvme), "mixed")
    assert_bits(train(settings, pause, rank), train(settings, lambda model: None, rank))


def test_a_rank_that_fails_fails_all(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(one_rank_fails, str(tmp_path))


def test_a_damaged_copy_is_not_trained_on(tmp_path: Path) -> None:
    with sharded(built(STACK), settings_of(tmp_path, "host"), STACK.units) as model:
        before = tz.read_state(model.parameters(), "weight")
        tz.offload(model)
        (file,) = tmp_path.rglob("*.tier")
        whole = file.read_bytes()
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(tz.TierError, match=r"state\.tier"):
            tz.reload(model)
        with pytest.raises(tz.ConfigError, match=r"was offloaded"):
            model(torch.zeros(1, 24))
        assert tz.stats(model)["tier_bytes"]["host"] == 0
        file.write_bytes(whole)
        tz.reload(model)
        assert all(map(torch.equal, before, tz.read_state(model.parameters(), "weight")))
        assert running(model).engine.failure is None
