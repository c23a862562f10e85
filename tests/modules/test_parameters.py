"""Parameters from outside: what they tell, what reading gives, and what is refused with the parameter's name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tierzero as tz

from ..support.oracle import TIERS, Case, built, config, hyper, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import Block, Stack, Tied, language, regression, vectors

STACK = Case(Stack, regression, (Block,))
NAME = "blocks.1.up.weight"


@pytest.fixture(params=TIERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[nn.Module]:
    with sharded(built(STACK), config(tmp_path, request.param), STACK.units) as found:
        yield found


@pytest.fixture
def plain() -> nn.Module:
    return built(STACK)


def test_metadata_is_that_of_the_whole_parameter(model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.shape, parameter.dtype, parameter.numel()) == (wanted.shape, wanted.dtype, wanted.numel())
        assert (parameter.ndim, parameter.size(), len(parameter)) == (wanted.ndim, wanted.size(), len(wanted))
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.device == wanted.device
        assert (parameter.stride(), parameter.is_contiguous()) == (wanted.stride(), True)
        assert parameter.grad is None
        assert name in repr(parameter)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert "Linear(in_features=24" in repr(model)
    assert model.get_parameter(NAME) in set(model.parameters())


def test_reading_gives_the_values(model: nn.Module, plain: nn.Module) -> None:
    parameter, wanted = model.get_parameter(NAME), plain.get_parameter(NAME)
    with torch.no_grad():
        assert torch.equal(parameter.clone(), wanted)
        assert torch.equal(parameter[3:5], wanted[3:5])
        assert torch.equal(parameter.float().t() @ parameter, wanted.t() @ wanted)
        assert parameter.sum().item() == wanted.sum().item()
        assert torch.equal(parameters_to_vector(model.parameters()), parameters_to_vector(plain.parameters()))
    assert parameter.tolist() == wanted.tolist()
    assert (parameter.detach().numpy() == wanted.detach().numpy()).all()
    assert model.first.bias[2].item() == plain.first.bias[2].item()
    assert bool((parameter == wanted).all())
    x = vectors(0, 0)
    assert torch.equal(F.linear(x, parameter), F.linear(x, wanted))
    assert torch.equal(parameter.as_subclass(torch.Tensor), wanted)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda p: p.data,
    "data.copy_": lambda p: p.data.copy_(torch.zeros_like(p)),
    "data =": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "add_": lambda p: p.add_(1),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "__setitem__": lambda p: p.__setitem__(0, 1.0),
    "__imul__": lambda p: p.__imul__(2),
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "init.kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p),
    "out=": lambda p: torch.zeros(p.shape, out=p),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "set_": lambda p: p.set_(torch.zeros(p.shape)),
    "_foreach_add_": lambda p: torch._foreach_add_([p], 1.0),
    "vector_to_parameters": lambda p: vector_to_parameters(torch.zeros(p.numel()), [p]),
    "grad =": lambda p: setattr(p, "grad", torch.zeros(p.shape)),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
}


def test_writing_is_refused_with_the_name(model: nn.Module, plain: nn.Module) -> None:
    parameter = model.get_parameter(NAME)
    for what, write in WRITES.items():
        with torch.no_grad(), pytest.raises(tz.NotResidentError, match=r"blocks\.1\.up\.weight"):
            write(parameter)
        assert torch.equal(tz.read_state(parameter, "weight"), plain.get_parameter(NAME)), what


REFUSALS: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a unit": lambda m: copy.deepcopy(m.blocks[1]),
    "pickle": lambda m: torch.save(m, io.BytesIO()),
    "averaged model": lambda m: torch.optim.swa_utils.AveragedModel(m),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "load_state_dict that assigns": lambda m: m.load_state_dict({**m.state_dict()}, assign=True),
    "load_state_dict around it": lambda m: nn.Sequential(m).load_state_dict({}, strict=False, assign=True),
    "meta": lambda m: m.to("meta"),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_whole_models_are_refused_too(what: str, model: nn.Module, plain: nn.Module) -> None:
    with pytest.raises((tz.TierZeroError, RuntimeError), match=r"tierzero\.|tierzero import"):
        REFUSALS[what](model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_copying_while_everything_is_gathered_is_refused(model: nn.Module) -> None:
    """A copy would run the original's forward."""
    with tz.gathered(model.parameters()), pytest.raises(tz.NotResidentError, match=r"tierzero\.shard"):
        copy.deepcopy(model)
    with tz.gathered(model.parameters()), pytest.raises(tz.NotResidentError, match="pickled"):
        pickle.dumps(model)


