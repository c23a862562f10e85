"""The same values over all axes: ranks, tiers of weights and of optimizer state, prefetch, tiles, accumulation."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz
from tierzero.api import running
from tierzero.runtime.state import slot_of

from ..support.cases import CASES
from ..support.oracle import (
    TIERS,
    Case,
    Outcome,
    assert_bits,
    assert_close,
    built,
    config,
    hyper,
    record_state,
    sharded,
    train_plain,
    train_sharded,
)
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, VOCAB, Adapted, Block, Lora, Stack, language, regression, tokens

NAMES = ("tied", "odd", "borrower", "mixture", "branching", "lora", "wide", "unused", "one-block", "reparametrized")


def several(case: Case, micros: int) -> Case:
    """Each step's loss in ``micros`` parts, on data of their own."""

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        steps = [4 * (100 * step + micro) + step % 4 for micro in range(micros)]
        parts = [case.loss(model, each, rank) / micros for each in steps[1:]]
        if slot_of(next(model.parameters())) is not None:
            for part in parts:
                part.backward()
            parts = [part.detach() for part in parts]
        return case.loss(model, step, rank) / micros + sum(parts)

    return Case(case.build, loss, case.units, max(10, case.steps), max(case.eps, 1e-6), case.clip)


def settings(nvme: Path, params: str, optimizer: str, prefetch: int, tile: int) -> tz.Config:
    placement = {"params": params, "optimizer": optimizer, "gradients": optimizer}
    limits = {"nvme": [str(nvme)], "device": "64MiB", "host": "256MiB", "prefetch": prefetch, "tile": tile}
    return config(nvme, placement=placement, tiers=limits)


ALL = tuple(product(("device", "host", "nvme"), TIERS, (0, 1, 8), (4096, 1 << 20)))
DIAGONAL = (ALL[0], ALL[-1])


def on_all_axes(rank: int, size: int, name: str, micros: int, axes: Any, nvme: str) -> None:
    case = several(CASES[name], micros)
    found = [train_sharded(case, settings(Path(nvme), *chosen), rank, size) for chosen in axes]
    assert_close(found[0], train_plain(case, size), tolerance=5e-5)
    for other in found[1:]:
        assert_bits(other, found[0])


@pytest.mark.long
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_on_one_rank(name: str, micros: int, tmp_path: Path) -> None:
    on_all_axes(0, 1, name, micros, ALL, str(tmp_path))


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "reparametrized"])
def test_on_several_ranks(name: str, micros: int, ranks: RankPool, tmp_path: Path) -> None:
    """101 rows of a tied weight, and parameters smaller than the number of ranks, among them."""
    if name == "mixture" and ranks.size > 2:
        pytest.skip("rank 2 and up do as rank 1")
    for axes in (ALL[::7], ALL[3::11]):
        ranks.run(on_all_axes, name, micros, axes, str(tmp_path))


def test_thin_diagonal(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(on_all_axes, "unused", 3, DIAGONAL, str(tmp_path))
    on_all_axes(0, 1, "lora", 3, DIAGONAL, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", ["many", "wide"])
def test_every_parameter_moves_in_twenty_steps(name: str, tmp_path: Path) -> None:
    case = Case(CASES[name].build, CASES[name].loss, CASES[name].units, 20, 1e-6)
    start = built(case).state_dict()
    found = [train_sharded(case, settings(tmp_path, tier, tier, 1, 4096)) for tier in TIERS]
    assert_bits(found[1], found[0])
    rows = tokens(0, 0).unique() * 29 if name == "wide" else None
    for key, weight in found[0].weights.items():
        moved = weight != start[key]
        assert bool((moved[rows] if key == "embed.weight" else moved).any()), key


def in_splits(model: nn.Module, optimizer: torch.optim.Optimizer, splits: tuple[int, ...]) -> Iterator[float]:
    """Steps over 12 rows each, in as many backwards as ``splits`` says of each step."""
    sharded_one = not isinstance(optimizer, torch.optim.AdamW)
    for step, parts in enumerate(splits):
        x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(step))
        for rows in x.chunk(parts):
            (F.mse_loss(model(rows), torch.sin(3 * rows)) * len(rows) / 12).backward()
        clip = tz.clip_grad_norm_ if sharded_one else lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most)
        yield clip(model, 0.3).item()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tier", TIERS)
