"""`tierzero plan`: what it prints, what it refuses, and that a run can follow it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierzero as tz
from tierzero.api import running
from tierzero.cli.app import app
from tierzero.config import Config
from tierzero.errors import BudgetError
from tierzero.models import bundled_model
from tierzero.planner.machine import MachineProfile
from tierzero.planner.machines import bundled_names
from tierzero.planner.search import Choice, Options, fastest
from tierzero.train import prepare, train
from tierzero.training.plan_report import as_json, peak_bytes
from tierzero.training.planned import Planner, Site, default_plan, settings

from ..planner.machines import machine

MODEL = """
[model]
dim = 128
layers = 4
heads = 2
vocab = 2048
[train]
steps = 2
batch_size = 2
seq_len = 32
validation_batches = 0
sample_tokens = 0
"""


def configuration(folder: Path, *, host: str = "20MB", more: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(f'{MODEL}[tiers]\nnvme = ["nvme"]\nhost = "{host}"\ntile = 32768\n{more}')
    (folder / "nvme").mkdir(exist_ok=True)
    return path


def profile(folder: Path, **changes: Any) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(machine(**changes).as_json()))
    return path


def plan(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_one_json_object_with_what_scripts_rely_on(tmp_path: Path) -> None:
    done = plan(configuration(tmp_path), "--profile", profile(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["fits"] is True
    assert found["predicted_step_s"] > 0
    assert found["bound_by"] in {"compute", "nvme", "link", "network", "memory"}
    assert set(found["peak_bytes"]) == {"device", "host", "nvme"}
    assert found["peak_bytes"]["host"] <= 20e6
    assert set(found["placement"]) == {"params", "gradients", "optimizer"}
    for tiers in found["placement"].values():
        assert sum(tiers.values()) == pytest.approx(1, abs=1e-3)
    assert found["machine"]["name"] == "a test's"


def test_lines_for_a_person_name_the_bound_and_the_settings(tmp_path: Path) -> None:
    done = plan(configuration(tmp_path), "--profile", profile(tmp_path))
    assert done.exit_code == 0
    for beginning in ("model ", "machine ", "step ", "bound ", "set "):
        assert any(line.startswith(beginning) for line in done.stdout.splitlines()), beginning


def test_without_a_profile_it_says_that_the_machine_is_not_measured(tmp_path: Path) -> None:
    assert "not measured" in plan(configuration(tmp_path)).stdout


def test_what_cannot_fit_is_exit_code_2_with_the_bytes_missing(tmp_path: Path) -> None:
    path = configuration(tmp_path, host="1MB", more='[placement]\noptimizer = "host"\n')
    done = plan(path, "--profile", profile(tmp_path), "--json")
    assert done.exit_code == 2
    found = json.loads(done.stdout)
    assert found["fits"] is False
    assert found["missing_bytes"] > 1e6
    assert "tiers.host" in done.stderr
    assert "short" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a machine profile"),
        ('{"format": "else"}', "not a machine profile"),
        ('{"format": "tierzero-machine", "version": 99}', "version 99"),
        ('{"format": "tierzero-machine", "version": 1, "name": "x"}', "Field required"),
    ],
)
def test_a_profile_that_is_none_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    done = plan(configuration(tmp_path), "--profile", tmp_path / "bad.json")
    assert done.exit_code == 2
    assert says in done.stderr
    assert "bad.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    done = plan(configuration(tmp_path), "--profile", profile(tmp_path), "--ranks", "3", "--nodes", "2")
    assert done.exit_code == 2
    assert "multiple" in done.stderr


def test_a_run_can_follow_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "planned.toml"
    done = plan(configuration(tmp_path), "--profile", profile(tmp_path), "--out", out)
    assert done.exit_code == 0, done.output
    config = Config.load(out)
    assert config.tiers.nvme == [tmp_path / "nvme"]
    assert config.tiers.prefetch is not None
    train(prepare(config))
    again = plan(configuration(tmp_path), "--out", out)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_what_the_configuration_says_is_not_changed(tmp_path: Path) -> None:
    more = '[activations]\nrecompute = "unit"\n[optimizer]\noverlap = "none"\n[placement]\nparams = "nvme"\n'
    found = json.loads(plan(configuration(tmp_path, more=more), "--profile", profile(tmp_path), "--json").stdout)
    assert (found["recompute"], found["overlap"], found["tile"]) == ("unit", "none", 32768)
    assert found["placement"]["params"] == {"nvme": 1.0}


@pytest.mark.parametrize(
    ("limit", "overlap"), [("", "both"), ('nvme_limit = "16MB"\n', "forward")], ids=["plenty", "no room for more"]
)
def test_what_auto_comes_to(limit: str, overlap: str, tmp_path: Path) -> None:
    """The plan of a run as it is configured, and the run itself."""
    state = '[placement]\nparams = "nvme"\noptimizer = "nvme"\ngradients = "host"\n'
    config = Config.load(configuration(tmp_path, more=limit + state))
    found = default_plan(Planner(config, Site(machine())))
    assert found is not None
    assert (found.best.overlap, found.best.second_slots > 0) == (overlap, overlap == "both")
    assert as_json(found, [], None)["overlap"] == settings(found)["optimizer"]["overlap"] == overlap
    model = tz.shard(bundled_model(config), config)
    assert running(model).overlap == overlap
    assert tz.stats(model)["tier_bytes"]["nvme"] == pytest.approx(peak_bytes(found)["nvme"], rel=0.01)
    tz.close(model)


SLOW_DRIVE = {"drives": [{"name": "drive", "read": 3e8, "write": 3e8, "mixed": 2.5e8}]}
FAST_PROCESSOR = {
    "compute": {
        "bf16": {
            "matmul": [{"rows": 256, "width": 512, "flops": 1e13}],
            "attention": [{"length": 64, "flops": 1e13}],
            "pointwise_bytes": 1e11,
        }
    }
}


MACHINES = {"balanced": {}, "slow drive": SLOW_DRIVE, "fast processor": FAST_PROCESSOR}
DIAGONAL = (("balanced", "3MB"), ("slow drive", "8MB"), ("fast processor", "30MB"))


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        pytest.param(
            MACHINES[name], host, id=f"{name}-{host}", marks=() if (name, host) in DIAGONAL else pytest.mark.long
        )
        for name in MACHINES
        for host in ("3MB", "8MB", "30MB")
    ],
)
def test_the_search_is_as_good_as_trying_everything(tmp_path: Path, changes: dict[str, Any], host: str) -> None:
    values = Config.load(configuration(tmp_path, host=host)).override(["train.grad_clip=0"])
    planner = Planner(values, Site(machine(**changes)))
    every = replace(planner.options(), tile=[32768], prefetch=[None, 1, 3], recompute=["none", "unit"])
    budgets = planner.budgets(planner.site)

    def attempt(choice: Choice) -> Any:
        return planner.candidate(choice, planner.site, budgets)

    seconds = []
    for values_of in itertools.product(every.recompute, every.overlap, every.order, every.tile, every.prefetch):
        try:
            seconds.append(attempt(Choice(*values_of)).step_s)
        except BudgetError:
            continue
    assert fastest(every, attempt).step_s <= 1.03 * min(seconds)


def test_options_are_tried_in_their_order_and_kept_without_a_gain() -> None:
    class Same:
        def __init__(self, choice: Choice) -> None:
            self.choice, self.step_s = choice, 1.0

    options = Options(["none", "unit"], ["forward", "none"], [("params",)], [None, 1], [None, 2])
    assert fastest(options, Same).choice == options.first()  # type: ignore[arg-type]


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    assert MachineProfile.load(profile(tmp_path)) == machine()


@pytest.mark.parametrize("name", bundled_names())
@pytest.mark.parametrize("ranks", [1, 2])
def test_bundled_machines_can_be_planned_for(tmp_path: Path, name: str, ranks: int) -> None:
    (tmp_path / "run.toml").write_text(MODEL)
    if ranks == 2 and "node" not in name:
        return
    done = plan(tmp_path / "run.toml", "--profile", name, "--ranks", str(ranks), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["fits"] is True


def test_durable_tiers_count_both_slots(tmp_path: Path) -> None:
    more = '[placement]\nparams = "nvme"\noptimizer = "nvme"\n[optimizer]\noverlap = "forward"\n[checkpoint]\n'
    more += 'dir = "c"\n'
    once = json.loads(plan(configuration(tmp_path, more=more), "--profile", profile(tmp_path), "--json").stdout)
    path = configuration(tmp_path, more=f"{more}durable = true\n")
    twice = json.loads(plan(path, "--profile", profile(tmp_path), "--json").stdout)
    assert twice["peak_bytes"]["nvme"] == 2 * once["peak_bytes"]["nvme"]
    done = plan(path, "--profile", profile(tmp_path), "--set", f"tiers.nvme_limit={once['peak_bytes']['nvme'] + 4096}")
    assert done.exit_code == 2
    assert "two slots" in done.stderr


def test_many_micro_batches_take_as_long_as_simulating_each_would(tmp_path: Path) -> None:
    def step_s(micro_steps: int) -> float:
        sets = ("--set", f"train.batch_size={micro_steps}", "--set", "train.micro_batch=1")
        done = plan(configuration(tmp_path), "--profile", profile(tmp_path), "--json", *sets)
        return float(json.loads(done.stdout)["predicted_step_s"])

    four, five, forty = step_s(4), step_s(5), step_s(40)
    assert forty == pytest.approx(four + 36 * (five - four), rel=1e-6)
    assert five > four
