"""State of the next step's first tiles is read while the backward runs: taken over by the update, or given back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.errors import TierError
from tierzero.runtime.state import Tile
from tierzero.runtime.tile_io import OpenTile, TileIO

from ..support.oracle import Case, assert_bits, built, config, hyper, sharded, train_sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(lambda: Stack(5), regression, (Block,), steps=5)
PLACEMENTS = [
    {"params": "nvme", "optimizer": "nvme", "gradients": "host"},
    {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"},
    {"params": "host", "optimizer": "nvme", "gradients": "host"},
    {"params": "nvme", "optimizer": {"host": 0.5, "nvme": 0.5}, "gradients": "nvme"},
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles that were read ahead and then opened, by identity."""
    found: list[int] = []
    original = TileIO._take_ahead

    async def noting(self: TileIO, tile: Tile) -> OpenTile | None:
        opened = await original(self, tile)
        if opened is not None:
            found.append(id(tile))
        return opened

    monkeypatch.setattr(TileIO, "_take_ahead", noting)
    return found


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    regression(model, step, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("overlap", ["forward", "none"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_read_ahead_is_used_and_changes_no_bit(
    tmp_path: Path, placement: dict[str, object], overlap: str, taken: list[int]
) -> None:
    wanted = train_sharded(STACK, config(tmp_path, "host", optimizer={"overlap": overlap}))
    assert not taken
    found = train_sharded(STACK, config(tmp_path, placement=placement, optimizer={"overlap": overlap}))
    assert_bits(found, wanted)
    assert len(taken) > 4, "nothing was read ahead"


def test_nothing_is_read_twice(tmp_path: Path, taken: list[int]) -> None:
    """12 bytes of state in fp32, weights once more in the backward at most."""
    with sharded(built(STACK), config(tmp_path, optimizer={"overlap": "forward"}), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(4):
            one_step(model, optimizer, step)
        found = tz.stats(model)
    assert taken
    numel = found["parameters"]
    assert found["nvme_read_bytes"] <= (12 + 4 + 4) * numel * 1.1  # gradients are on nvme too


def test_memory_is_left_for_others(tmp_path: Path) -> None:
    """With the least staging nothing is read ahead, and training goes on."""
    wanted = train_sharded(STACK, config(tmp_path, "host"))
    with pytest.raises(tz.BudgetError) as refused:
        train_sharded(STACK, config(tmp_path, tiers={"host": 1}))
    least = config(tmp_path, tiers={"host": 1 + refused.value.missing})
    assert_bits(train_sharded(STACK, least), wanted)


def test_other_uses_after_a_backward_see_the_right_weights(tmp_path: Path, taken: list[int]) -> None:
    """Evaluation, reading, editing and saving between backward and step, and a step that never comes."""
    outcomes = []
    for tier in ("host", "nvme"):
        with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
            optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
            values = []
            for step in range(5):
                regression(model, step, 0).backward()
                if step == 1:
                    with torch.no_grad():
                        values.append(regression(model, 9, 0))
                if step == 2:
                    with tz.gathered(model.first.weight), torch.no_grad():
                        model.first.weight.mul_(0.5)
                if step == 3:
                    tz.save_checkpoint(model, optimizer, tmp_path / tier)
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
            values += tz.full_state_dict(model).values()
            outcomes.append(values)
    assert taken
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_a_read_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TileIO._read_state
    failed = []

    async def failing(self: TileIO, opened: OpenTile, *args: object) -> None:
        if id(opened.tile) in self._ahead and not failed:
            failed.append(opened)
            raise TierError("the drive hiccups")
        await original(self, opened, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TileIO, "_read_state", failing)
    with pytest.raises(TierError, match="the drive hiccups"):
        train_sharded(STACK, config(tmp_path))
    assert len(failed) == 1


def test_closing_gives_back_what_was_read_ahead(tmp_path: Path) -> None:
    threads = threading.active_count()
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        one_step(model, optimizer, 0)
        regression(model, 1, 0).backward()
        runtime = running(model)
        runtime.engine.run(runtime.updater.drain())
        assert runtime.tile_io._ahead
        used = runtime.pools["host"].used
    assert used > 0
    assert runtime.pools["host"].used == 0
    assert threading.active_count() <= threads + 1


def test_accumulation_with_gradients_on_nvme_beside_reading_ahead(tmp_path: Path) -> None:
    """Old gradients are merged with new ones while the state of the same tiles is read ahead."""
    placement = {"params": "nvme", "optimizer": "host", "gradients": "nvme"}
    found = []
    for settings in (config(tmp_path, "host"), config(tmp_path, placement=placement)):
        with sharded(built(STACK), settings, STACK.units) as model:
            optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
            for step in range(30):
                for micro in range(2):
                    regression(model, 2 * step + micro, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(tz.full_state_dict(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_step_after_a_broken_backward_is_the_same_wherever_gradients_lie(tmp_path: Path) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("broken off")

    found = []
    for tier in ("host", "nvme"):
        with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
            optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
            for step in range(4):
                regression(model, step, 0).backward()
                hidden = model.blocks[1](model.blocks[0](model.first(torch.ones(2, model.first.weight.shape[1]))))
                hidden.register_hook(fail)
                with pytest.raises(ValueError, match="broken off"):
                    model.last(model.blocks[2](hidden)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(tz.full_state_dict(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
