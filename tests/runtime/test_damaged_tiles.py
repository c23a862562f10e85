"""With io.verify a tile that is read back damaged is named: where it lies, what is in it, of which step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tierzero as tz
from tierzero.api import running as runtime_of

from ..support.oracle import config
from ..support.resuming import running

CASES = {
    "after the update": ("optimizer", "none", "; of step 3"),
    "before the update": ("optimizer", "forward", "; of step 2"),
    "gradient": ("gradient", "forward", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_damaged_and_of_which_step(case: str, tmp_path: Path) -> None:
    """An update beside the next forward reads the state before it. A gradient is of no step's state."""
    kind, overlap, step = CASES[case]
    chosen = config(tmp_path, optimizer={"overlap": overlap}, io={"verify": True}, tiers={"prefetch": 0})
    with running(chosen) as run:
        run.train(3)
        (unit,) = (unit for unit in runtime_of(run.model).units if unit.title == "blocks.2")
        stored = getattr(unit.groups[0].tiles[0], kind).stored
        file = next((tmp_path / "tierzero").glob("rank-0*/state.tier"))
        raw = file.read_bytes()
        with file.open("r+b") as written:
            written.seek(stored.extent.offset)
            written.write(bytes([raw[stored.extent.offset] ^ 1]))
        about = rf"(blocks\.2\.\w+\.\w+, )+\d more{step}"
        place = f"bytes {stored.extent.offset:,} to {stored.extent.end:,}"
        message = rf"'{re.escape(stored.name)}' \({about}\) was read back damaged: {place} .*state\.tier"
        with pytest.raises(tz.TierError, match=message):
            run.train(1)
