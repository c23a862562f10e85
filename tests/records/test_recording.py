"""`tz.record` on a small model: what adds up, what stays on the drive, what a failing drive does."""

from __future__ import annotations

import errno
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.records import files
from tierzero.records import recording as recording_module
from tierzero.records.files import spans_file
from tierzero.runtime.spans import Kind

from ..support.oracle import Case, built, config, hyper, sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,))
Step = Callable[[int], None]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    (tmp_path / "nvme").mkdir()
    with sharded(built(STACK), config(tmp_path / "nvme"), STACK.units) as model:
        yield model


def taking_steps(model: nn.Module, inside: float = 0.0) -> Step:
    """``inside``: seconds of each step that the loop sleeps between backward and clipping."""
    optimizer = tz.AdamW(model.parameters(), **hyper(STACK))

    def take(steps: int) -> None:
        for step in range(steps):
            regression(model, step, 0).backward()
            time.sleep(inside)
            tz.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return take


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rank-00000.jsonl").read_text().splitlines()]


def test_phases_add_up_to_the_step_and_name_what_took_the_time(tmp_path: Path, model: nn.Module) -> None:
    block = next(module for module in model.modules() if isinstance(module, Block))
    forward, backward = [], []

    def sleeping(*args: Any) -> None:
        time.sleep(0.03)
        forward.append(1)

    def sleeping_backward(*args: Any) -> None:
        time.sleep(0.05)
        backward.append(1)

    block.up.register_forward_hook(sleeping)
    block.up.register_full_backward_hook(sleeping_backward)
    take, stats = taking_steps(model, inside=0.08), []
    with tz.record(model, tmp_path / "run"):
        for _ in range(4):
            take(1)
            stats.append(tz.stats(model))
            time.sleep(0.02)
    assert len(forward) == len(backward) == 4
    for line, stat in zip(lines(tmp_path / "run"), stats, strict=True):
        inside = {phase: seconds for phase, seconds in line["phase_s"].items() if phase != "between"}
        assert sum(inside.values()) == pytest.approx(stat["step_s"], rel=0.02)
        assert sum(line["phase_s"].values()) == pytest.approx(line["end_s"], rel=1e-6)
        assert line["phase_s"]["forward"] >= 0.03
        assert line["phase_s"]["backward"] >= 0.05
        assert 0.08 <= line["phase_s"]["other"] <= line["step_s"] - 0.08
        stalls = {kind: inside[f"stall_{kind}"] for kind in stat["stall_s"]}
        assert stalls == pytest.approx(stat["stall_s"], abs=1e-3)
        assert line["phase_s"]["between"] >= (0.02 if line["step"] > 1 else 0)
        assert line["nvme_read_bytes"] == stat["nvme_read_bytes"]
    assert tz.stats(model).keys() == stats[0].keys()


def test_spans_name_units_tiles_and_bytes(tmp_path: Path, model: nn.Module) -> None:
    with tz.record(model, tmp_path):
        taking_steps(model)(3)
    about = json.loads((tmp_path / "rank-00000.json").read_text())
    assert about["units"] == [unit.title for unit in running(model).units]
    spans = np.load(spans_file(tmp_path, 0, 3))
    found = {kind: spans[spans["kind"] == kind] for kind in Kind}
    units = len(about["units"])
    for kind in (Kind.FORWARD, Kind.PAGE_IN, Kind.UPDATE, Kind.PAGE_OUT, Kind.GRADIENTS, Kind.BACKWARD):
        assert set(found[kind]["unit"]) >= set(range(1, units)), kind
    assert (found[Kind.PAGE_OUT]["tile"] >= 0).all()
    assert int(found[Kind.PAGE_OUT]["bytes"].sum()) == lines(tmp_path)[-1]["nvme_write_bytes"]
    assert (spans["end"] >= spans["start"]).all()
    assert len(found[Kind.OPTIMIZER_STEP]) == len(found[Kind.GRADIENT_NORM]) == 1


def test_the_first_the_newest_and_each_hundredth_step_stay(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "NEWEST", 2)
    take = taking_steps(model)
    with tz.record(model, tmp_path, steps=98):
        take(6)
    kept = {int(path.stem[-8:]) for path in (tmp_path / "timeline").iterdir()}
    assert kept == {100, 103, 104}
    assert [line["step"] for line in lines(tmp_path)] == [99, 100, 101, 102, 103, 104]
    with tz.record(model, tmp_path):
        take(7)
    kept = {int(path.stem[-8:]) for path in (tmp_path / "timeline").iterdir()}
    assert kept == {1, 2, 3, 6, 7}, "a new run starts over"


def test_a_resumed_run_goes_on_behind_its_step(tmp_path: Path, model: nn.Module) -> None:
    take = taking_steps(model)
    with tz.record(model, tmp_path) as run:
        for number in range(5):
            take(1)
            run.log({"loss": float(number), "odd": float("nan")})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # of a run that was killed
    with tz.record(model, tmp_path, steps=3) as run:
        take(1)
        run.log({"loss": 30.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    logged = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in logged] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 30.0)]
    assert logged[0]["odd"] is None
    assert not spans_file(tmp_path, 0, 5).exists()


def test_a_full_drive_ends_the_record_and_not_the_run(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = recording_module.write_array, []

    def failing(path: Path, values: Any) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, values)

    monkeypatch.setattr(recording_module, "write_array", failing)
    take = taking_steps(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with tz.record(model, tmp_path):
            take(8)
    assert running(model).steps == 8
    assert [str(warning.message) for warning in said] == [
        f"log.dir: cannot write in {tmp_path}: No space left on device; the training goes on without its record"
    ]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert len(calls) == 3


def test_what_cannot_be_recorded_is_refused(tmp_path: Path, model: nn.Module) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tz.ConfigError, match=r"log\.dir: cannot write in"), tz.record(model, tmp_path / "file"):
        pass
    first, second = tz.record(model, tmp_path / "a"), tz.record(model, tmp_path / "b")
    with first, pytest.raises(tz.ConfigError, match="recorded already"), second:
        pass
    assert not running(model).timeline.on
    taking_steps(model)(1)
    with pytest.raises(tz.ConfigError, match="not sharded"), tz.record(nn.Linear(2, 2), tmp_path / "c"):
        pass


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    weights = []
    for folder in (None, tmp_path / "run"):
        with sharded(built(STACK), config(tmp_path / "nvme"), STACK.units) as model:
            take = taking_steps(model)
            if folder is None:
                take(4)
            else:
                with tz.record(model, folder):
                    take(4)
            weights.append(tz.full_state_dict(model))
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_a_folder_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    with files.locked(tmp_path, 0), pytest.raises(tz.ConfigError, match="written by another run"):
        files.locked(tmp_path, 0)
    files.locked(tmp_path, 0).close()
