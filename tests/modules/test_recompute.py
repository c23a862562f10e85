"""Activation recomputation, both of PyTorch's ways and TierZero's own: same bits on every tier, less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import tierzero as tz

from ..support.oracle import TIERS, Case, Outcome, assert_bits, assert_close, config, train_plain, train_sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, regression

MODES = ("reentrant", "non-reentrant")
RECOMPUTE = ("unit", "sqrt", 2, 100)


class Heavy(nn.Module):
    """A block whose activations are much larger than its input, with dropout and a count of its forwards."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 16 * DIM)
        self.down = nn.Linear(16 * DIM, DIM).requires_grad_(not frozen)
        self.drop = nn.Dropout(0.2)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Checkpointed(nn.Module):
    def __init__(self, mode: str = "none", frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Heavy(frozen) for _ in range(5))
        self.last = nn.Linear(DIM, DIM)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.mode == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                found: torch.Tensor = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
                x = found
        return self.last(x)


def case(mode: str, frozen: bool = False, loss: Callable[..., torch.Tensor] = regression, steps: int = 10) -> Case:
    return Case(lambda: Checkpointed(mode, frozen), loss, (Heavy,), steps=steps, clip=0.5)


def settings(nvme: Path, params: str, optimizer: str, **sections: dict[str, Any]) -> tz.Config:
    placement = {"params": params, "optimizer": optimizer, "gradients": optimizer}
    return config(nvme, placement=placement, **sections)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Without recomputation, all state in host memory."""
    outcome = train_sharded(case("none"), config(tmp_path_factory.mktemp("nvme"), "host"))
    assert_close(outcome, train_plain(case("none")))
    return outcome


@pytest.mark.parametrize(
    ("mode", "params", "optimizer"),
    [
        pytest.param(mode, params, optimizer, marks=pytest.mark.long if (params == optimizer) == index else ())
        for index, mode in enumerate(MODES)
        for params in TIERS
        for optimizer in TIERS
    ],
)
def test_checkpointed_units_change_no_bit(
    mode: str, params: str, optimizer: str, wanted: Outcome, tmp_path: Path
) -> None:
    assert_bits(train_sharded(case(mode), settings(tmp_path, params, optimizer)), wanted)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recompute_by_configuration_changes_no_bit(
    recompute: str | int, tier: str, wanted: Outcome, tmp_path: Path
) -> None:
    found = train_sharded(case("none"), config(tmp_path, tier, activations={"recompute": recompute}))
    assert_bits(found, wanted)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("recompute", ["unit", 2])
@pytest.mark.parametrize("mode", MODES)
def test_both_kinds_of_recomputation_together(
    mode: str, recompute: str | int, tier: str, wanted: Outcome, tmp_path: Path
) -> None:
    found = train_sharded(case(mode), config(tmp_path, tier, activations={"recompute": recompute}))
    assert_bits(found, wanted)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("mode", MODES)
def test_with_frozen_weights_and_accumulation(mode: str, tier: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        for micro in range(2):
            regression(model, 100 * step + micro, rank).backward()
        return regression(model, step, rank)

    plain = train_sharded(case("none", frozen=True, loss=loss, steps=5), config(tmp_path, tier))
    assert_bits(train_sharded(case(mode, frozen=True, loss=loss, steps=5), config(tmp_path, tier)), plain)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", [*MODES, "unit", "sqrt", 2])
def test_activations_are_not_kept(how: str, tier: str, tmp_path: Path) -> None:
    """Recomputing keeps a fraction of the bytes between forward and backward, and runs each block once more."""
    bytes_kept, forwards = {}, {}
    for mode in ("none", how):
        model = Checkpointed(mode if mode in MODES else "none")
        options = {} if mode in (*MODES, "none") else {"activations": {"recompute": mode}}
        tz.shard(model, config(tmp_path, tier, **options), units=(Heavy,))
        try:
            bytes_kept[mode] = bytes_alive_after_forward(model)
            forwards[mode] = model.blocks[0].forwards
        finally:
            tz.close(model)
    assert bytes_kept[how] < 0.2 * bytes_kept["none"]
    assert (forwards["none"], forwards[how]) == (1, 2)


def bytes_alive_after_forward(model: nn.Module) -> int:
    """Of tensors that autograd keeps, counted when they are saved and gone; the whole step is run."""
    alive: dict[int, int] = {}

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            alive[id(self)] = tensor.nbytes

        def __del__(self) -> None:
            alive.pop(id(self), None)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        loss = model(torch.randn(64, DIM)).square().mean()
    kept = sum(alive.values())
    loss.backward()
    return kept


@pytest.mark.parametrize("recompute", ["unit", 2, 3, "sqrt"])
def test_weights_of_a_segment_are_read_once_for_both(recompute: str | int, tmp_path: Path) -> None:
    """The forward reads all weights, and the backward all but those that are still there."""

    def read_bytes(how: str | int, device: str) -> int:
        model = Checkpointed()
        placement = {"params": "nvme", "optimizer": "host", "gradients": "host"}
        limits = {"device": device, "prefetch": 0}
        sections = {"placement": placement, "activations": {"recompute": how}}
        tz.shard(model, config(tmp_path, tiers={"nvme": [str(tmp_path)], "host": "64MiB"} | limits, **sections))
        optimizer = tz.AdamW(model.parameters(), lr=1e-3)
        try:
            for step in range(3):
                regression(model, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            found: int = tz.stats(model)["nvme_read_bytes"]
            return found
        finally:
            tz.close(model)

    assert read_bytes(recompute, "64MiB") <= read_bytes("none", "64MiB")


@pytest.mark.parametrize(
    ("floor", "recompute"),
    [
        pytest.param(floor, recompute, marks=pytest.mark.long if recompute in others else ())
        for floor, others in ((5000, ("sqrt", 3)), (10**6, ("none", "unit")))
        for recompute in ("none", "unit", "sqrt", 3)
    ],
)
def test_recompute_with_small_units_joined(floor: int, recompute: str | int, wanted: Outcome, tmp_path: Path) -> None:
    """Two blocks in a unit, or everything in the root: what is recomputed are the blocks."""
    sections = {"activations": {"recompute": recompute}, "sharding": {"min_unit": floor}}
    found = train_sharded(case("none"), config(tmp_path, **sections))
    assert_close(found, wanted)
    model = Checkpointed()
    tz.shard(model, config(tmp_path, **sections), units=(Heavy,))
    bytes_alive_after_forward(model)
    assert model.blocks[0].forwards == (1 if recompute == "none" else 2)
    tz.close(model)


def checkpointed_ranks(rank: int, size: int, nvme: str) -> None:
    reference = train_sharded(case("none"), config(Path(nvme), "host"), rank, size)
    assert_close(reference, train_plain(case("none"), size), tolerance=5e-5)
    for mode in MODES:
        for params, optimizer in (("nvme", "host"), ("nvme", "nvme")):
            assert_bits(train_sharded(case(mode), settings(Path(nvme), params, optimizer), rank, size), reference)
    for recompute in ("unit", 2):
        by_config = config(Path(nvme), "nvme", activations={"recompute": recompute})
        assert_bits(train_sharded(case("none"), by_config, rank, size), reference)


def test_recompute_on_two_ranks_changes_no_bit(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(checkpointed_ranks, str(tmp_path))


class Reused(nn.Module):
    """Blocks called in ``order``, each under reentrant checkpointing: a gradient arrives for every use."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.order:
            found: torch.Tensor = checkpoint(self.blocks[index], x, use_reentrant=True)
            x = found
        return self.last(x)