def test_gradients_are_refused_by_name_and_dropped_by_none(model: nn.Module, plain: nn.Module) -> None:
    regression(plain, 0, 0).backward()
    regression(model, 0, 0).backward()
    parameter = model.get_parameter(NAME)
    with pytest.raises(tz.NotResidentError, match=r"blocks\.1\.up\.weight.*read_state"):
        _ = parameter.grad
    with pytest.raises(tz.NotResidentError, match=r"clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    wanted = plain.get_parameter(NAME).grad
    torch.testing.assert_close(tz.read_state(parameter, "gradient"), wanted)
    parameter.grad = None
    assert parameter.grad is None
    model.blocks[0].zero_grad()
    assert model.blocks[0].up.weight.grad is None
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_dict_holds_full_tensors_of_its_own(model: nn.Module, plain: nn.Module) -> None:
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
    regression(model, 0, 0).backward()
    optimizer.step()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, wanted in plain.state_dict().items():
        assert torch.equal(state[name], wanted), name
        assert torch.equal(loaded[name], wanted), name
    trained = tz.full_state_dict(model)
    assert not torch.equal(trained[NAME], state[NAME])
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    plain.load_state_dict(trained)
    torch.testing.assert_close(plain(vectors(1, 0)), model(vectors(1, 0)), rtol=0, atol=0)


def test_parameters_added_later_are_refused(model: nn.Module) -> None:
    """They would get gradients and no update, and on several ranks not even the same gradients."""
    with pytest.raises(tz.ConfigError, match=r"'adapter\.weight' was added.*before tierzero\.shard"):
        model.adapter = nn.Linear(24, 24)
    with pytest.raises(tz.ConfigError, match=r"'3\.weight' was added"):
        model.blocks.append(nn.Linear(24, 24))
    with pytest.raises(tz.ConfigError, match=r"parameter 'scale' was assigned to a Linear"):
        model.first.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(tz.ConfigError, match=r"parameter 'bias' was assigned"):
        model.first.bias = nn.Parameter(torch.ones(24))
    model.extra, model.again, model.last.weight = nn.Dropout(0.0), model.blocks[0], model.last.weight
    nn.Sequential(model, nn.Linear(24, 24))  # around it anything goes
    assert tz.full_state_dict(model).keys() >= {"first.bias", "again.up.bias"}


def test_parameters_around_the_model_are_refused_where_it_is_asked_alone(model: nn.Module) -> None:
    around = nn.Sequential(model, nn.Linear(24, 24))
    with pytest.raises(tz.ConfigError, match=r"does not belong to a model sharded"):
        tz.AdamW(around.parameters(), lr=1e-3)
    with pytest.raises(tz.ConfigError, match=r"not a parameter of a model sharded"):
        tz.full_state_dict(around)


def test_other_optimizers_are_refused(model: nn.Module) -> None:
    """A torch optimizer would see no gradients and train nothing."""
    regression(model, 0, 0).backward()
    with pytest.raises(tz.NotResidentError, match=r"first\.weight"):
        torch.optim.SGD(model.parameters(), lr=1e-3).step()


def tied_state(rank: int, size: int, nvme: str) -> None:
    wanted = built(Case(lambda: Tied(False), language)).state_dict()
    with sharded(built(Case(lambda: Tied(False), language)), config(Path(nvme)), (Block, "embed")) as model:
        weight = model.embed.weight
        reads: list[Callable[[], Any]] = [
            model.state_dict,
            weight.clone,
            weight.sum,
            lambda: weight + 1,
            lambda: weight[0],
            lambda: torch.stack([weight]),
            lambda: F.linear(torch.zeros(1, 24), weight),
            lambda: weight.tolist(),
            lambda: weight.data,
            lambda: weight.mul_(2),
        ]
        for read in reads:
            with pytest.raises(tz.NotResidentError, match=r"embed\.weight"):
                read()
        found = tz.full_state_dict(model)
        only_first = tz.full_state_dict(model, rank0_only=True)
        assert bool(only_first) == (rank == 0)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert found["head.weight"] is found["embed.weight"]


def test_on_two_ranks_values_are_whole_or_refused(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(tied_state, str(tmp_path))
