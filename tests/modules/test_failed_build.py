"""A model whose build fails: with its cause, and with nothing left behind that keeps the process from ending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

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


@pytest.mark.parametrize(("config", "how"), [({"train": {}}, "from_dict"), ("configs/nvme.toml", "load")])
def test_what_is_no_configuration_says_how_to_make_one(config: object, how: str) -> None:
    with pytest.raises(tz.ConfigError, match=rf"tz\.Config\.{how}"):
        tz.shard(nn.Linear(2, 2), config)  # type: ignore[arg-type]


def test_a_rank_among_several_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank would train a copy of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tz.ConfigError, match=r"one of 2 ranks.*init_process_group"):
        tz.shard(nn.Linear(2, 2), tz.Config.from_dict({}))


def test_gradients_from_before_are_refused(tmp_path: Path) -> None:
    """They would take memory that no budget counts, and be added to the first ones."""
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    with pytest.raises(tz.ConfigError, match=r"'weight' has a gradient; call model\.zero_grad\(\)"):
        tz.shard(model, tz.Config.from_dict({}))


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    settings = {"tiers": {"nvme": [str(tmp_path / ("n" * 300))]}, "placement": {"optimizer": "nvme"}}
    with pytest.raises(tz.ConfigError, match=r"tiers\.nvme: .* cannot be used: File name too long"):
        tz.shard(nn.Linear(2, 2), tz.Config.from_dict(settings))
