"""The example loops of other libraries on two ranks train as one unsharded process on the data of both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..integrations.examples import example, unsharded
from ..support.rank_pool import RankPool

STEPS = 5


def as_rank(rank: int, size: int, loop: str, folder: str) -> list[float]:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # as torchrun sets it, by which Fabric knows it
    try:
        found: list[float] = example(loop).train(folder, STEPS, "fp32")
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"]
    return found


@pytest.mark.parametrize(
    ("loop", "library"),
    [
        ("accelerate_loop", "accelerate"),
        pytest.param("plain_loop", "torch", marks=pytest.mark.long),
        pytest.param("fabric_loop", "lightning_fabric", marks=pytest.mark.long),
    ],
)
def test_two_ranks_train_as_one_unsharded(loop: str, library: str, tmp_path: Path, two_ranks: RankPool) -> None:
    pytest.importorskip(library)
    ranks = two_ranks.run(as_rank, loop, str(tmp_path))
    mean = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
    assert ranks[0] != ranks[1]
    assert mean == pytest.approx(unsharded(STEPS, ranks=2), rel=1e-5)
