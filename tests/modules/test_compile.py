"""Compiled blocks train to the same values. Most tests capture graphs, and what they save for the backward, as always
and run them without generating code (``aot_eager``): then even the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import tierzero as tz
from tierzero.errors import ConfigError
from tierzero.runtime import compiling

from ..support.cases import CASES
from ..support.oracle import (
    Case,
    assert_at_rest,
    assert_bits,
    assert_close,
    built,
    config,
    hyper,
    record_state,
    sharded,
    take_steps,
    train_plain,
    train_sharded,
)
from ..support.rank_pool import RankPool
from ..support.training import tight
from ..support.zoo import DIM, Block, Stack, regression, vectors

NO_BLOCKS = ("batch-norm", "attention-split", "encoder-leaves", "lstm", "lstm-in-root", "odd", "many", "every-leaf")
PACKAGE = Path(tz.__file__).parent
GRAPHS = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def as_tight(case: Case, nvme: Path, **sections: Any) -> tz.Config:
    """All on NVMe with the least memory: what is not in use is overwritten at once, see `sharded`."""
    return tight(case.build, config(nvme, **sections), case.units)


def compiled(settings: tz.Config) -> tz.Config:
    raw: dict[str, Any] = settings.model_dump(by_alias=True, exclude_unset=True)
    raw["train"] = raw["train"] | {"compile": True}
    return tz.Config.from_dict(raw)


def graphs() -> int:
    """How many were compiled; with train.compile one of them is the trial."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", ["lora", "structured"])
def test_compiled_blocks_give_the_same_bits(name: str, tmp_path: Path) -> None:
    settings = as_tight(CASES[name], tmp_path)
    found = train_sharded(CASES[name], compiled(settings), **GRAPHS)
    assert graphs() > 1
    assert_bits(found, train_sharded(CASES[name], settings))


@pytest.mark.long
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", CASES)
def test_all_models(name: str, tier: str, tmp_path: Path) -> None:
    settings = config(tmp_path, tier) if tier == "host" else as_tight(CASES[name], tmp_path)
    if name in NO_BLOCKS:
        with pytest.raises(ConfigError, match="no blocks"):
            train_sharded(CASES[name], compiled(settings), **GRAPHS)
    else:
        found = train_sharded(CASES[name], compiled(settings), **GRAPHS)
        assert_bits(found, train_sharded(CASES[name], settings))


def test_equal_blocks_are_compiled_once(tmp_path: Path) -> None:
    case = Case(lambda: Stack(12), regression, (Block,), steps=4)
    train_sharded(case, compiled(as_tight(case, tmp_path)), **GRAPHS)
    assert graphs() == 1 + 1


class Noisy(nn.Module):
    """Dropout, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Noisy() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.last(x)


NET = Case(Net, regression, (Noisy,), steps=4, clip=0.5)


@pytest.mark.parametrize("recompute", [pytest.param("unit", marks=pytest.mark.long), "sqrt"])
def test_recomputed(recompute: str, tmp_path: Path) -> None:
    settings = as_tight(NET, tmp_path, activations={"recompute": recompute})
    assert_bits(train_sharded(NET, compiled(settings), **GRAPHS), train_sharded(NET, settings))
    assert graphs() == 1 + 1


def test_under_the_users_checkpoint_and_a_bf16_update_in_the_backward(tmp_path: Path) -> None:
    case = Case(Checkpointed, regression, (Noisy,), steps=4)
    train = {"precision": "bf16", "grad_clip": 0}
    settings = as_tight(case, tmp_path, train=train, optimizer={"overlap": "backward"})
    case = Case(Checkpointed, bf16_regression, (Noisy,), steps=4)
    assert_bits(train_sharded(case, compiled(settings), **GRAPHS), train_sharded(case, settings))


def bf16_regression(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    return F.mse_loss(model(x).float(), torch.sin(3 * x))


def evaluated(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Evaluation in every mode between the steps; the last loss under autocast."""
    x = vectors(step, rank)
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(x), x)
    with torch.inference_mode():
        assert F.mse_loss(model(x), x) == loss
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step > 1):
        return loss + F.mse_loss(model(x), torch.sin(3 * x))


def test_evaluation_and_autocast(tmp_path: Path) -> None:
    case = Case(Net, evaluated, (Noisy,), steps=4)
    settings = as_tight(case, tmp_path)
    assert_bits(train_sharded(case, compiled(settings), **GRAPHS), train_sharded(case, settings))


