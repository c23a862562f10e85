"""State striped over several folders, evenly or in shares, trains to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierzero.tiers import store as store_module

from ..support.oracle import Case, assert_bits, config, train_sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(lambda: Stack(5), regression, (Block,), steps=4)


def striped(tmp_path: Path, shares: object) -> object:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    tiers = {"nvme": [str(folder) for folder in folders], "nvme_shares": shares}
    return config(tmp_path, tiers=tiers, io={"block_size": 4096})


@pytest.mark.parametrize("shares", ["auto", [1, 1, 1], [5, 1, 2]])
def test_shares_change_no_bit(tmp_path: Path, shares: object) -> None:
    wanted = train_sharded(STACK, config(tmp_path, "host"))
    assert_bits(train_sharded(STACK, striped(tmp_path, shares)), wanted)  # type: ignore[arg-type]


def test_a_drive_that_cannot_be_measured_is_used_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directories: object) -> tuple[int, ...]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "measured_shares", full)
    wanted = train_sharded(STACK, config(tmp_path, "host"))
    assert_bits(train_sharded(STACK, striped(tmp_path, "auto")), wanted)  # type: ignore[arg-type]
