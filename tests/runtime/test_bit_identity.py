"""Placement, tiles, prefetch, budgets and overlap change no bit of losses, norms, weights or moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierzero.api import running

from ..support.models import net
from ..support.training import (
    Recipe,
    Result,
    assert_identical,
    assert_same_state,
    configured,
    everything_in,
    sharded,
    tight,
    train_sharded,
    whole_state,
)

RECIPE = Recipe(steps=20)
ACCUMULATED = Recipe(steps=20, accumulate=2, clip=0.835)
UNCLIPPED = Recipe(steps=20, clip=None)
THIRDS = {"device": 0.3, "host": 0.3, "nvme": 0.4}


def simplest(nvme: Path, recipe: Recipe) -> Result:
    """All state in host memory, nothing fetched ahead, every update done inside ``step()``."""
    config = configured(nvme, placement=everything_in("host"), tiers={"prefetch": 0}, optimizer={"overlap": "none"})
    return train_sharded(net(), config, recipe)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return simplest(tmp_path_factory.mktemp("nvme"), RECIPE)


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return simplest(tmp_path_factory.mktemp("nvme"), ACCUMULATED)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": everything_in("device"),
    "nvme": everything_in("nvme"),
    "split": everything_in(THIRDS),
    "auto": everything_in("auto"),
    "weights-host": {"params": "host", "optimizer": "nvme", "gradients": "nvme"},
    "weights-nvme": {"params": "nvme", "optimizer": "host", "gradients": "device"},
    "gradients-nvme": {"params": "device", "optimizer": "host", "gradients": "nvme"},
    "gradients-split": {"params": "nvme", "optimizer": "nvme", "gradients": {"host": 0.5, "nvme": 0.5}},
    "optimizer-split": {"params": "host", "optimizer": {"host": 0.4, "nvme": 0.6}, "gradients": "host"},
    "weights-split": {"params": {"device": 0.5, "nvme": 0.5}, "optimizer": "nvme", "gradients": "host"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_changes_no_bit(placement: str, accumulated: Result, tmp_path: Path) -> None:
    config = configured(tmp_path, placement=PLACEMENTS[placement], tiers={"device": "64MiB", "host": "64MiB"})
    assert_identical(train_sharded(net(), config, ACCUMULATED), accumulated, placement)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize(("prefetch", "tile"), [(0, 4096), (1, 6144), (16, 65536)])
def test_prefetch_tile_and_overlap_change_no_bit(
    overlap: str, prefetch: int, tile: int, reference: Result, tmp_path: Path
) -> None:
    config = configured(tmp_path, tiers={"prefetch": prefetch, "tile": tile}, optimizer={"overlap": overlap})
    assert_identical(train_sharded(net(), config, RECIPE), reference)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("placement", ["nvme", "split", "weights-host"])
def test_smallest_budgets_change_no_bit(placement: str, prefetch: int, reference: Result, tmp_path: Path) -> None:
    config = configured(tmp_path, placement=PLACEMENTS[placement], tiers={"prefetch": prefetch})
    assert_identical(train_sharded(net(), tight(net, config), RECIPE), reference, placement)


def test_kept_units_and_recompute_change_no_bit(reference: Result, tmp_path: Path) -> None:
    kept = configured(tmp_path / "kept", sharding={"reshard_after_forward": False})
    again = configured(tmp_path / "again", activations={"recompute": "unit"})
    for config in (kept, again):
        config.tiers.nvme[0].mkdir()
        assert_identical(train_sharded(net(), config, RECIPE), reference)


def test_io_settings_change_no_bit(reference: Result, tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    striped = configured(
        tmp_path,
        tiers={"nvme": [str(drive) for drive in drives]},
        io={"block_size": 4096, "queue_depth": 2, "verify": True},
    )
    assert_identical(train_sharded(net(), striped, RECIPE), reference, "striped")
    buffered = configured(tmp_path / "a", io={"direct": False, "queue_depth": 1})
    assert_identical(train_sharded(net(), buffered, RECIPE), reference, "buffered")


def test_unit_choice_changes_only_what_is_gathered(reference: Result, tmp_path: Path) -> None:
    # Sums of squares are taken per parameter, so even the norm does not depend on the units.
    config = configured(tmp_path)
    assert_identical(train_sharded(net(), config, RECIPE, units=()), reference)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_update_in_the_backward_changes_no_bit(precision: str, tmp_path: Path) -> None:
    runs: list[Result] = []
    for overlap, placement in (
        ("none", "host"),
        ("forward", "nvme"),
        ("backward", "host"),
        ("backward", "nvme"),
        ("backward", THIRDS),
    ):
        config = configured(
            tmp_path,
            train={"precision": precision, "grad_clip": 0},
            placement=everything_in(placement),
            tiers={"device": "64MiB", "host": "64MiB"},
            optimizer={"overlap": overlap},
        )
        runs.append(train_sharded(net(), config, UNCLIPPED))
        assert_identical(runs[-1], runs[0], f"{overlap} {placement}")


@pytest.mark.parametrize("train", [{"precision": "fp32"}, {"precision": "bf16", "grad_dtype": "fp32"}])
def test_other_formats_change_no_bit_between_tiers(train: dict[str, str], tmp_path: Path) -> None:
    runs: list[Result] = []
    for placement in ("host", "nvme", THIRDS):
        config = configured(
            tmp_path, train=train, placement=everything_in(placement), tiers={"device": "64MiB", "host": "64MiB"}
        )
        runs.append(train_sharded(net(), config, Recipe(accumulate=2, adamw=False)))
        assert_identical(runs[-1], runs[0], str(placement))


def test_tied_weights_change_no_bit_between_tiers(tmp_path: Path) -> None:
    runs: list[Result] = []
    for placement in ("host", "nvme"):
        config = configured(tmp_path, placement=everything_in(placement))
        runs.append(train_sharded(net(tied=True), config, RECIPE))
        assert_identical(runs[-1], runs[0], placement)


def test_the_runs_are_worth_comparing(reference: Result, accumulated: Result, tmp_path: Path) -> None:
    """Losses fall, clipping acts on some steps only, another seed gives other bits, groups have several tiles."""
    assert reference.losses[-1] < reference.losses[0]
    for result, recipe in ((reference, RECIPE), (accumulated, ACCUMULATED)):
        assert recipe.clip is not None
        assert min(result.norms) < recipe.clip < max(result.norms)
    model = net(seed=1)
    with sharded(model, configured(tmp_path), RECIPE):
        groups = running(model).groups()
        assert max(len(group.tiles) for group in groups) >= 3
        assert any(len(group.slots) > len(group.tiles) for group in groups)
        other = whole_state(model)
    with pytest.raises(AssertionError, match="differs in"):
        assert_same_state(other, reference.state)
