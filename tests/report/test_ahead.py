"""What a report says of updates ahead of the step and of the start of a forward, on records of real runs."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running
from tierzero.report.ahead import listed, sentences, tries_of
from tierzero.report.build import build_report
from tierzero.runtime.stats import Tries

from ..support.oracle import Case, built, config, hyper, sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(lambda: Stack(5), regression, (Block,))
STEPS = 9
NEW = ("tried_bytes", "kept_bytes", "redone_bytes", "read_ahead_bytes", "start_bytes", "cold_start_s", "tries")


def recorded(folder: Path, always: bool) -> tuple[Path, int]:
    """The record of a run, and in which step clipping acted: in one from the fourth on that has tried something, or in
    every one.
    """
    (folder / "nvme").mkdir(parents=True)
    settings = config(folder / "nvme", optimizer={"overlap": "both"}, train={"precision": "bf16"})
    clipped = 0
    with (
        sharded(built(STACK), settings, STACK.units) as model,
        tz.record(model, folder / "run", config=settings) as run,
    ):
        optimizer, speculation = tz.AdamW(model.parameters(), **hyper(STACK)), running(model).updater.speculation
        for step in range(1, STEPS + 1):
            loss, before = regression(model, step, 0), speculation.tried_bytes
            deadline = time.monotonic() + (0.0 if always else 0.3)
            loss.backward()
            while speculation.tried_bytes == before and time.monotonic() < deadline:
                time.sleep(0.001)
            clips = always or (step >= 4 and not clipped and speculation.tried_bytes > before)
            clipped = step if clips else clipped
            tz.clip_grad_norm_(model, 0.01 if clips else 1e6)
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": loss.item()})
    return folder / "run", clipped


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = recorded(tmp_path_factory.mktemp("once"), False)
    torch.set_num_threads(threads)
    assert 4 <= found[1] <= STEPS - 2
    return found


@pytest.fixture(scope="module")
def once(run: tuple[Path, int]) -> Path:
    return run[0]


def test_the_words_and_the_numbers(run: tuple[Path, int]) -> None:
    once, clipped = run
    found = build_report(once)
    tries = tries_of(found.figures)
    assert tries is not None
    assert (tries.tried, tries.lost, tries.lost_to_clipping, tries.left_out) == (
        STEPS - 2,
        (clipped,),
        1,
        (clipped + 1,),
    )
    assert tries.kept_share is not None
    assert 0 < tries.kept_share < 1
    assert 0 < tries.redone_bytes < tries.tried_bytes
    text = "\n".join(found.lines())
    for part in (
        f"ahead    In {STEPS - 2} steps updates were tried in the backward, and in {STEPS - 3} of them kept: ",
        "In 1 step they were lost and done again, as clipping acted; ",
        f"1 step went without, to waste nothing, as steps before them had lost tries or would have: {clipped + 1}.",
        "before its first unit can run",
    ):
        assert part in text
    assert found.as_json()["tries"]["lost"] == (clipped,)
    # What a step says of its start is about the root and the first block: a part of all there is.
    step = found.figures.steps[-1]
    assert 0 < step.ahead.start_bytes < found.figures.trained_bytes


def test_the_timeline_shows_trials_in_a_lane_of_their_own(once: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    build_report(once, page=page, trace=trace)
    text = page.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert [series["label"] for series in data["charts"]["ahead"]["series"]] == ["tried", "kept", "lost"]
    assert '<figure id="ahead">' in text
    assert "<h2>Ahead of the step</h2>" in text
    kinds = {kind for one in data["timelines"] for kind in one["kinds"]}
    assert {"tried", "kept", "lost"} <= kinds & {kind for kind, _ in data["legend"]}
    assert {"tried", "kept", "lost"} <= data["hints"].keys()
    style = text[: text.index("</style>")]
    assert all(style.count(f"--{kind}:") == 2 for kind, _ in data["legend"]), "a colour for day and for night"
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "on trial"]
    named = Counter(event["name"].split(" unit")[0].rsplit(" tile")[0].split(" blocks")[0] for event in events)
    assert {name for name in named if name.startswith(("update on trial", "trial kept", "trial lost"))} == set(named)
    on_page = {name for one in data["timelines"] for name in one["names"]}
    assert {event["name"] for event in events} <= on_page


def test_a_run_that_always_clips_is_told_so(tmp_path: Path) -> None:
    found = build_report(recorded(tmp_path, True)[0])
    text = next(finding.text for finding in found.findings if finding.rule == "lost tries")
    assert text.startswith('Clipping acts in 9 of 9 steps, so optimizer.overlap = "both" gains nothing: 2 of 2 tries')
    assert "6 steps went without" in text


def test_a_record_from_before_is_read(once: Path, tmp_path: Path) -> None:
    shutil.copytree(once, tmp_path / "old")
    path = tmp_path / "old" / "rank-00000.jsonl"
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key not in (*NEW, "clip_factor")} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = build_report(tmp_path / "old", page=tmp_path / "page.html")
    assert tries_of(found.figures) is None
    assert sentences(found.figures) == []
    assert "Ahead of the step" not in (tmp_path / "page.html").read_text()


def test_steps_are_listed_as_ranges() -> None:
    assert listed([3, 5, 6, 7, 9]) == "3, 5 to 7, 9"
    assert listed(range(1, 40, 2)) == "1, 3, 5, 7, ..., 33, 35, 37, 39"


def test_a_rank_that_tried_nothing_does_not_speak_for_the_others() -> None:
    assert Tries.of_ranks([None, "kept"]) is Tries.KEPT
    assert Tries.of_ranks(["lost", None]) is Tries.LOST
    assert Tries.of_ranks(["left out", "left out"]) is Tries.LEFT_OUT
    assert Tries.of_ranks([None, None]) is None
