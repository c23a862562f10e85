"""Models built empty and filled unit by unit: by their own reset_parameters, by a function, from safetensors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tierzero as tz
from tierzero.runtime.fill import check_fillable

from ..support.oracle import (
    TIERS,
    Case,
    assert_close,
    built,
    config,
    hyper,
    record_state,
    sharded,
    take_steps,
    train_plain,
)
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Attention, Block, Normed, Stack, Tied, language, vectors


def filled(module: nn.Module) -> None:
    """A hand-written init, as ``nn.Module.apply`` would call it."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.constant_(module.bias, 0.25)
    if isinstance(module, nn.LayerNorm):
        nn.init.constant_(module.weight, 1.5)
        nn.init.zeros_(module.bias)


def empty(build: Callable[[], nn.Module]) -> nn.Module:
    with tz.empty_init():
        model = build()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


@pytest.mark.parametrize("tier", TIERS)
def test_own_reset_parameters(tier: str, tmp_path: Path) -> None:
    """Each module draws what its constructor would have drawn: same spread, zeros and ones where they belong."""
    wanted = Stack()
    with sharded(empty(Stack), config(tmp_path, tier), (Block,)) as model:
        state = tz.full_state_dict(model)
        for name, parameter in wanted.named_parameters():
            assert state[name].shape == parameter.shape
            if "norm" in name:
                assert torch.equal(state[name], parameter), name
            else:
                assert 0.5 < state[name].std() / parameter.std() < 2, name
        assert not torch.equal(state["blocks.0.up.weight"], state["blocks.1.up.weight"])


@pytest.mark.parametrize("tier", TIERS)
def test_function(tier: str, tmp_path: Path) -> None:
    with sharded(empty(Stack), config(tmp_path, tier), (Block,), init=filled) as model:
        state = tz.full_state_dict(model)
        for name, values in state.items():
            if name.endswith("norm.weight"):
                assert bool((values == 1.5).all()), name
            elif name.endswith("norm.bias"):
                assert bool((values == 0).all()), name
            elif name.endswith("bias"):
                assert bool((values == 0.25).all()), name
            else:
                assert 0.015 < values.std().item() < 0.025, name


