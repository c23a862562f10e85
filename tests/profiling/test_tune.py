"""`tierzero tune`: what it tries, what it prints and writes, what it refuses, and real runs that touch nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tierzero.cli.app import app
from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.profiling.tune.candidates import Candidate, Facts, combinations, left_alone, open_candidates
from tierzero.profiling.tune.halving import Failed, Limits, Measured, Scored
from tierzero.profiling.tune.runs import Runs, checked
from tierzero.profiling.tune.session import tuned
from tierzero.training.stopping import Stopped

CONFIG = """
[model]
dim = 64
layers = 3
vocab = 256
[data]
path = "text.txt"
[train]
steps = 1000
batch_size = 4
seq_len = 32
threads = 1
[tiers]
nvme = ["nvme"]
[sharding]
min_unit = 0
[placement]
params = "nvme"
optimizer = "nvme"
[checkpoint]
dir = "checkpoints"
durable = true
[log]
metrics = "metrics.jsonl"
"""
ALL_BUT_PREFETCH = ["optimizer.overlap=forward", "tiers.tile=32768", "io.queue_depth=4", "io.block_size=4MiB"]
FACTS = Facts(True, True, True, True, 1 << 20, 2, 8, 10, 1 << 24, 1, "forward", True)


def configuration(folder: Path, batch_size: int = 4) -> Path:
    (folder / "nvme").mkdir()
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    path = folder / "run.toml"
    path.write_text(CONFIG.replace("batch_size = 4", f"batch_size = {batch_size}"))
    return path


def tune(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def keys_of(candidates: list[Candidate]) -> set[str]:
    return {key for candidate in candidates for key, _ in candidate.changes}


def test_only_keys_that_are_left_open_are_tried() -> None:
    config = Config.from_dict({"tiers": {"tile": "auto", "prefetch": 2}, "io": {"queue_depth": 8}})
    candidates = open_candidates(config, FACTS)
    assert keys_of(candidates) == {"optimizer.overlap", "train.threads", "tiers.tile", "io.block_size"}
    assert left_alone(config, FACTS) == ["io.queue_depth", "tiers.prefetch"]
    assert len(set(candidates)) == len(candidates)
    first = candidates[:4]
    assert len(keys_of(first)) == 4, "every key is tried once before any is tried again"


def test_only_keys_that_can_matter_are_tried() -> None:
    in_memory = Facts(True, False, False, False, 1 << 20, 2, 8, 10, 1 << 24, 1, "forward", False)
    assert keys_of(open_candidates(Config.from_dict({}), in_memory)) == {"optimizer.overlap", "train.threads"}


def test_what_runs_now_is_no_candidate() -> None:
    values = {change for candidate in open_candidates(Config.from_dict({}), FACTS) for change in candidate.changes}
    now = {("optimizer.overlap", "forward"), ("tiers.tile", 1 << 20), ("tiers.prefetch", 2), ("train.threads", 8)}
    assert values.isdisjoint(now | {("io.block_size", "8MiB"), ("io.queue_depth", 8)})


@pytest.mark.parametrize(
    ("train", "micro_steps", "allowed"),
    [
        ({"grad_clip": 0}, 1, True),
        ({}, 1, False),
        ({"grad_clip": 0}, 2, False),
        ({"grad_clip": 0, "precision": "fp16"}, 1, False),
    ],
)
def test_updates_in_the_backward_are_tried_where_they_are_allowed(
    train: dict[str, Any], micro_steps: int, allowed: bool
) -> None:
    facts = Facts(True, True, True, True, 1 << 20, 2, 8, 10, 1 << 24, micro_steps, "forward", False)
    candidates = open_candidates(Config.from_dict({"train": train}), facts)
    assert (Candidate((("optimizer.overlap", "backward"),)) in candidates) is allowed


def test_every_candidate_is_a_valid_configuration() -> None:
    for candidate in open_candidates(Config.from_dict({"train": {"grad_clip": 0}}), FACTS):
        Config.from_dict({"train": {"grad_clip": 0}}).override(
            [f"{key}={value}" for key, value in candidate.changes]
        ).check()


def test_the_best_change_of_every_key_that_helped_is_combined() -> None:
    def scored(key: str, value: int, ratio: float) -> Scored[Candidate]:
        return Scored(1, Candidate(((key, value),)), 2, Measured(ratio), ratio)

    found = combinations([scored("a.a", 1, 0.9), scored("a.a", 2, 0.8), scored("b.b", 1, 0.95), scored("c.c", 1, 1.1)])
    assert found == [Candidate((("a.a", 2), ("b.b", 1)))]
    assert combinations([scored("a.a", 1, 0.9), scored("a.a", 2, 0.8)]) == []


def faked(monkeypatch: pytest.MonkeyPatch, step_s: Callable[[Candidate], float]) -> None:
    """Runs of no time, whose steps take what ``step_s`` says; a negative number fails."""

    def measure(self: Runs, candidate: Candidate, steps: int) -> Measured | Failed:
        seconds = step_s(candidate)
        return Measured(seconds, 1e6) if seconds > 0 else Failed("tiers.host is too small")

    monkeypatch.setattr(Runs, "measure", measure)


def deeper_is_faster(candidate: Candidate) -> float:
    changes = dict(candidate.changes)
    if changes.get("tiers.prefetch") == 1:
        return -1
    return 1.0 - 0.2 * (changes.get("io.queue_depth") == 16) - 0.1 * (changes.get("io.block_size") == "4MiB")


def test_what_was_found_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, deeper_is_faster)
    out = tmp_path / "tuned.toml"
    done = tune(configuration(tmp_path), "--out", out)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "gain     30.0% of a step: 0.7 s instead of 1 s; runs of the same settings differ by 0.0%" in lines
    assert {"set      io.queue_depth = 16", '         io.block_size = "4MiB"'} <= set(lines)
    assert "failed   tiers.prefetch = 1: tiers.host is too small" in lines
    assert "left     train.threads: set in the configuration" in lines
    assert any("durable" in line for line in lines if line.startswith("note"))
    written = Config.load(out)
    assert (written.io.queue_depth, written.io.block_size) == (16, 4 << 20)
    assert (written.tiers.nvme, written.checkpoint.durable) == ([tmp_path / "nvme"], True)
    assert "round 1" in done.stderr


def test_one_json_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, deeper_is_faster)
    found = json.loads(tune(configuration(tmp_path), "--json").stdout)
    assert found["recommended"] == {"io": {"queue_depth": 16, "block_size": "4MiB"}}
    assert found["verdict"]["gain"] == pytest.approx(0.3)
    assert found["out"] is None
    assert any(trial.get("failed") for trial in found["trials"])


def test_without_a_gain_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, lambda candidate: 1.0)
    done = tune(configuration(tmp_path), "--out", tmp_path / "tuned.toml")
    assert done.exit_code == 0
    assert "gain     none" in done.stdout
    assert "not written" in done.stderr
    assert not (tmp_path / "tuned.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "train.batch_size=6", "--ranks", "4"], "cannot be divided among 4 ranks"),
        (["--set", "data.path=none.txt"], "none.txt"),
        (["--set", "tiers.nvme=missing"], "does not exist"),
        (["--set", "tiers.host=1000"], "short of"),
        (["--set", "tiers.til=5"], "tiers.tile"),
        (["--out", "run.toml"], "exists already"),
    ],
)
def test_what_cannot_run_is_refused_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    def measure(self: Runs, candidate: Candidate, steps: int) -> Measured:
        raise AssertionError("it ran")

    monkeypatch.setattr(Runs, "measure", measure)
    path = configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = tune(path, *arguments)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_under_torchrun_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    done = tune(configuration(tmp_path))
    assert done.exit_code == 2
    assert "--ranks" in done.stderr


@pytest.mark.long
def test_real_runs_leave_no_trace(tmp_path: Path) -> None:
    config = Config.load(configuration(tmp_path)).override(ALL_BUT_PREFETCH)
    before = sorted(tmp_path.rglob("*"))

    def enough(line: str) -> None:
        if "tiers.prefetch = 3" in line:
            raise Stopped(signal.SIGINT)

    result = tuned(config, 1, Limits(3600), lambda text: None, enough)
    assert result.stopped is not None
    tried = [str(trial.candidate) for trial in result.found.trials]
    assert tried == ["as configured", "as configured", "tiers.prefetch = 3"]
    for trial in result.found.trials:
        assert isinstance(trial.outcome, Measured), trial
        assert trial.outcome.step_s > 0
        assert trial.outcome.nvme_bytes > 1e6
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_fails_is_contained(tmp_path: Path) -> None:
    runs = Runs(Config.load(configuration(tmp_path)), 1, Limits(3600))
    outcome = runs.measure(Candidate((("tiers.host", "1MB"),)), 1)
    assert isinstance(outcome, Failed)
    assert "tiers.host" in outcome.why
    assert isinstance(runs.failure(outcome.why), ConfigError)
    assert "run.toml" not in outcome.why


def test_a_first_run_that_takes_too_long_is_ended_and_says_what_to_do(tmp_path: Path) -> None:
    done = tune(configuration(tmp_path), "--minutes", "0.01")
    assert done.exit_code == 2
    assert "give more --minutes" in done.stderr
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.long
def test_an_interrupt_ends_the_run_too_and_prints_what_is_known(tmp_path: Path) -> None:
    path = configuration(tmp_path, batch_size=4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "tierzero", "tune", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 100
    while not list(tmp_path.glob("nvme/*/*/*.tier")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    runs = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "note     ended early: it was stopped" in out
    assert runs
    assert not any(run.is_running() for run in runs)
    assert list((tmp_path / "nvme").iterdir()) == []


def test_the_facts_are_those_of_the_run(tmp_path: Path) -> None:
    facts = checked(Config.load(configuration(tmp_path)).override(["tiers.tile=65536", "train.micro_batch=2"]), 1)
    assert (facts.uses_nvme, facts.moves_tiles, facts.gathers) == (True, True, True)
    assert (facts.tile, facts.threads, facts.micro_steps) == (65536, 1, 2)
    assert list((tmp_path / "nvme").iterdir()) == []