def two_forwards(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return regression(model, 100 * step, rank) + regression(model, 100 * step + 1, rank)


REUSED = {
    "first": Case(lambda: Reused((0, 0, 1)), regression, ("blocks.*",), clip=0.5),
    "last": Case(lambda: Reused((0, 1, 1)), regression, ("blocks.*",), clip=0.5),
    "two forwards": Case(lambda: Reused((0, 1)), two_forwards, ("blocks.*",), clip=0.5),
}


def reused_on_ranks(rank: int, size: int, name: str, nvme: str) -> None:
    wanted = train_plain(REUSED[name], size)
    for stage in range(4):
        for floor in (0, 1000):
            settings = config(Path(nvme), "host", sharding={"stage": stage, "min_unit": floor})
            assert_close(train_sharded(REUSED[name], settings, rank, size), wanted, tolerance=5e-5)


@pytest.mark.parametrize("name", REUSED)
def test_blocks_used_twice_under_reentrant_checkpointing(name: str, two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(reused_on_ranks, name, str(tmp_path))
    assert_close(train_sharded(REUSED[name], config(tmp_path)), train_plain(REUSED[name]))


class SelfAttention(nn.Module):
    """One tensor in three places of a unit's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[None]
        return self.last(x + self.attention(x, x, value=x)[0])[0]


@pytest.mark.parametrize("recompute", ["unit", "sqrt", 2])
def test_what_was_one_argument_is_one_again(recompute: str | int, tmp_path: Path) -> None:
    given = Case(SelfAttention, regression, (nn.MultiheadAttention,), eps=1e-4)
    found = train_sharded(given, config(tmp_path, activations={"recompute": recompute}))
    assert_close(found, train_plain(given))


class Sectioned(nn.Module):
    """Checkpoints several units in one go; the last of each section unpacks its weight before its input, as a layer
    without bias does, and with that input all the section is run again.
    """

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM, bias=False)) for _ in range(8)
        )

    def section(self, x: torch.Tensor, start: int) -> torch.Tensor:
        for block in self.blocks[start : start + 4]:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in (0, 4):
            x = checkpoint(self.section, x, start, use_reentrant=False) if self.recomputed else self.section(x, start)
        return x


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_weight_in_a_node_that_waits_for_recomputation_stays(prefetch: int, tier: str, tmp_path: Path) -> None:
    limits = {"nvme": [str(tmp_path)], "tile": 4096, "prefetch": prefetch, "device": "64MiB", "host": "64MiB"}
    found = []
    for recomputed in (False, True):
        sections = Case(lambda recomputed=recomputed: Sectioned(recomputed), regression, ("blocks.*",), steps=6)
        found.append(train_sharded(sections, config(tmp_path, tier, tiers=limits)))
    assert_bits(found[1], found[0])


def sections_as_rank(rank: int, size: int, nvme: str) -> None:
    found = []
    for recomputed in (False, True):
        sections = Case(lambda recomputed=recomputed: Sectioned(recomputed), regression, ("blocks.*",), steps=6)
        found.append(train_sharded(sections, config(Path(nvme), "host"), rank, size))
    assert_bits(found[1], found[0])


def test_a_weight_in_a_node_that_waits_stays_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(sections_as_rank, str(tmp_path))


class Sharer(nn.Module):
    """Uses a weight of the unit around it beside its own."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        self.around = (around,)
        self.own = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(torch.tanh(F.linear(torch.tanh(x), self.around[0].shared.weight))))


class Around(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.first, self.shared = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(Sharer(self) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.mode == "none" else checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return x


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("mode", "recompute"), [*[(mode, "none") for mode in MODES], *[("none", k) for k in RECOMPUTE]]
)
def test_a_recomputed_unit_finds_the_units_around_it_in_use(
    mode: str, recompute: str | int, tier: str, tmp_path: Path
) -> None:
    def square(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(step))  # as many rows as the weight has
        return model(x).square().mean()

    def trained(mode: str, **sections: Any) -> Outcome:
        return train_sharded(Case(lambda: Around(mode), square, (Sharer,), steps=4), config(tmp_path, tier, **sections))

    assert_bits(trained(mode, activations={"recompute": recompute}), trained("none"))


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation, self.layer = nn.ReLU(inplace=True), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.activation(x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Activated() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("recompute", ["unit", 2])
def test_a_block_that_changes_its_input_is_refused(recompute: str | int, tmp_path: Path) -> None:
    """Its gradients might be wrong, and nobody would know."""
    model = tz.shard(InPlace(), config(tmp_path, activations={"recompute": recompute}), units=(Activated,))
    try:
        with pytest.raises(RuntimeError, match="an input of a unit was changed in place"):
            model(torch.randn(4, DIM))
    finally:
        tz.close(model)


class SavesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Saving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SavesItsOutput() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("recompute", ["none", "unit", 2])
def test_a_forward_without_backward_is_forgotten(recompute: str | int, tmp_path: Path) -> None:
    """A saved output (tanh's) must not keep its own graph."""

    model = tz.shard(Saving(), config(tmp_path, activations={"recompute": recompute}), units=(SavesItsOutput,))
    try:
        for _ in range(3):
            y = model(torch.randn(64, DIM))
            storage = StorageWeakRef(y.untyped_storage())
            del y
            assert storage.expired()
    finally:
        tz.close(model)
