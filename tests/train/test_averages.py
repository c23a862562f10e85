"""A bundled run with ``optimizer.ema``: both kinds of weights are validated, and a resumed run ends with the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierzero.config import Config
from tierzero.train import prepare, train


def results(config: Config, capsys: pytest.CaptureFixture[str], resume: str | None = None) -> tuple[str, str]:
    """The validation losses that the run reports last: of the weights, and of their averages."""
    train(prepare(config, resume))
    found = re.findall(r"result +validation loss ([\d.]+) \(.*\), of the averages ([\d.]+)", capsys.readouterr().out)
    assert len(found) == 1
    return found[0]


def test_a_run_with_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("all work and no play makes jack a dull boy\n" * 300)
    config = Config.from_dict(
        {
            "model": {"dim": 32, "layers": 1},
            "data": {"path": str(tmp_path / "text")},
            "train": {"steps": 4, "batch_size": 2, "seq_len": 32, "sample_tokens": 0, "validation_batches": 1},
            "optimizer": {"ema": 0.5, "lr": 1e-2},
            "tiers": {"nvme": [str(tmp_path)]},
            "placement": {"params": "nvme", "optimizer": "nvme"},
            "checkpoint": {"dir": str(tmp_path / "checkpoints"), "every": 2},
        }
    )
    whole = results(config, capsys)
    assert float(whole[0]) < float(whole[1])  # which lag behind
    assert results(config, capsys, str(tmp_path / "checkpoints" / "step-00000002")) == whole
