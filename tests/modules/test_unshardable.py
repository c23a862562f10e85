"""Parameters that the tiers cannot hold are refused by name before anything is allocated; all others are held as they
are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tierzero as tz

from ..support.oracle import config, sharded
from ..support.zoo import DIM, vectors


class Beside(nn.Module):
    """A layer, and a frozen parameter of any kind beside it."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.odd = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def tied_by_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model[1].weight.data = model[0].weight.data
    return model


def inside_one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    whole = torch.randn(DIM + 1, DIM)
    model[0].weight, model[1].weight = nn.Parameter(whole[1:]), nn.Parameter(whole[:DIM])
    return model


EYE = torch.eye(DIM)
REFUSED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "lazy": ("'0.weight' has no shape yet", lambda: nn.Sequential(nn.LazyLinear(DIM), nn.Linear(DIM, DIM))),
    "complex": ("'0.weight' is torch.complex64", lambda: nn.Sequential(nn.Linear(DIM, DIM, dtype=torch.complex64))),
    "double": ("'0.weight' is torch.float64 and trainable", lambda: nn.Sequential(nn.Linear(DIM, DIM).double())),
    "sparse": (r"'odd' .*torch.sparse_coo", lambda: Beside(EYE.to_sparse())),
    "compressed": (r"'odd' .*torch.sparse_csr", lambda: Beside(EYE.to_sparse_csr())),
    "quantized": (r"'odd' .*quantized", lambda: Beside(torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8))),
    "nested": (r"'odd' .*nested", lambda: Beside(torch.nested.nested_tensor([EYE, EYE[:3]]))),
    "of several tensors": (r"'odd' .*TwoTensor", lambda: Beside(TwoTensor(EYE, EYE))),
    "tied by memory": ("'0.weight' and '1.weight' lie in the same memory", tied_by_memory),
    "overlapping": ("'1.weight' and '0.weight' lie in the same memory", inside_one_memory),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_by_name(what: str, tmp_path: Path) -> None:
    message, build = REFUSED[what]
    with pytest.raises(tz.ConfigError, match=message):
        tz.shard(build(), config(tmp_path), units=(nn.Linear,))
    assert list(tmp_path.iterdir()) == []


NUMBERS = torch.arange(DIM * DIM).reshape(DIM, DIM)
KEPT = {
    "bytes": NUMBERS.to(torch.uint8),
    "booleans": NUMBERS % 3 == 0,
    "large integers": NUMBERS + 2**40,
    "unsigned": NUMBERS.to(torch.uint16),
    "double": NUMBERS.double() / 3,
    "eight bits": EYE.to(torch.float8_e4m3fn),
    "transposed": NUMBERS.float().t(),
    "half of another": torch.randn(2, DIM, DIM)[1],
}


@pytest.mark.parametrize("what", KEPT)
def test_frozen_parameters_of_other_kinds_stay_what_they_are(what: str, tmp_path: Path) -> None:
    with sharded(Beside(KEPT[what].clone()), config(tmp_path), (nn.Linear,)) as model:
        model(vectors(0, 0)).sum().backward()
        found = tz.full_state_dict(model)["odd"]
        assert found.dtype == KEPT[what].dtype
        assert torch.equal(found.double(), KEPT[what].double())
        assert model.odd.is_contiguous()
        assert model.odd.stride() == (DIM, 1)


def test_values_that_lie_side_by_side_are_no_ties(tmp_path: Path) -> None:
    """As the weights of an LSTM on a GPU do, or of a model read from one file."""
    whole = torch.randn(2, DIM, DIM)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model[0].weight, model[1].weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])
    with sharded(model, config(tmp_path), (nn.Linear,)):
        state = tz.full_state_dict(model)
        assert torch.equal(torch.stack([state["0.weight"], state["1.weight"]]), whole)