def test_one_batch_in_any_number_of_backwards(tier: str, tmp_path: Path) -> None:
    """From the first step on, and where the number changes; the optimizer's kernel runs once a step."""
    case = Case(Stack, regression, (Block,), eps=1e-6)
    plain = built(case)
    wanted = Outcome(norms=list(in_splits(plain, torch.optim.AdamW(plain.parameters(), **hyper(case)), (1,) * 5)))
    for splits in ((1,) * 5, (3,) * 5, (4,) * 5, (12,) * 5, (1, 12, 3, 1, 4)):
        # No updates on trial: they are the kernel's work too.
        settings = config(tmp_path, tier, optimizer={"overlap": "forward"})
        with sharded(built(case), settings, case.units) as model:
            found = Outcome(norms=list(in_splits(model, tz.AdamW(model.parameters(), **hyper(case)), splits)))
            record_state(model, found)
            assert running(model).updater.updated == 5 * sum(parameter.numel() for parameter in model.parameters())
        wanted.weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        wanted.updates, wanted.moments = dict.fromkeys(wanted.weights, 5), dict.fromkeys(wanted.weights)
        assert_close(found, wanted, tolerance=2e-5)


class Rechecked(nn.Module):
    """Adapted layers behind a frozen table, each under PyTorch's checkpointing; without ``adapted`` all is trained."""

    def __init__(self, reentrant: bool, adapted: bool, input_needs_grad: bool) -> None:
        super().__init__()
        self.reentrant, self.input_needs_grad = reentrant, input_needs_grad
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(not adapted)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.layers.requires_grad_(True)
        for layer in self.layers:
            layer.base.requires_grad_(not adapted)
        self.head = nn.Linear(DIM, VOCAB).requires_grad_(not adapted)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.input_needs_grad:
            x = x.requires_grad_() if x.is_leaf else x
        elif self.embed.weight.requires_grad:
            x = x.detach()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def rechecked(reentrant: bool, adapted: bool, needs: bool, micros: int) -> Case:
    case = Case(lambda: Rechecked(reentrant, adapted, needs), language, (Adapted, "embed", "head"), steps=4)
    return several(case, micros)


RECHECKED = [(r, a, n, m) for r, a, n, m in product((False, True), (False, True), (False, True), (1, 3)) if n or not r]
"""Without a gradient of its input a reentrant checkpoint computes none, in PyTorch as here."""


def rechecked_on_ranks(rank: int, size: int, which: Any, nvme: str) -> None:
    for tier in TIERS:
        case = rechecked(*which)
        assert_close(train_sharded(case, config(Path(nvme), tier), rank, size), train_plain(case, size), tolerance=5e-5)


@pytest.mark.parametrize("which", [w if w[-1] == 3 else pytest.param(w, marks=pytest.mark.long) for w in RECHECKED])
def test_recomputation_of_frozen_and_trained_parts(which: Any, tmp_path: Path) -> None:
    rechecked_on_ranks(0, 1, which, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("which", RECHECKED, ids=str)
def test_recomputation_of_frozen_and_trained_parts_on_ranks(which: Any, two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(rechecked_on_ranks, which, str(tmp_path))


def test_memory_is_flat_where_the_first_units_have_no_gradient(tmp_path: Path) -> None:
    """After every micro-batch every parameter is away, and no step takes more than the second."""
    with sharded(Lora(), config(tmp_path), (Adapted, "embed", "head")) as model:
        optimizer, peaks = tz.AdamW(model.parameters(), lr=1e-2), []
        for step in range(6):
            for micro in range(2):
                language(model, 2 * step + micro, 0).backward()
                assert [slot.name for slot in running(model).slots() if not slot.is_away] == []
            optimizer.step()
            optimizer.zero_grad()
            peaks.append((running(model).pools["arena"].peak, running(model).pools["buckets"].peak))
        assert peaks[2:] == peaks[1:2] * 4


@pytest.mark.parametrize("name", ["branching", "skipping", "tied-functional"])
def test_changing_order_is_no_news(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        train_sharded(CASES[name], config(tmp_path, tiers={"prefetch": 8}))
    assert len(caplog.records) <= 1


def test_a_group_of_frozen_parameters_stays_a_group(tmp_path: Path) -> None:
    """With a rate and a schedule of its own, as scripts count groups."""

    def steps(model: nn.Module, kind: Callable[..., torch.optim.Optimizer]) -> list[list[float]]:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = kind([{"params": frozen, "lr": 1e-1}, {"params": trained}, {"params": []}], lr=1e-2, eps=1e-6)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0, lambda s: 0.9**s, lambda s: 0.5])
        rates = []
        for step in range(4):
            language(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            optimizer.param_groups[1]["initial_lr"] = 2e-2 if step == 1 else optimizer.param_groups[1]["initial_lr"]
            rates.append([group["lr"] for group in optimizer.param_groups])
        return rates

    case = Case(Lora, language)
    plain = built(case)
    wanted = steps(plain, torch.optim.AdamW)
    with sharded(built(case), config(tmp_path), (Adapted, "embed", "head")) as model:
        assert steps(model, tz.AdamW) == wanted
        for name, value in tz.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)
