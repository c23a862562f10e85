"""Unmodified models of the transformers library train, sharded, as they do unsharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierzero.sharding.units import find_units

from ..support.hf_models import MODELS
from ..support.oracle import (
    TIERS,
    Outcome,
    assert_bits,
    assert_close,
    config,
    train_plain,
    train_plain_bf16,
    train_sharded,
)
from ..support.rank_pool import RankPool

pytest.importorskip("transformers")

PRECISIONS = ("fp32", "bf16")


def compare(name: str, tier: str, precision: str, nvme: Path, rank: int = 0, ranks: int = 1) -> None:
    """fp32 against ``torch.optim.AdamW`` and a clipped norm, to rounding; bf16 against the same arithmetic without
    sharding, to the last bit.
    """
    case = MODELS[name].case(clip=1.0 if precision == "fp32" else None)
    # Units this small would be joined to one.
    settings = config(nvme, tier, train={"precision": precision}, sharding={"min_unit": 0})
    found = train_sharded(case, settings, rank, ranks)
    if precision == "fp32":
        assert_close(found, train_plain(case, ranks))
    else:
        assert_bits(found, train_plain_bf16(case, ranks))
    assert_learnt(found)


def assert_learnt(found: Outcome) -> None:
    """Frozen tables apart (Whisper's positions) everything was updated, in every step."""
    assert {count for name, count in found.updates.items() if "embed_positions" not in name} == {len(found.losses)}
    assert len(set(found.losses)) > 1


def diagonal() -> list[tuple[str, str, str]]:
    """Every model once, over all tiers and precisions."""
    cells = [(tier, precision) for tier in TIERS for precision in PRECISIONS]
    return [(name, *cells[index % len(cells)]) for index, name in enumerate(MODELS)]


@pytest.mark.parametrize(("name", "tier", "precision"), diagonal())
def test_every_model(name: str, tier: str, precision: str, tmp_path: Path) -> None:
    compare(name, tier, precision, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_from_every_tier(name: str, tier: str, precision: str, tmp_path: Path) -> None:
    if (name, tier, precision) not in diagonal():
        compare(name, tier, precision, tmp_path)


def compare_as_rank(rank: int, size: int, name: str, tier: str, precision: str, nvme: str) -> None:
    compare(name, tier, precision, Path(nvme), rank, size)


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_with_different_data(
    name: str, tier: str, precision: str, tmp_path: Path, two_ranks: RankPool
) -> None:
    two_ranks.run(compare_as_rank, name, tier, precision, str(tmp_path))


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_found(name: str) -> None:
    """Both stacks of an encoder-decoder, without being told; the rest is the root."""
    kind = MODELS[name]
    with torch.device("meta"):
        model = kind.empty()
    blocks = [where for where, module in model.named_modules() if type(module).__name__ in kind.blocks]
    assert len(blocks) == 2 * len(kind.blocks) * (2 if name == "t5" else 1)
    assert [unit.title for unit in find_units(model, None, 0)] == ["(root)", *blocks]
