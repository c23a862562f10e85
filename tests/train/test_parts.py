"""The parts of a run, each by itself."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tierzero.checked_json import write_json
from tierzero.checkpoint.manifest import FORMAT, MANIFEST
from tierzero.cli.failures import exit_code, reported, usage_errors
from tierzero.config import Config
from tierzero.errors import BudgetError, CheckpointError, ConfigError, TierError
from tierzero.training import checkpoints
from tierzero.training.checkpoints import (
    all_in,
    check_directory,
    folder_of,
    keep_newest,
    set_aside_others,
    to_resume,
)
from tierzero.training.memory import peak_rss_bytes, rss_bytes
from tierzero.training.metrics import Measured, MetricsFile, Record, check_writable, combine
from tierzero.training.progress import Lines, describe
from tierzero.training.ranks import Ranks, asked_threads, core_share, micro_batches
from tierzero.training.schedule import lr_factor, scheduler_at
from tierzero.training.stopping import Stopped, StopSignals
from tierzero.training.summary import Totals, shown_text, summarise
from tierzero.training.text import amount, count, duration

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def stats() -> dict[str, object]:
    return {
        "nvme_read_bytes": 14_000,
        "nvme_write_bytes": 12_000,
        "tier_bytes": {"device": 1, "host": 2, "nvme": 3},
        "peak_tier_bytes": {"device": 4, "host": 5, "nvme": 6},
        "comm_bytes": {"all_gather": 7, "reduce_scatter": 8, "all_reduce": 9},
        "stall_s": {"nvme_read": 0.5, "nvme_write": 0.25, "gather": 0.0, "optimizer": 0.0, "host_budget": 0.0},
        "redone_bytes": 10,
        "tried_bytes": 40,
        "kept_bytes": 20,
        "read_ahead_bytes": 50,
        "cold_start_s": 0.125,
        "tries": "lost",
        "clip_factor": 0.5,
        "parameters": 1000,
    }


def record(step: int = 1, loss: float = 2.5) -> Record:
    own = Measured(step, loss, 1.5, 1e-3, 512, 2.0, None)
    return combine(own, stats(), torch.device("cpu"), 1)


def send_self(number: signal.Signals) -> None:
    """Returns after the handler has run."""
    os.kill(os.getpid(), number)
    for _ in range(1000):  # handlers run between bytecodes
        pass


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_that_come_along_are_valid(path: Path) -> None:
    Config.load(path).check()


def test_the_quickstart_places_everything_on_nvme_in_a_folder_that_is_there() -> None:
    config = Config.load(next(path for path in CONFIGS if path.name == "quickstart.toml"))
    assert config.placement.params == config.placement.optimizer == config.placement.gradients == {"nvme": 1.0}
    assert all(path.is_dir() for path in config.tiers.nvme)


def test_warm_up_is_linear_and_every_schedule_ends_where_it_says() -> None:
    values = {"warmup": 4, "min_lr_ratio": 0.2}
    for schedule, middle, last in (("constant", 1, 1), ("linear", 0.6, 0.2), ("cosine", 0.6, 0.2)):
        section = Config.from_dict({"optimizer": {**values, "schedule": schedule}}).optimizer
        factor = lr_factor(section, 25)
        assert [factor(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert factor(4) == 1
        assert factor(14) == pytest.approx(middle)
        assert factor(24) == factor(30) == pytest.approx(last)


def test_a_resumed_schedule_goes_on_where_the_whole_one_is() -> None:
    section = Config.from_dict({"optimizer": {"lr": 0.5, "schedule": "cosine", "warmup": 3}}).optimizer

    def rates(start: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
        scheduler = scheduler_at(optimizer, section, 10, start)
        found = []
        for _ in range(start, 10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    for start in (0, 1, 2, 7, 10):
        assert rates(start) == rates(0)[start:]


def test_a_record_is_one_line_of_strict_json() -> None:
    made = record(loss=math.nan)
    line = made.to_json()
    assert "\n" not in line
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["loss"] is None
    assert found["tokens_per_s"] == 256
    assert found["compute_s"] == 1.25
    assert found["comm_bytes"] == {"all_gather": 7, "reduce_scatter": 8, "all_reduce": 9}
    assert found["peak_rss_bytes"] >= found["rss_bytes"] > 10**6
    ahead = {key: value for key, value in stats().items() if key.endswith("_bytes") and isinstance(value, int)}
    assert {key: found[key] for key in ahead} == ahead
    assert (found["cold_start_s"], found["tries"], found["clip_factor"]) == (0.125, "lost", 0.5)


def test_a_resumed_metrics_file_holds_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = MetricsFile(path)
    for step in range(1, 8):
        first.write(record(step))
    first.close()
    with open(path, "a") as file:
        file.write('{"step": 8, "lo')
    resumed = MetricsFile(path, resumed=5)
    resumed.write(record(6))
    resumed.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_a_metrics_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    check_writable(tmp_path / "new" / "m.jsonl")
    for path in (tmp_path, tmp_path / "file" / "m.jsonl"):
        with pytest.raises(ConfigError, match=r"log\.metrics"):
            check_writable(path)


def test_checkpoints_are_kept_by_step_and_others_left_alone(tmp_path: Path) -> None:
    for step in (5, 100, 20, 123456789):
        folder_of(tmp_path, step).mkdir()
    for name in (".step-00000200.partial", "step-x", "notes"):
        (tmp_path / name).mkdir()
    keep_newest(tmp_path, 2)
    assert [path.name for path in all_in(tmp_path)] == ["step-00000100", "step-123456789"]
    assert {path.name for path in tmp_path.iterdir()} >= {".step-00000200.partial", "step-x", "notes"}


def checkpoint_at(folder: Path, step: int) -> Path:
    """As much of one as the search for checkpoints looks at."""
    target = folder_of(folder, step)
    target.mkdir(parents=True)
    write_json(target / MANIFEST, {"format": FORMAT, "version": 1, "extra": {"step": step}})
    return target


def test_later_checkpoints_of_another_run_are_moved_not_overwritten(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", checkpoint_at(tmp_path / "elsewhere", 9)
    here.mkdir()
    assert set_aside_others(here, None, 0) is None
    for step in (4, 8, 12):
        checkpoint_at(here, step)
    assert set_aside_others(here, folder_of(here, 12), 12) is None
    assert set_aside_others(here, folder_of(here, 4), 4) == here / "earlier-1"
    assert [path.name for path in all_in(here / "earlier-1")] == ["step-00000008", "step-00000012"]
    (here / "earlier-2").symlink_to("nowhere")
    assert set_aside_others(here, elsewhere, 9) == here / "earlier-3"
    assert all_in(here) == []
    checkpoint_at(here, 1)
    assert set_aside_others(here, None, 0) == here / "earlier-4"


def test_the_folder_above_the_checkpoints_names_the_newest(tmp_path: Path) -> None:
    checkpoint_at(tmp_path, 4)
    newest = checkpoint_at(tmp_path, 8)
    with pytest.raises(ConfigError, match=f"did you mean {newest}"):
        to_resume(Config.from_dict({}), str(tmp_path))


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    config = Config.from_dict({"checkpoint": {"dir": str(tmp_path / "none"), "every": 1}})
    assert to_resume(config, None) is None
    assert to_resume(config, "auto") is None
    with pytest.raises(ConfigError, match="no such checkpoint"):
        to_resume(config, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="manifest"):
        to_resume(config, str(tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint\.dir"):
        to_resume(Config.from_dict({}), "auto")
    check_directory(config)
    folder_of(tmp_path / "none", 3).mkdir()
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ConfigError, match="none of the 1"):
        to_resume(config, "auto")


def test_a_checkpoint_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"checkpoint\.dir"):
        check_directory(Config.from_dict({"checkpoint": {"dir": str(tmp_path / "file" / "x"), "every": 1}}))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Ranks()),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Ranks(1, 4, 1, 4, True)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            Ranks(5, 8, 1, 4, True),
        ),
    ],
)
def test_ranks_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Ranks
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == expected


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "")])
def test_a_broken_environment_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match="environment"):
        Ranks.from_environment()


def test_micro_batches() -> None:
    config = Config.from_dict({"train": {"batch_size": 24}})
    assert micro_batches(config, Ranks()) == (24, 1)
    assert micro_batches(config.override(["train.micro_batch=4"]), Ranks(0, 3)) == (4, 2)
    with pytest.raises(ConfigError, match="5 ranks"):
        micro_batches(config, Ranks(0, 5))
    with pytest.raises(ConfigError, match="does not divide the 8 sequences of a rank"):
        micro_batches(config.override(["train.micro_batch=6"]), Ranks(0, 3))


def test_the_first_signal_waits_for_a_check_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(quiet=True) as stop:
        stop.check()
        send_self(signal.SIGTERM)
        with pytest.raises(Stopped) as caught:
            stop.check()
        assert caught.value.exit_code == 143
        with pytest.raises(Stopped):
            send_self(signal.SIGINT)
        stop.closing()
        send_self(signal.SIGINT)
        stop.check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_acts_at_once_where_that_was_asked_for() -> None:
    with StopSignals(quiet=True) as stop, pytest.raises(Stopped), stop.at_once():
        send_self(signal.SIGINT)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (BudgetError("x", 3), 2),
        (TierError("x"), 1),
        (CheckpointError("x"), 1),
        (ValueError("x"), 1),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert exit_code(error) == code
    with pytest.raises(SystemExit) as caught, reported():
        raise error
    assert caught.value.code == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("tierzero: error: ")
    assert "x" in said


def test_a_rank_says_which_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit), reported():
        raise TierError("drive lost")
    assert "rank 3: drive lost" in capsys.readouterr().err
    with pytest.raises(SystemExit), reported(same_everywhere=True):
        raise ConfigError("said by rank 0")
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit), reported():
        raise RuntimeError("[pair.cc:5] Connection closed by peer [127.0.0.1]:1")
    assert "rank 3: lost contact with another rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["trian"], "train"), (["train"], "config"), (["train", "x", "--steps", "y"], "--steps"), (["train", "-q"], "-q")],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tierzero.cli.app import app

    with pytest.raises(SystemExit) as caught, usage_errors():
        app(arguments, prog_name="tierzero", standalone_mode=False)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert part in said


def test_lines_are_shown_every_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(10, 4)
    for step in range(1, 11):
        lines.show(record(step))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["1/10", "4/10", "8/10", "10/10"]
    for part in ("loss 2.5000", "norm 1.500", "256 tokens/s", "rss", "nvme 7.00 kB/s in, 6.00 kB/s out"):
        assert part in shown[0]
    assert "nvme" not in describe(replace(record(), nvme_read_bytes=0, nvme_write_bytes=0))


def test_the_summary_adds_up() -> None:
    totals = Totals()
    for step in (1, 2):
        totals.add(record(step))
    text = "\n".join(summarise(totals, stats() | {"overlap": "both"}, 14_000, 12_000, 5 * 10**8, 1))
    for part in (
        'state 14.0 kB (14.0 bytes per parameter) and second slots of 12.0 kB; optimizer.overlap = "both"',
        "device 1 B (peak 4 B), host 2 B (peak 5 B), nvme 3 B (peak 6 B)",
        "read 28.0 kB, wrote 24.0 kB; 26.0 kB per step, 26.0 bytes per parameter and step",
        "2 steps in 4.0 s, 256 tokens/s: computing 2.5 s, waiting for nvme_read 1.0 s, nvme_write 0.5 s",
        "ahead    80 B of state updated ahead of 2 steps, 40 B kept; in vain 20 B, of 2 steps",
        "peak RSS 500 MB",
    ):
        assert part in text


def test_ranks_of_a_node_get_cores_of_their_own() -> None:
    for cores, ranks in ((2, 2), (16, 3), (7, 7), (9, 1)):
        shares = [core_share(range(cores), rank, ranks) for rank in range(ranks)]
        assert sorted(core for share in shares for core in share) == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert core_share([3], 1, 2) == []


def test_threads_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, ranks, threads in (("3", 1, 3), ("3", 4, 3), ("1", 1, 1), ("1", 2, None), ("4,2", 1, 4), ("", 1, None)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert asked_threads(ranks) == threads, (said, ranks)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert asked_threads(1) is None


def test_numbers_for_people() -> None:
    assert [amount(n) for n in (0, 999, 1000, 99_949, 1.5e9, 9.996e11)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "99.9 kB",
        "1.50 GB",
        "1.00 TB",
    ]
    assert count(10_916_736) == "10.9 M"
    assert [duration(s) for s in (5.4, 42.2, 185, 7620)] == ["5.4 s", "42 s", "3 min 05 s", "2 h 07 min"]


def test_a_sample_is_safe_on_a_terminal() -> None:
    assert shown_text(list(b"def f():\n\t\x1b[2J\x07\xff")) == "def f():\n\t\ufffd[2J\ufffd\ufffd"
    assert shown_text([65, 300, 66]) == "A\ufffdB"


def test_memory_figures() -> None:
    block = torch.ones(20 * 2**20, dtype=torch.uint8)
    assert peak_rss_bytes() >= 20 * 2**20
    assert rss_bytes() >= block.numel()


def test_the_checkpoint_before_another(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        checkpoints.folder_of(tmp_path, step).mkdir()
    assert checkpoints.before(checkpoints.folder_of(tmp_path, 20)) == checkpoints.folder_of(tmp_path, 10)
    assert checkpoints.before(checkpoints.folder_of(tmp_path, 5)) is None
    assert checkpoints.before(tmp_path / "mine") is None


def test_a_stopped_run_says_what_it_can_be_gone_on_from(tmp_path: Path) -> None:
    config = Config.from_dict({"checkpoint": {"dir": str(tmp_path)}})
    assert "no checkpoint was written" in checkpoints.left_behind(config)
    checkpoints.folder_of(tmp_path, 5).mkdir()
    assert "step-00000005; --resume auto" in checkpoints.left_behind(config)
