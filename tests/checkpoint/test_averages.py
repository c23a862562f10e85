"""Averages of the weights in checkpoints, exports and durable tiers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import tierzero as tz
from tierzero.cli.app import app
from tierzero.runtime import averaging

from ..support.oracle import config
from ..support.rank_pool import RankPool
from ..support.resuming import Run, running
from ..support.sealing import durable_settings, killed, sealed_steps
from ..support.training import assert_same_state, whole_state
from .test_golden import array

EMA = {"ema": 0.75}


def settings(folder: Path, tier: str = "nvme", precision: str = "bf16", ema: float = 0.75) -> tz.Config:
    return config(folder, tier, train={"precision": precision}, optimizer={"ema": ema})


def save_as_rank(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    with running(settings(Path(folder))) as run:
        run.train(3, rank)
        run.save(Path(folder) / "saved")
        at_save = whole_state(run.model)
        run.train(2, rank)
        return at_save


@contextmanager
def loaded(folder: Path, *notices: str, **options: Any) -> Iterator[Run]:
    """A run that has loaded what is saved there; ``notices``: parts of all warnings that it gave."""
    with running(settings(folder, **options), seed=9) as run:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.load(folder / "saved")
        assert len(caught) == len(notices), [str(one.message) for one in caught]
        assert all(notice in str(one.message) for notice, one in zip(notices, caught, strict=True))
        yield run


def test_from_two_ranks_to_one(tmp_path: Path, two_ranks: RankPool) -> None:
    at_save = two_ranks.run(save_as_rank, str(tmp_path))[0]
    with loaded(tmp_path, tier="host") as run:
        assert_same_state(whole_state(run.model), at_save)
    assert not torch.equal(at_save["blocks.0.up.weight/ema"], at_save["blocks.0.up.weight/master"])
    assert tz.verify_checkpoint(tmp_path / "saved") == []


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """A checkpoint, its precision, and the model's state then, with the weights inside of averaged by name."""
    folder = tmp_path_factory.mktemp("averages")
    with running(settings(folder, "host", request.param)) as run:
        run.train(3)
        run.save(folder / "saved")
        state = whole_state(run.model)
        with tz.averaged(run.model):
            return folder, request.param, state | tz.full_state_dict(run.model)


def test_files_are_what_the_documentation_says(saved: tuple[Path, str, dict[str, Any]]) -> None:
    folder, _, state = saved
    found = array(folder / "saved", "blocks.1.up.weight", "ema", "<f4")
    assert found.tobytes() == state["blocks.1.up.weight/ema"].numpy().astype(np.dtype("<f4")).tobytes()
    index = json.loads((folder / "saved" / "rank-00000.json").read_text())
    order = [e["segment"] for e in index["extents"] if e["parameter"] == "blocks.1.up.weight"]
    assert order[-1] == "ema"
    assert not [e for e in index["extents"] if (e["parameter"], e["segment"]) == ("fixed.weight", "ema")]
    summary = tz.inspect_checkpoint(folder / "saved")
    assert summary.segment_bytes["ema"] == summary.segment_bytes["m"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [None, "bf16", "fp32"])
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_exported(form: str, dtype: str | None, saved: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    folder, precision, state = saved
    arguments = ["export", str(folder / "saved"), str(tmp_path / "out"), "--weights", "ema", "--format", form]
    ran = CliRunner().invoke(app, [*arguments, *(["--dtype", dtype] if dtype else [])])
    assert ran.exit_code == 0, ran.stderr
    if form == "dcp":
        found = {name: torch.empty_like(state[name]) for name in ("blocks.0.up.weight", "norm.running_mean")}
        found["blocks.0.up.weight"] = found["blocks.0.up.weight"].to(getattr(torch, _NAMES[dtype or precision]))
        torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    else:
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert "fixed.weight" in found
    for name, values in found.items():
        inside, average = state[name], state.get(f"{name}/ema", state[name])
        is_buffer = f"{name}/weight" not in state
        written = inside.dtype if dtype is None or is_buffer else getattr(torch, _NAMES[dtype])
        assert values.dtype == written, name
        assert torch.equal(values, inside if written == inside.dtype else average.to(written)), name


_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def test_an_export_of_what_is_not_there(saved: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    folder, precision, _ = saved
    tz.export_safetensors(folder / "saved", tmp_path / "trained")
    with pytest.raises(tz.ConfigError, match="choice of weights"):
        tz.export_safetensors(folder / "saved", tmp_path / "trained", weights="ema")
    with pytest.raises(tz.ConfigError, match="'trained', 'ema'"):
        tz.export_safetensors(folder / "saved", tmp_path / "out", weights="average")
    with running(settings(tmp_path, "host", precision, ema=0)) as run:
        run.save(tmp_path / "saved")
    with pytest.raises(tz.ConfigError, match=r"has no averages of the weights"):
        tz.export_safetensors(tmp_path / "saved", tmp_path / "out", weights="ema")
    assert not (tmp_path / "out").exists()


def test_loaded_where_none_are_wanted_and_where_none_are_there(
    saved: tuple[Path, str, dict[str, Any]], tmp_path: Path
) -> None:
    folder, precision, state = saved
    with loaded(folder, "left out as optimizer.ema is 0", precision=precision, ema=0) as run:
        assert_same_state(
            whole_state(run.model), {name: state[name] for name in state if "/" in name and "/ema" not in name}
        )
        run.save(tmp_path / "saved")
    with loaded(tmp_path, "begins with its weights", precision=precision) as run:
        for name, value in whole_state(run.model).items():
            wanted = name.replace("/ema", "/master")
            assert torch.equal(value, state[wanted]), name
        run.train(1)


def test_weights_from_elsewhere_begin_their_averages(saved: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    folder, precision, _ = saved
    tz.export_safetensors(folder / "saved", tmp_path / "out", dtype="fp32")
    tz.import_safetensors(tmp_path / "out", tmp_path / "imported", precision=precision, skip=["fixed.*"])
    assert tz.inspect_checkpoint(tmp_path / "imported").step == 0
    with running(settings(tmp_path, "nvme", precision), seed=8) as run:
        run.train(2)
        tz.load_safetensors(run.model, tmp_path / "out")
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(tz.read_state(parameter, "ema"), tz.read_state(parameter, "master")), name


# Durable tiers: the state that is sealed is another slot's than that of an exchange.


def durable(root: Path) -> tz.Config:
    return durable_settings(root).override(["optimizer.ema=0.75"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    with running(settings(tmp_path_factory.mktemp("nvme"), "host")) as run:
        return run.train(6), whole_state(run.model)


def end_in_an_exchange(root: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has written to both slots of each tile, over one by an exchange that came to its end; it is killed."""
    left, exchange = [7], averaging.exchange_average

    def killing(*given: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("killed")
        exchange(*given)

    with killed(durable(root)) as run:
        sealed_steps(run, 3)
        with tz.averaged(run.model):
            pass
        sealed_steps(run, 1)
        averages = tz.averaged(run.model)
        if moment == "half in":
            monkeypatch.setattr(averaging, "exchange_average", killing)
        averages.__enter__()
        if moment == "inside":
            raise OSError("killed")
        monkeypatch.setattr(averaging, "exchange_average", killing)
        averages.__exit__(None, None, None)


@pytest.mark.parametrize("moment", ["half in", "inside", "half out"])
def test_killed_around_an_exchange(
    moment: str, unbroken: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        end_in_an_exchange(tmp_path, moment, patched)
    losses, end = unbroken
    with killed(durable(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 4
        assert run.train(2) == losses[4:]
        assert_same_state(whole_state(run.model), end)
