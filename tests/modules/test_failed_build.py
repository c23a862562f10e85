"""A model whose build fails leaves nothing behind that keeps the process from ending."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch.nn as nn, tierzero as tz
with tz.empty_init():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
def init(module):
    raise ValueError("no values")
tz.shard(model, tz.Config.from_dict({}), init=init)
"""


def test_the_process_ends_with_the_cause() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "ValueError: no values" in ended.stderr
