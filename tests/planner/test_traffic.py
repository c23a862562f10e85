"""The simulated step moves what a real one moves: the same schedule, on the same plan."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.models import bundled_model
from tierzero.planner.prediction import step_case
from tierzero.planner.simulated_step import SimulatedStep
from tierzero.runtime.trial_rules import Amount
from tierzero.training.planned import Planner, Site, default_plan

from .machines import machine

NVME = {"params": "nvme", "optimizer": "nvme"}

CASES: dict[str, dict[str, Any]] = {
    "all but gradients": {"placement": {**NVME, "gradients": "host"}},
    "gradients too": {"placement": {**NVME, "gradients": "nvme"}},
    "weights in memory": {"placement": {"params": "host", "optimizer": "nvme", "gradients": "host"}},
    "a split": {"placement": {"params": {"host": 0.5, "nvme": 0.5}, "optimizer": {"host": 0.4, "nvme": 0.6}}},
    "no prefetch": {"placement": NVME, "tiers": {"prefetch": 0}},
    "far prefetch": {"placement": NVME, "tiers": {"prefetch": 4}},
    "small tiles": {"placement": NVME, "tiers": {"tile": 32768, "host": "4MB"}},
    "roomy": {"placement": NVME, "tiers": {"host": "64MB"}},
    "recompute": {"placement": NVME, "activations": {"recompute": "unit"}},
    "segments": {"placement": NVME, "activations": {"recompute": 2}},
    "kept": {"placement": NVME, "sharding": {"reshard_after_forward": False}},
    "accumulation": {"placement": {**NVME, "gradients": "nvme"}, "train": {"micro_batch": 1}},
    "overlap none": {"placement": NVME, "optimizer": {"overlap": "none"}},
    "overlap backward": {"placement": NVME, "optimizer": {"overlap": "backward"}, "train": {"grad_clip": 0}},
    "bf16 moments": {"placement": NVME, "optimizer": {"state_dtype": "bf16"}},
    "int8 moments": {"placement": NVME, "optimizer": {"state_dtype": "int8"}},
    "tied": {"placement": NVME, "model": {"tied": True}},
}


def configuration(case: dict[str, Any], nvme: Path) -> tz.Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"dim": 128, "layers": 5, "heads": 2, "vocab": 4096},
        "train": {"batch_size": 2, "seq_len": 16},
        "tiers": {"nvme": [str(nvme)]},
        "sharding": {"min_unit": 0},
        "optimizer": {"overlap": "forward"},
    }
    for section, keys in case.items():
        base.setdefault(section, {}).update(keys)
    return tz.Config.from_dict(base)


def measured(config: tz.Config, micro_batch: int) -> list[dict[str, Any]]:
    """The figures of the steps after the first two."""
    with tz.empty_init():
        model = bundled_model(config)
    sharded = tz.shard(model, config)
    optimizer = tz.AdamW(sharded.parameters(), lr=1e-3)
    try:
        found = []
        for step in range(14):
            ids = torch.randint(0, 4096, (config.train.batch_size, 16), generator=torch.Generator().manual_seed(step))
            for part in ids.split(micro_batch):
                sharded(part, part).backward()
            if config.train.grad_clip:
                tz.clip_grad_norm_(sharded, 1.0)
            if running(sharded).overlap == "both":
                wait_until_idle(sharded)
            optimizer.step()
            optimizer.zero_grad()
            found.append(tz.stats(sharded))
        return found[2:]
    finally:
        tz.close(sharded)


LONGEST = {"small tiles": pytest.mark.long}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=LONGEST.get(name, ())) for name, case in CASES.items()]
)
def test_predicted_traffic_is_measured_traffic(case: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(case, tmp_path)
    planner = Planner(config, Site(machine()))
    plan = default_plan(planner)
    assert plan is not None
    predicted = plan.best.prediction.phases.nvme_bytes
    # A mean, because write-backs may end in the next step.
    assert predicted == pytest.approx(statistics.mean(map(moved, measured(config, planner.micro_batch))), rel=0.02)


def moved(stats: dict[str, Any]) -> float:
    return float(stats["nvme_read_bytes"] + stats["nvme_write_bytes"])


def wait_until_idle(model: nn.Module) -> None:
    """Until what the backward tries is done, and the drive has done nothing for a while."""
    engine, speculation, before = running(model).engine, running(model).updater.speculation, -1
    while (now := engine.read_bytes + engine.write_bytes) != before or any(
        attempt.running for attempt in list(speculation._attempts.values())
    ):
        before = now
        time.sleep(0.05)


def test_weights_of_tiles_that_were_tried_move_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else of a step moves as the next forward alone moves it, however much is tried. Now and then a try is given
    up when its tile has been read, because somebody else wants it: a median leaves such steps out.
    """
    monkeypatch.setattr(Amount, "least", 1 << 40)
    unclipped = {"grad_clip": 0}
    config = configuration({"placement": NVME, "optimizer": {"overlap": "both"}, "train": unclipped}, tmp_path)
    planner = Planner(config, Site(machine()))
    choice, budgets = planner.as_configured(), planner.budgets(planner.site)
    case = step_case(
        planner.workload(choice, planner.site, 0), planner.candidate(choice, planner.site, budgets).plan, machine()
    )
    none = SimulatedStep(case).run().nvme_bytes
    steps = measured(config, planner.micro_batch)
    assert statistics.median(step["kept_bytes"] for step in steps) > 0
    # Tried in a backward: read and written. Kept in the forward after it: that is saved, but for the weights.
    ahead = [2 * step["tried_bytes"] - (2 - 2 / 12) * step["kept_bytes"] for step in steps]
    rest = statistics.median(moved(step) - more for step, more in zip(steps, ahead, strict=True))
    assert none == pytest.approx(rest, rel=0.02)
    weights = sum(tile.weights for unit in case.units for tile in unit.tiles)
    some = SimulatedStep(replace(case, tried=0.25)).run().nvme_bytes
    assert some - none == pytest.approx(weights / 4, rel=0.2)
