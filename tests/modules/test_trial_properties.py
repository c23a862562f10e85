"""Whatever a loop does, wherever its state lies, on one rank and two: updates ahead of their step change no bit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tierzero.checkpoint.inspection import verify_checkpoint

from ..support.oracle import assert_bits
from ..support.rank_pool import RankPool
from .test_speculation import STEPS, Loop, train

STEPS_OF = st.sets(st.integers(1, STEPS - 1), max_size=4).map(lambda found: tuple(sorted(found)))
LOOPS = st.builds(
    Loop,
    clips=STEPS_OF,
    spoiled=STEPS_OF,
    rates=STEPS_OF,
    backwards=st.integers(1, 3),
    more=STEPS_OF,
    read=STEPS_OF,
    evaluated=STEPS_OF,
    saved=st.sets(st.integers(1, STEPS - 1), max_size=1).map(tuple),
    groups=st.booleans(),
    waits=st.booleans(),
)
TIER = st.sampled_from(["host", "nvme", {"host": 0.5, "nvme": 0.5}])


@dataclass(frozen=True)
class Setting:
    params: Any
    optimizer: Any
    gradients: Any
    precision: str
    tile: int
    prefetch: int
    host: str
    stage: int
    moments: str

    def sections(self) -> dict[str, Any]:
        kept = {"params": self.params if self.stage == 3 else "host"}
        kept["gradients"] = self.gradients if self.stage >= 2 else "host"
        return {
            "train": {"precision": self.precision},
            "placement": kept | {"optimizer": self.optimizer},
            "tiers": {"tile": self.tile, "prefetch": self.prefetch, "host": self.host},
            "sharding": {"stage": self.stage},
            "optimizer": {"state_dtype": self.moments},
        }


SETTINGS = st.builds(
    Setting,
    params=TIER,
    optimizer=TIER,
    gradients=TIER,
    precision=st.sampled_from(["bf16", "fp32"]),
    tile=st.sampled_from([4096, 8192, 65536]),
    prefetch=st.sampled_from([0, 1, 4]),
    host=st.sampled_from(["3MiB", "64MiB"]),
    stage=st.sampled_from([1, 2, 3, 3]),
    moments=st.sampled_from(["fp32", "fp32", "bf16", "int8"]),
)
QUIETLY: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    "phases": [Phase.explicit, Phase.generate, Phase.target],
}


def same_bits_on_one_rank(loop: Loop, setting: Setting) -> None:
    sections = setting.sections()
    with tempfile.TemporaryDirectory(dir=".") as nvme:
        wanted, _ = train(0, 1, nvme, "none", loop, sections)
        found, _ = train(0, 1, nvme, "both", loop, sections)
        assert_bits(found, wanted)
        for step in loop.saved:
            verify_checkpoint(Path(nvme) / f"both-{step}")


@settings(max_examples=6, **QUIETLY)
@given(loop=LOOPS, setting=SETTINGS)
def test_no_loop_and_no_placement_changes_a_bit(loop: Loop, setting: Setting) -> None:
    same_bits_on_one_rank(loop, setting)


@pytest.mark.long
@settings(max_examples=300, **QUIETLY)
@given(loop=LOOPS, setting=SETTINGS)
def test_many_loops(loop: Loop, setting: Setting) -> None:
    same_bits_on_one_rank(loop, setting)


def same_bits_on_two_ranks(ranks: RankPool, loop: Loop, setting: Setting) -> None:
    with tempfile.TemporaryDirectory(dir=".") as nvme:
        every = [ranks.run(train, nvme, overlap, loop, setting.sections()) for overlap in ("none", "both")]
        for (wanted, _), (found, _) in zip(*every, strict=True):
            assert_bits(found, wanted)


@settings(max_examples=2, **QUIETLY)
@given(loop=LOOPS, setting=SETTINGS)
def test_two_ranks(two_ranks: RankPool, loop: Loop, setting: Setting) -> None:
    same_bits_on_two_ranks(two_ranks, loop, setting)


@pytest.mark.long
@settings(max_examples=100, **QUIETLY)
@given(loop=LOOPS, setting=SETTINGS)
def test_many_loops_on_two_ranks(two_ranks: RankPool, loop: Loop, setting: Setting) -> None:
    same_bits_on_two_ranks(two_ranks, loop, setting)
