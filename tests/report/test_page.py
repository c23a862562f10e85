"""The page: text of the run stays text, and, where there is a browser, its script draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierzero.records import files
from tierzero.report.build import build_report
from tierzero.runtime.spans import SPAN, Kind
from tierzero.runtime.timeline import PHASES

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def made_record(folder: Path, steps: int = 4, unit: str = EVIL) -> Path:
    """A record of two ranks, by hand."""
    (folder / files.TIMELINE).mkdir(parents=True)
    about = {"format": files.RUN_FORMAT, "version": 1, "written": EVIL, "ranks": 2, "parameters": 10_800_000}
    (folder / files.RUN).write_text(json.dumps(about))
    phases = {phase: 0.01 * (number + 1) for number, phase in enumerate(PHASES)}
    step_s = sum(seconds for phase, seconds in phases.items() if phase != "between")
    for rank in range(2):
        own = {"format": files.RANK_FORMAT, "version": 1, "units": ["(root)", unit], "machine": EVIL}
        budgets = {"device": 2e9, "host": 1e9, "nvme": 5e9}
        files.rank_about(folder, rank).write_text(json.dumps(own | {"budgets": budgets}))
        lines = [line(step, phases, step_s) for step in range(1, steps + 1)]
        files.rank_steps(folder, rank).write_text("".join(json.dumps(one) + "\n" for one in lines))
        for step in range(1, steps + 1):
            np.save(files.spans_file(folder, rank, step), made_spans())
    logged = [json.dumps({"step": step, "loss": 5.0 / step}) + "\n" for step in range(1, steps + 1)]
    (folder / files.STEPS).write_text("".join(logged))
    return folder


def line(step: int, phases: dict[str, float], step_s: float) -> dict[str, Any]:
    return {
        "step": step,
        "start": 1e9 + step,
        "began_s": phases["between"],
        "end_s": phases["between"] + step_s,
        "step_s": step_s,
        "phase_s": phases,
        "nvme_read_bytes": 10**8,
        "nvme_write_bytes": 10**8,
        "comm_bytes": {"all_gather": 100, "reduce_scatter": 50, "all_reduce": 0},
        "peak_tier_bytes": {"device": 1e9, "host": 1e9, "nvme": 5e9},
        "dropped": 3,
    }


def made_spans() -> Any:
    spans = [
        (0.15, 0.4, 0, 0, -1, 0, Kind.FORWARD),
        (0.2, 0.3, 0, 1, -1, 0, Kind.FORWARD),
        (-0.01, 0.1, 10**6, 1, 0, 0, Kind.PAGE_IN),
        (0.05, 0.2, 10**6, 1, 1, 0, Kind.PAGE_IN),
        (0.3, 0.35, 0, 1, -1, 0, Kind.STALL_GATHER),
        (0.4, 0.4, 10**6, 70, 2, 1, Kind.UPDATE),
        (0.5, 0.4, 1, 1, 2, 1, Kind.UPDATE),
        (0.5, 0.6, 1, 1, 2, 1, 999),
    ]
    return np.array(spans, SPAN)


def test_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    folder = made_record(tmp_path / "run <b>&", unit=EVIL)
    page = tmp_path / "page.html"
    build_report(folder, page=page)
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text
    assert "alert(" in text  # it is there, as text
    assert "run <b>" not in text
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "run &lt;b&gt;&amp;" in text


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    build_report(made_record(tmp_path / "run"), page=page)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""<[a-z]+[^>]*\s(?:src|srcset|href|action)\s*=""", text)
    assert not re.search(r"""https?:(?!//www\.w3\.org/2000/svg)|@import|url\(|fetch\(|import\(|XMLHttp""", text)


def test_what_the_page_shows_is_what_was_recorded(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = build_report(made_record(tmp_path / "run"), page=page)
    text = page.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert data["steps"] == [1, 2, 3, 4]
    assert set(data["charts"]) == {"times", "tiers", "loss", "drive", "comm"}
    assert data["charts"]["loss"]["series"][0]["values"] == [5.0, 2.5, 1.66667, 1.25]
    assert {one["label"]: one["value"] for one in data["charts"]["tiers"]["limits"]} == {
        "device as planned": 4e9,
        "host as planned": 2e9,
    }
    shown = data["timelines"][data["chosen"]]
    assert (len(data["timelines"]), shown["step"]) == (8, 4)
    names = [shown["names"][span[3]] for span in shown["spans"]]
    assert f"forward {EVIL}" in names
    assert "update unit 70 group 1 tile 2" in names
    assert sum("update" in name for name in names) == 1, "a span that ends before it begins is none"
    lanes = [lane["name"] for lane in shown["lanes"]]
    assert lanes == ["step", "compute", "stall", "page-in", "update"]
    assert {lane["name"]: lane["rows"] for lane in shown["lanes"]}["page-in"] == 2
    assert all(span[5] >= 0 for span in shown["spans"])
    assert "24 spans found no room" in text
    assert found.figures.steps[0].dropped == 6


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize(("steps", "width"), [(4, 1200), (1, 400), (500, 800)])
def test_a_browser_draws_it(tmp_path: Path, steps: int, width: int) -> None:
    page = tmp_path / "page.html"
    build_report(made_record(tmp_path / "run", steps), page=page)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},900", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    said = [text for text in done.stderr.splitlines() if "CONSOLE" in text]
    assert said == []
    assert 'data-drawn="yes"' in done.stdout
    charts = re.findall(r'<figure id="(\w+)"><svg', done.stdout)
    assert sorted(charts) == ["comm", "drive", "loss", "tiers", "times"]
    assert done.stdout.count("<rect") > 5 * min(steps, 100)
    assert done.stdout.count("<option") >= 2 * min(steps, 4)
    assert "<img" not in done.stdout