class Crossing(nn.Module):
    """Inside it are units of their own, of which it uses one's weights itself, element by element too."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(self.own(x)) + F.linear(x, self.inner.weight) * self.inner.bias)


def test_a_compiled_block_pages_in_the_weights_of_other_units(tmp_path: Path) -> None:
    case = Case(lambda: nn.Sequential(Crossing(), Crossing()), regression, (Crossing, "?.inner"))
    settings = as_tight(case, tmp_path)
    assert_bits(train_sharded(case, compiled(settings), **GRAPHS), train_sharded(case, settings))


def as_rank(rank: int, size: int, nvme: str, backend: str, stages: tuple[int, ...] = (3,)) -> None:
    case = replace(NET, steps=2)
    for stage in stages:
        tier = "nvme" if stage == 3 else "host"
        settings = config(Path(nvme), tier, sharding={"stage": stage})
        found = train_sharded(case, compiled(settings), rank, size, backend=backend)
        plain = train_sharded(case, settings, rank, size)
        (assert_bits if backend == "aot_eager" else assert_close)(found, plain)


def test_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(as_rank, str(tmp_path), "aot_eager")


def by_method(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def blocks_by_method(model: nn.Module) -> nn.Module:
    for block in model.blocks.children():
        block.compile(backend="aot_eager")
    return model


def blocks_wrapped(model: nn.Module) -> nn.Module:
    for name, block in model.blocks.named_children():
        setattr(model.blocks, name, torch.compile(block, backend="aot_eager"))
    return model


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", [by_method, blocks_by_method, blocks_wrapped, wrapped])
@pytest.mark.parametrize("name", ["borrower", "captured", "tied", "encoder"])
def test_all_that_users_compile(name: str, how: Any, before: bool, tmp_path: Path) -> None:
    as_a_user(CASES[name], how, before, tmp_path)


@pytest.mark.parametrize(("how", "before"), [(blocks_wrapped, True), (by_method, False)])
def test_models_that_the_user_compiles(how: Any, before: bool, tmp_path: Path) -> None:
    as_a_user(CASES["captured"], how, before, tmp_path)


def as_a_user(case: Case, how: Any, before: bool, tmp_path: Path) -> None:
    settings = as_tight(case, tmp_path)
    model = how(built(case)) if before else built(case)
    with sharded(model, settings, case.units):
        run = model if before else how(model)
        found = take_steps(case, run, tz.AdamW(model.parameters(), **hyper(case)), 0, 1)
        record_state(model, found)
        assert_at_rest(model)
    assert graphs()
    for kept in (found.weights, found.moments, found.updates):
        for key in list(kept):
            kept[key.replace("_orig_mod.", "")] = kept.pop(key)  # type: ignore[index]
    assert_close(found, train_plain(case))


def test_a_whole_step_that_the_user_compiles(tmp_path: Path) -> None:
    """Its graphs end at what is TierZero's, and none of that is compiled."""

    @torch.compile(backend="aot_eager")
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + model.first.weight.square().sum()
        loss.backward()
        tz.clip_grad_norm_(model, 0.5)
        optimizer.step()
        model.zero_grad()
        with tz.gathered(model.last.weight):
            return model.last.weight.detach() * 2

    def trained(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with sharded(Net().eval(), settings, (Noisy,)) as model:
            optimizer = tz.AdamW(model.parameters(), lr=1e-2)
            return [run(model, optimizer, vectors(number, 0)) for number in range(3)]

    settings = as_tight(NET, tmp_path)
    found = trained(step)
    traced = [code() for code in torch._dynamo.convert_frame.output_codes.seen]
    assert not [code for code in traced if code is not None and code.co_filename.startswith(str(PACKAGE))]
    for have, want in zip(found, trained(step.__wrapped__), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)


def test_without_blocks_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile: the model has no blocks"):
        tz.shard(nn.Linear(4, 4), config(tmp_path, train={"compile": True}))


def test_without_a_compiler_it_is_refused_before_anything_is_allocated(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model, settings = Stack(), config(tmp_path / "nvme", train={"compile": True})
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "g++"),)})
    with no_compiler, pytest.raises(ConfigError, match=r"does not work here .*set train.compile = false"):
        tz.shard(model, settings, units=(Block,))
    assert not (tmp_path / "nvme").exists()
    assert type(model.first.weight) is nn.Parameter


def test_a_block_that_the_compiler_cannot_do_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel\nin a long report")

    torch._dynamo.register_backend(broken, name="broken")
    monkeypatch.setattr(compiling, "check_compiler", lambda *_: None)
    settings = config(tmp_path, train={"compile": True})
    with sharded(Stack(), settings, (Block,), backend="broken") as model, pytest.raises(ConfigError) as caught:
        model(vectors(0, 0))
    assert "train.compile: 'blocks.0' cannot be compiled" in str(caught.value)
    assert "no such kernel" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_generated_code(tmp_path: Path) -> None:
    case = Case(Net, regression, (Noisy,), steps=3)
    settings = as_tight(case, tmp_path)
    assert_close(train_sharded(case, compiled(settings)), train_plain(case))
    assert graphs() == 1 + 1


@pytest.mark.long
def test_generated_code_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compile the same at once, into an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    ranks = RankPool(2)
    try:
        ranks.run(as_rank, str(tmp_path), "inductor")
    finally:
        ranks.close()


@pytest.mark.long
def test_all_stages_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(as_rank, str(tmp_path), "aot_eager", (3, 2, 1, 0))


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "unit", "sqrt"])
@pytest.mark.parametrize("name", ["encoder", "lora", "tied", "structured", "branching", "mixture", "weight-normed"])
def test_generated_code_of_all_kinds(name: str, recompute: str, tmp_path: Path) -> None:
    settings = as_tight(CASES[name], tmp_path, activations={"recompute": recompute})
    assert_close(train_sharded(CASES[name], compiled(settings)), train_plain(CASES[name]))
