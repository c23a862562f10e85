"""`tools/stages.py` on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierzero.profiling.stages import StageRow, formula_bytes, formula_volume, table

ROOT = Path(__file__).parents[2]


def test_the_table_has_what_was_measured_beside_the_formula() -> None:
    row = StageRow(
        2, formula_bytes(2, 4, "bf16"), {"params": 2.0, "gradients": 0.6, "optimizer": 2.7}, 2.0, 2.1, (1.0,)
    )
    cells = [cell.strip() for cell in table([row]).splitlines()[2].strip("|").split("|")]
    assert cells == ["2", "2.00", "0.50", "2.50", "2.00", "0.60", "2.70", "5.00", "5.30", "2.00", "2.10"]
    assert (formula_volume(0), formula_volume(3)) == (2.0, 3.0)


@pytest.mark.long
def test_the_tool_runs_a_stage_on_ranks_of_its_own() -> None:
    words = ["--ranks", "2", "--stages", "2", "--dim", "64", "--layers", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "stages.py"), *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    cells = [float(cell) for cell in done.stdout.splitlines()[2].strip("|").split("|")]
    assert cells[0] == 2
    assert abs(cells[8] - cells[7]) < 0.05 * cells[7]
