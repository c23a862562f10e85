"""Checkpoints of moments in bf16 and int8: saved and loaded as they are, and converted where a run has another type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.checked_json import write_json
from tierzero.checkpoint.inspection import inspect_checkpoint, verify_checkpoint

from ..support.oracle import Outcome, assert_bits, config
from ..support.rank_pool import RankPool
from ..support.resuming import running
from ..support.sealing import durable_settings, sealed_steps
from .test_world_size import without_buffers

TYPES = ("fp32", "bf16", "int8")


def settings(folder: Path, state_dtype: str, tier: Any = "nvme") -> tz.Config:
    return config(folder, tier, train={"precision": "bf16"}, optimizer={"state_dtype": state_dtype})


def save_as_rank(rank: int, size: int, folder: str, state_dtype: str) -> Outcome:
    with running(settings(Path(folder), state_dtype)) as run:
        torch.manual_seed(50)
        run.train(3, rank)
        run.save(Path(folder) / "saved")
        return run.outcome()


def load_as_rank(rank: int, size: int, folder: str, state_dtype: str, steps: int) -> tuple[Outcome, list[float]]:
    with running(settings(Path(folder), state_dtype, "host"), seed=60) as run:
        run.train(1, rank)
        run.load(Path(folder) / "saved")
        return run.outcome(), run.train(steps, rank)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_a_run_goes_on_with_the_same_bits(state_dtype: str, tmp_path: Path) -> None:
    saved = save_as_rank(0, 1, str(tmp_path), state_dtype)
    loaded, losses = load_as_rank(0, 1, str(tmp_path), state_dtype, 4)
    assert_bits(loaded, saved)
    with running(settings(tmp_path, state_dtype)) as run:
        torch.manual_seed(50)
        assert run.train(7)[3:] == losses
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["version"] == 4
    assert not verify_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize(("world", "saved_as"), [(2, "int8"), (1, "int8"), (1, "fp32")])
def test_another_type_and_world_takes_the_values(
    world: int, saved_as: str, tmp_path: Path, two_ranks: RankPool
) -> None:
    if world == 2:
        saved = two_ranks.run(save_as_rank, str(tmp_path), saved_as)[0]
    else:
        saved = save_as_rank(0, 1, str(tmp_path), saved_as)
    for wanted in TYPES:
        if world == 2 or wanted == "int8":
            loaded = [load_as_rank(0, 1, str(tmp_path), wanted, 1)[0]]
        else:
            loaded = [outcome for outcome, _ in two_ranks.run(load_as_rank, str(tmp_path), wanted, 1)]
        for outcome in loaded:
            assert_converted(without_buffers(outcome), without_buffers(saved), exact=wanted in (saved_as, "fp32"))


def assert_converted(found: Outcome, saved: Outcome, exact: bool) -> None:
    """Weights are the same; moments too, or within what the type holds of them."""
    assert found.updates == saved.updates
    for name, weight in saved.weights.items():
        assert torch.equal(found.weights[name], weight)
        have, want = found.moments[name], saved.moments[name]
        if have is None or want is None:
            assert have is want
            continue
        for one, other in zip(have, want, strict=True):
            if exact:
                assert torch.equal(one, other), name
            else:
                torch.testing.assert_close(one, other, rtol=0.1, atol=_near(other))


def _near(values: torch.Tensor) -> float:
    return 0.02 * float(values.abs().max()) if values.numel() else 0.0


def test_inspection_knows_the_arrays(tmp_path: Path) -> None:
    save_as_rank(0, 1, str(tmp_path), "int8")
    found = inspect_checkpoint(tmp_path / "saved").segment_bytes
    assert found["m"] == found["v"] > found["lo"] // 2 > 0
    assert found["m_scale"] == found["v_scale"]
    assert found["m"] / 128 <= found["m_scale"] / 4 <= found["m"] / 128 + 30


def test_unknown_moments_are_refused(tmp_path: Path) -> None:
    save_as_rank(0, 1, str(tmp_path), "int8")
    path = tmp_path / "saved" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["xxh3"]
    next(record for record in manifest["parameters"].values() if record["trainable"])["moments"] = "int3"
    write_json(path, manifest)
    with running(settings(tmp_path, "int8")) as run, pytest.raises(tz.CheckpointError, match="moments of 'int3'"):
        run.load(tmp_path / "saved")


def test_a_sealed_step_goes_on_with_its_type_only(tmp_path: Path) -> None:
    chosen = durable_settings(tmp_path).override(["optimizer.state_dtype=int8"])
    with running(chosen) as run:
        sealed_steps(run, 2)
        wanted = run.outcome()
    message = r'sealed step with optimizer\.state_dtype = "int8", not "fp32"'
    with pytest.raises(tz.ConfigError, match=message), running(durable_settings(tmp_path)):
        pass
    with running(chosen) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        assert_bits(run.outcome(), wanted)