def test_same_seed_same_model(tmp_path: Path) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        with sharded(empty(Stack), config(tmp_path), (Block,), init=filled) as model:
            states.append(tz.full_state_dict(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_safetensors_folder(tier: str, several: bool, tmp_path: Path) -> None:
    """A tied weight stands in the folder once; buffers come along; training goes on from these values."""
    case = Case(lambda: Tied(False), language, (Block, "embed"))
    source = built(case, seed=0)
    tensors = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    names = list(tensors)
    parts = [names[:3], names[3:]] if several else [names]
    folder = tmp_path / "weights"
    folder.mkdir()
    for index, part in enumerate(parts):
        save_file({name: tensors[name] for name in part}, folder / f"part-{index}.safetensors")
    with sharded(empty(case.build), config(tmp_path, tier), case.units, init=folder) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(case))
        outcome = take_steps(case, model, optimizer, 0, 1)
        record_state(model, outcome)
    assert_close(outcome, train_plain(case))


def test_safetensors_bring_buffers(tmp_path: Path) -> None:
    source = Normed()
    for step in range(3):
        source(vectors(step, 0))
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(source.state_dict(), folder / "model.safetensors")
    with sharded(empty(Normed), config(tmp_path), (nn.Linear,), init=str(folder)) as model:
        assert torch.equal(model.eval()(vectors(9, 0)), source.eval()(vectors(9, 0)))


def damage(folder: Path, how: str) -> None:
    tensors = {name: value.clone() for name, value in Stack().state_dict().items()}
    if how == "a missing tensor":
        del tensors["blocks.1.up.bias"]
    if how == "another shape":
        tensors["blocks.1.up.bias"] = torch.zeros(3)
    if how != "no file":
        save_file(tensors, folder / "model.safetensors")
    if how == "a cut file":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    if how == "no safetensors file":
        (folder / "model.safetensors").write_bytes(b"PK\x03\x04 something else")


@pytest.mark.parametrize("how", ["a missing tensor", "another shape", "no file", "a cut file", "no safetensors file"])
def test_bad_folders_are_refused_before_anything_is_allocated(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    damage(folder, how)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    named = r"blocks\.1\.up\.bias" if how in ("a missing tensor", "another shape") else "weights"
    with pytest.raises(tz.ConfigError, match=named):
        tz.shard(empty(Stack), config(nvme), units=(Block,), init=folder)
    assert list(nvme.iterdir()) == []


def test_module_without_reset_parameters_is_named(tmp_path: Path) -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    with pytest.raises(tz.ConfigError, match=r"'1' \(Gain\).*'gain'.*reset_parameters"):
        tz.shard(empty(lambda: nn.Sequential(nn.Linear(3, 3), Gain())), config(tmp_path))


def test_pytorchs_own_attention_resets_itself(tmp_path: Path) -> None:
    with sharded(empty(Attention), config(tmp_path), ("last",)) as model:
        assert torch.isfinite(model(vectors(0, 0))).all()
        assert tz.full_state_dict(model)["attention.in_proj_weight"].std() > 0.1


PEAK = """
import resource, sys, torch
import tierzero as tz
from torch import nn
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with tz.empty_init():
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
config = tz.Config.from_dict({"train": {"precision": "bf16"}, "tiers": {"nvme": [sys.argv[1]], "device": "96MiB",
    "host": "96MiB"}, "placement": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}})
tz.shard(nn.Sequential(nn.Linear(8, 8)), config)
torch.zeros(1 << 20).normal_().sum()
before = peak()
tz.shard(model, config, units=(nn.Linear,))
print((peak() - before) * 1024)
tz.close(model)
"""


def test_filling_takes_the_memory_of_a_unit_not_of_the_model(tmp_path: Path) -> None:
    """384 MiB of fp32 values pass through: 16 MiB at a time beside the budgets."""
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 250 << 20


def empty_on_ranks(rank: int, size: int, nvme: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)  # ranks draw different values; rank 0's count
    with sharded(empty(Stack), config(Path(nvme)), (Block,)) as model:
        return tz.full_state_dict(model)


def test_ranks_start_from_the_same_values(tmp_path: Path, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(empty_on_ranks, str(tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(0)
    with sharded(empty(Stack), config(tmp_path), (Block,)) as model:
        alone = tz.full_state_dict(model)
    assert all(torch.equal(first[name], alone[name]) for name in first)


def test_init_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    def only_norms(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    def empty() -> nn.Module:
        with tz.empty_init():
            return Stack()

    for model, init, message in (
        (empty(), 3, "init: 3 is a int"),
        (Stack(), only_norms, "the model has its values already"),
        (empty(), only_norms, r"parameter 'first.weight' was given no values"),
    ):
        with pytest.raises(tz.ConfigError, match=message):
            tz.shard(model, config(tmp_path), (Block,), init=init)
    with pytest.raises(tz.ConfigError, match=r"units: 3 is a int"):
        tz.shard(Stack(), config(tmp_path), [3])  # type: ignore[list-item]


class Gains(nn.Module):
    """Two gains that only the module around them knows the first values of."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Gains.Gain() for _ in range(2))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.parts[1](self.parts[0](x)))


def from_the_outside(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 1.0)
        nn.init.constant_(module.bias, 1.0)
    if isinstance(module, Gains):
        for index, part in enumerate(module.parts):
            nn.init.constant_(part.gain, 2.0 + index)
        nn.init.constant_(module.linear.bias, 4.0)  # over what the linear layer gave itself


@pytest.mark.parametrize("units", [("parts.*", "linear"), ("linear",)])
def test_function_reaches_into_modules_of_other_units(units: tuple[str, ...], tmp_path: Path) -> None:
    wanted = Gains().apply(from_the_outside).state_dict()
    with sharded(empty(Gains), config(tmp_path), units, init=from_the_outside) as model:
        state = tz.full_state_dict(model)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


class Parent(nn.Module):
    """Initialises what is inside of it, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def test_values_from_outside_a_module_are_not_lost_in_silence(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match=r"parameter 'layers\.0\.weight' \(and 1 more\) .* pass init=fn"):
        check_fillable(empty(Parent), None)
    assert torch.equal(torch.get_rng_state(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fillable(empty(Parent), lambda module: None)
        for build in (Stack, Attention, Normed):
            check_fillable(empty(build), None)


@pytest.mark.parametrize("assign", [True, False])
def test_weights_loaded_into_an_empty_model_are_not_lost_in_silence(assign: bool) -> None:
    values = Stack().state_dict()
    with pytest.raises(tz.ConfigError, match=r"inside tierzero\.empty_init.*init=<folder"), tz.empty_init():
        Stack().load_state_dict(values, assign=assign)
    Stack().load_state_dict(values, assign=assign)


class Marked(nn.Parameter):
    pass


class Labelled(nn.Linear):
    """Parameters with attributes, a class and hooks of their own, made before and after they are registered."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.no_decay = True
        self.weight.register_hook(lambda gradient: gradient * 3)
        gain = Marked(torch.ones(4))
        gain.no_decay = False
        gain.register_hook(lambda gradient: gradient * 5)
        self.gain = gain

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "gain"):
            nn.init.ones_(self.gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@pytest.mark.parametrize("how", ["built", "reset", "function", "folder"])
def test_parameters_stay_the_objects_that_they_are(how: str, tmp_path: Path) -> None:
    if how == "folder":
        (tmp_path / "weights").mkdir()
        save_file(Labelled().state_dict(), tmp_path / "weights" / "model.safetensors")
    init = {"function": ones, "folder": tmp_path / "weights"}.get(how)
    model = Labelled() if how == "built" else empty(Labelled)
    with sharded(model, config(tmp_path), init=init):
        assert (model.weight.no_decay, model.gain.no_decay) == (True, False)
        model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(tz.read_state(model.weight, "gradient"), torch.full((4, 4), 6.0))
        with tz.gathered(model.parameters()):
            out = model.weight.detach().sum(1) + model.bias.detach()
            assert isinstance(model.gain, Marked)
        torch.testing.assert_close(tz.read_state(model.gain, "gradient"), 10 * out)
