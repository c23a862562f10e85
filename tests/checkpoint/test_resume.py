"""A run taken up from a checkpoint goes on, bit for bit, as if it had not been stopped: on other tiers, with other
tiles and units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import Outcome, assert_bits, config
from ..support.resuming import running


def settings(nvme: Path, precision: str, tier: object = "nvme", **sections: dict[str, Any]) -> tz.Config:
    nvme.mkdir(exist_ok=True)
    return config(nvme, tier, train={"precision": precision}, **sections)


def unbroken(nvme: Path, precision: str, saved: Path) -> tuple[list[float], Outcome]:
    """Twenty steps; a checkpoint after ten, which the run itself goes on past."""
    with running(settings(nvme, precision)) as run:
        run.train(10)
        run.save(saved)
        return run.train(10), run.outcome()


TARGETS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "host": {"tier": "host"},
    "device": {"tier": "device"},
    "split": {"tier": {"host": 0.5, "nvme": 0.5}},
    "small-tiles": {"tiers": {"tile": 6144, "prefetch": 0}},
    "no-overlap": {"optimizer": {"overlap": "none"}},
}


@pytest.mark.parametrize(
    ("precision", "targets"),
    [
        pytest.param("bf16", tuple(TARGETS), id="bf16"),
        pytest.param("fp32", ("nvme", "split"), id="fp32"),
        pytest.param("fp16", ("host", "small-tiles"), id="fp16"),
        pytest.param("fp32", ("host", "device", "small-tiles", "no-overlap"), id="fp32-rest", marks=pytest.mark.long),
        pytest.param("fp16", ("nvme", "device", "split", "no-overlap"), id="fp16-rest", marks=pytest.mark.long),
    ],
)
def test_resumed_run_continues_bit_identically(precision: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    losses, wanted = unbroken(tmp_path / "nvme", precision, saved)
    assert len(set(losses)) == 10
    for target in targets:
        options = {"tiers": {}, **TARGETS[target]}
        with running(settings(tmp_path / target, precision, **options), seed=7) as run:
            run.train(3)  # whatever the model held before is replaced
            torch.manual_seed(1234)
            run.load(saved)
            assert run.step == 10
            assert run.scheduler.optimizer.param_groups is run.optimizer.param_groups
            assert run.train(10) == losses, target
            assert_bits(run.outcome(), wanted)


@pytest.mark.parametrize("units", [(), ("blocks.1", "embed"), ("Linear", "LayerNorm", "Embedding", "BatchNorm1d")])
def test_with_other_units(units: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    losses, wanted = unbroken(tmp_path / "nvme", "bf16", saved)
    with running(settings(tmp_path / "other", "bf16"), units=units) as run:
        run.load(saved)
        assert run.train(10) == losses
        assert_bits(run.outcome(), wanted)


@pytest.mark.parametrize("steps", [0, 1])
def test_saved_before_the_first_steps(steps: int, tmp_path: Path) -> None:
    with running(settings(tmp_path / "a", "bf16")) as run:
        run.train(steps)
        run.save(tmp_path / "saved")
        losses, wanted = run.train(4), run.outcome()
    with running(settings(tmp_path / "b", "bf16"), seed=5) as run:
        run.load(tmp_path / "saved")
        assert run.train(4) == losses
        assert_bits(run.outcome(), wanted)


def test_saving_and_loading_change_nothing_by_themselves(tmp_path: Path) -> None:
    with running(settings(tmp_path / "a", "bf16")) as run:
        losses = run.train(12)
        wanted = run.outcome()
    with running(settings(tmp_path / "b", "bf16")) as run:
        found = []
        for part in range(4):
            found += run.train(3)
            run.save(tmp_path / "saved")
            if part % 2:
                run.load(tmp_path / "saved")
        assert found == losses
        assert_bits(run.outcome(), wanted)


def test_half_accumulated_gradients_are_dropped(tmp_path: Path) -> None:
    """A checkpoint holds no gradients; loading one forgets those of the running step."""
    with running(settings(tmp_path / "a", "fp32")) as run:
        run.train(2)
        run.save(tmp_path / "saved")
        losses, wanted = run.train(3), run.outcome()
    with running(settings(tmp_path / "b", "fp32")) as run:
        run.model(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
        run.load(tmp_path / "saved")
        assert all(parameter.grad is None for parameter in run.model.parameters())
        assert run.train(3) == losses
        assert_bits(run.outcome(), wanted)


def test_model_alone(tmp_path: Path) -> None:
    """Without an optimizer the weights, moments and step counts come back; the hyperparameters are the caller's."""
    with running(settings(tmp_path / "a", "bf16")) as run:
        run.train(2)
        run.save(tmp_path / "saved")
        wanted = run.outcome()
    with running(settings(tmp_path / "b", "bf16"), seed=3) as run:
        assert tz.load_checkpoint(run.model, None, tmp_path / "saved")["step"] == 2
        found = run.outcome()
        found.losses = wanted.losses
        assert_bits(found, wanted)


def test_frozen_part_may_change_between_runs(tmp_path: Path) -> None:
    """What was trained and is frozen now loads; what has no moments in the checkpoint is refused by name."""

    def model(frozen: bool) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[0].requires_grad_(not frozen)
        return net

    for first, second in ((False, True), (True, False)):
        where = tmp_path / f"saved-{first}"
        one = tz.shard(model(first), settings(tmp_path / "a", "fp32"))
        tz.save_checkpoint(one, None, where)
        wanted = tz.full_state_dict(one)
        tz.close(one)
        other = tz.shard(model(second), settings(tmp_path / "b", "fp32"))
        if second:
            tz.load_checkpoint(other, None, where)
            assert all(torch.equal(value, wanted[name]) for name, value in tz.full_state_dict(other).items())
        else:
            with pytest.raises(tz.CheckpointError, match=r"'0\.weight'"):
                tz.load_checkpoint(other, None, where)
        tz.close(other)


def test_a_model_that_was_wrapped_is_the_same(tmp_path: Path) -> None:
    """Libraries wrap models, under other names. Of what else such a wrapper holds nothing would be saved."""
    (tmp_path / "nvme").mkdir()
    settings, path = config(tmp_path / "nvme"), tmp_path / "saved"
    with running(settings) as run:
        run.train(2)
        run.model = nn.Sequential(run.model)
        run.save(path)
        run.model = run.model[0]
        wanted = run.outcome()
        with pytest.raises(tz.ConfigError, match=r"'1\.weight' is not one of the sharded model"):
            tz.save_checkpoint(nn.Sequential(run.model, nn.Linear(2, 2)), run.optimizer, path)
    for wrap in (nn.Sequential, nn.ModuleDict):
        with running(settings, seed=8) as run:
            given = wrap(run.model) if wrap is nn.Sequential else wrap({"inner": run.model})
            tz.load_checkpoint(given, run.optimizer, path)
            assert_bits(run.outcome(), wanted)
