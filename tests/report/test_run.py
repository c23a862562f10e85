"""`tierzero report` on the record of a real run of two ranks, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tierzero.cli import main
from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.records.reading import read_run
from tierzero.report.build import build_report
from tierzero.report.figures import figures_of
from tierzero.train import prepare, train

from ..support.ranks import ROOT

CONFIG = """
[model]
dim = 64
layers = 3
heads = 2
[data]
path = "text/*.txt"
[train]
steps = 5
batch_size = 4
micro_batch = 1
seq_len = 32
validation_every = 3
validation_batches = 1
sample_tokens = 0
threads = 1
[activations]
recompute = "unit"
[tiers]
nvme = ["nvme"]
tile = 4096
[sharding]
min_unit = 0
[placement]
params = "nvme"
optimizer = "nvme"
gradients = "nvme"
[checkpoint]
dir = "checkpoints"
every = 3
[log]
dir = "run"
timeline = true
"""
RANKS = 2
Json = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the record."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    (folder / "nvme").mkdir()
    (folder / "text" / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    (folder / "run.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "tierzero", "train", str(folder / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_the_phases_of_each_rank_add_up_to_its_steps(trained: Path) -> None:
    run = read_run(trained)
    assert run.notes == []
    assert [rank.rank for rank in run.ranks] == [0, 1]
    for rank in run.ranks:
        assert list(rank.steps) == [1, 2, 3, 4, 5]
        for line in rank.steps.values():
            phases = line["phase_s"]
            inside = sum(seconds for phase, seconds in phases.items() if phase != "between")
            assert inside == pytest.approx(line["step_s"], rel=0.01)
            assert inside + phases["between"] == pytest.approx(line["end_s"], rel=0.01)
            assert phases["forward"] > 0 < phases["backward"]
            assert phases["recompute"] > 0 < phases["stall_gather"]
            assert line["dropped"] == 0
            # Of the step's own clock nothing is unknown: the loop does little but the model's work.
            assert phases["other"] < 0.5 * line["step_s"]
    logged = list(run.logged.values())
    for step in figures_of(run).steps:
        assert step.loss == logged[step.step - 1]["loss"]
        assert step.step_s <= 1.02 * logged[step.step - 1]["step_s"]


def test_every_moment_of_the_training_thread_is_in_the_compute_lane(trained: Path) -> None:
    for rank in read_run(trained).ranks:
        for event_list in events_by_lane(trace_of(trained)).items():
            (pid, _), events = event_list
            if pid != rank.rank or events[0]["cat"] != "compute":
                continue
            begun, covered = events[0]["ts"], events[0]["ts"]
            for event in events:
                assert event["ts"] <= covered + 1, "a gap in the compute lane"
                covered = max(covered, event["ts"] + event["dur"])
            total = sum(line["end_s"] for line in rank.steps.values())
            assert covered - begun == pytest.approx(1e6 * total, rel=0.01)
            assert {"outside the model", "between steps", "optimizer.step"} <= {event["name"] for event in events}


def test_what_was_done_ahead_is_the_same_in_every_file(trained: Path) -> None:
    run = read_run(trained)
    for step, logged in run.logged.items():
        lines = [rank.steps[step] for rank in run.ranks]
        for key in ("tried_bytes", "kept_bytes", "redone_bytes", "read_ahead_bytes"):
            assert sum(line[key] for line in lines) == logged[key]
        assert [line["clip_factor"] for line in lines] == [logged["clip_factor"]] * RANKS
        # A rank that had no time for a try says nothing of it; the others agree, and the file says what they say.
        tries = [line["tries"] for line in lines]
        assert set(tries) - {None} == {logged["tries"]} - {None}
        assert sum(line["cold_start_s"] for line in lines) / RANKS == pytest.approx(logged["cold_start_s"])
        assert logged["cold_start_s"] <= sum(logged["stall_s"].values())
    assert sum(logged["cold_start_s"] for logged in run.logged.values()) > 0


def trace_of(folder: Path) -> list[Json]:
    path = folder / "trace.json"
    build_report(folder, trace=path)
    trace = json.loads(path.read_text())
    path.unlink()
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events: list[Json] = trace["traceEvents"]
    return events


def events_by_lane(events: list[Json]) -> dict[tuple[int, int], list[Json]]:
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    return {lane: sorted(found, key=lambda event: (event["ts"], -event["dur"])) for lane, found in lanes.items()}


def test_the_trace_is_valid(trained: Path) -> None:
    events = trace_of(trained)
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["args"]["step"] in range(1, 6)
    lanes = events_by_lane(events)
    for lane, found in lanes.items():
        assert ("thread_name", *lane) in named
        open_until: list[float] = []
        for event in found:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, f"{event} does not nest"
            open_until.append(end)
    categories = {(lane[0], found[0]["cat"]) for lane, found in lanes.items()}
    kinds = ("step", "compute", "stall", "gather", "gradients", "page-in", "page-out", "update")
    trials = {(rank, "on trial") for rank in range(RANKS)}  # where a backward left time for them
    assert categories - trials == {(rank, kind) for rank in range(RANKS) for kind in kinds}
    moved = [event for event in events if event.get("cat") in ("page-in", "page-out", "gather", "update")]
    assert all(event["args"]["bytes"] > 0 and event["args"]["unit"] for event in moved)
    assert {event["pid"] for event in events} == {0, 1}


def test_one_step_alone(trained: Path, tmp_path: Path) -> None:
    found = build_report(trained, step=2, page=tmp_path / "page.html", trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2}
    data = page_data_of(tmp_path / "page.html")
    assert data["timelines"][data["chosen"]]["step"] == 2
    assert found.page == tmp_path / "page.html"
    with pytest.raises(ConfigError, match=r"no timeline of step 9; there are those of 1, 2, 3, 4, 5"):
        build_report(trained, step=9)


def page_data_of(path: Path) -> Json:
    text = path.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    data: Json = json.loads(text[start : text.index("</script>", start)])
    return data


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> tuple[int, str, str]:
        sys.argv = ["tierzero", "report", *arguments]
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    code, out, _ = said(str(trained), "--json", "--out", str(tmp_path / "a.html"))
    found = json.loads(out)
    assert code == 0
    assert found["timelines"] == [1, 2, 3, 4, 5]
    assert sum(found["share"].values()) == pytest.approx(1, abs=1e-6)
    assert (tmp_path / "a.html").stat().st_size > 10_000
    code, out, _ = said(str(trained))
    assert code == 0
    assert "page     " in out
    assert (trained / "report.html").exists()
    code, _, err = said(str(tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert "has no record of a step" in err


def cut_last_lines(folder: Path) -> None:
    for path in (*folder.glob("rank-*.jsonl"), folder / "steps.jsonl"):
        path.write_bytes(path.read_bytes()[:-40])


def damage_spans(folder: Path) -> None:
    for path in (folder / "timeline").glob("*-step-00000005.npy"):
        path.write_bytes(path.read_bytes()[:-7])


def lose_names(folder: Path) -> None:
    (folder / "rank-00001.json").unlink()
    (folder / "run.json").write_text("{")


def keep_metrics_only(folder: Path) -> None:
    for path in (*folder.glob("rank-*"), *(folder / "timeline").iterdir()):
        path.unlink()


def write_nonsense(folder: Path) -> None:
    with open(folder / "rank-00000.jsonl", "a") as file:
        file.write('[1]\n{"step": "x"}\n{"step": 6, "phase_s": 3, "step_s": null, "tier_bytes": [1]}\n')


@pytest.mark.parametrize(
    ("damage", "steps", "kept", "note"),
    [
        (cut_last_lines, 4, [1, 2, 3, 4], "1 of 5 lines cannot be read"),
        (damage_spans, 5, [1, 2, 3, 4, 5], "its step has no timeline of rank"),
        (lose_names, 5, [1, 2, 3, 4, 5], "rank-00001.json cannot be read"),
        (keep_metrics_only, 5, [], ""),
        (write_nonsense, 6, [1, 2, 3, 4, 5], "2 of 8 lines cannot be read"),
    ],
)
def test_a_damaged_record_gives_what_there_is(
    copied: Path, damage: Callable[[Path], None], steps: int, kept: list[int], note: str
) -> None:
    damage(copied)
    trace = copied / "trace.json" if kept else None
    found = build_report(copied, page=copied / "page.html", trace=trace)
    assert len(found.figures.steps) == steps
    assert found.run.kept() == kept
    assert any(note in text for text in found.run.notes) or not note
    page = (copied / "page.html").read_text()
    assert note in page
    assert ("recorded without log.timeline" in page) == (not kept)


def test_a_newer_record_is_refused(copied: Path) -> None:
    about = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps(about | {"version": 2}))
    with pytest.raises(ConfigError, match="version 2"):
        build_report(copied)
    with pytest.raises(ConfigError, match="is not a folder"):
        build_report(copied / "run.json")
    keep_metrics_only(copied)
    os.remove(copied / "run.json")
    with pytest.raises(ConfigError, match="no timeline to make a trace of"):
        build_report(copied, trace=copied / "trace.json")


def test_a_resumed_run_goes_on_in_the_same_folder(trained: Path) -> None:
    """On fewer ranks: nothing of a step that is made again may stay of those that are gone."""
    folder = trained.parent
    again = folder / "again"
    shutil.copytree(trained, again)
    checkpoint = folder / "checkpoints" / "step-00000003"
    settings = Config.load(folder / "run.toml").override([f"log.dir={again}", "train.steps=4"])
    threads = torch.get_num_threads()
    train(prepare(settings, str(checkpoint)))
    torch.set_num_threads(threads)
    run = read_run(again)
    assert [list(rank.steps) for rank in run.ranks] == [[1, 2, 3, 4], [1, 2, 3]]
    assert list(run.logged) == [1, 2, 3, 4]
    assert run.kept() == [1, 2, 3, 4]
    assert run.ranks[0].steps[3] == read_run(trained).ranks[0].steps[3]
    assert run.ranks[0].steps[4] != read_run(trained).ranks[0].steps[4]
    assert run.logged[4]["loss"] == pytest.approx(read_run(trained).logged[4]["loss"], rel=1e-2)
