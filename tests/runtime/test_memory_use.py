"""A run whose state is on NVMe needs the memory that its budgets allow, as the system sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.ranks import ROOT


def test_peak_rss_stays_under_baseline_and_budgets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.rss_job", str(tmp_path)]
    # glibc raises the size from which it returns freed memory at once; PyTorch's temporaries would then count as used.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    budgets = found["device"] + found["host"]
    assert found["state"] > 5 * budgets, "the state must not fit"
    assert found["trained"] < found["baseline"] + budgets
    assert found["filled"] < found["baseline"] + budgets
    assert all(peak <= capacity for peak, capacity in found["pools"].values())
    planned = sum(peak for peak, _ in found["pools"].values())
    assert found["trained"] - found["baseline"] == pytest.approx(planned, rel=0.25)
    assert len(found["losses"]) == 3
