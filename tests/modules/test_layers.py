"""Layers of PyTorch whose weights its C++ reads by itself, or whose gradients are not dense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from ..support.compared import assert_alike, gradients, trained
from ..support.zoo import DIM, VOCAB, generator, tokens

X = torch.randn(3, 6, DIM, generator=generator(1, 1))
PADDING = torch.arange(6) >= torch.tensor([6, 4, 3])[:, None]


def evaluated(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Without gradients, where the fast paths are taken, with them, and the gradients after training mode."""
    model.eval()
    with torch.no_grad():
        found = [model(*args, **kwargs)]
    with torch.inference_mode():
        found.append(model(*args, **kwargs).clone())
    found.append(model(*args, **kwargs).detach())
    model.train()
    model(*args, **kwargs).square().mean().backward()
    return [values.masked_fill(PADDING[..., None], 0) for values in found] + gradients(model)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "units", [(nn.TransformerEncoderLayer,), (nn.MultiheadAttention,), (nn.Linear, nn.LayerNorm), ()], ids=str
)
def test_encoder_with_and_without_padding(units: tuple[type[nn.Module], ...], tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        return evaluated(model, X) + evaluated(model, X, src_key_padding_mask=PADDING)

    assert_alike(encoder, act, tmp_path, "nvme", units)


class Attending(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(DIM, 4, batch_first=True, **options), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("options", [{}, {"kdim": DIM, "vdim": DIM}, {"add_bias_kv": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("units", ["attention", "attention.out_proj", "last"])
def test_attention(options: dict[str, Any], units: str, tmp_path: Path) -> None:
    assert_alike(lambda: Attending(**options), lambda model: evaluated(model, X), tmp_path, "nvme", (units,))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(DIM, DIM), kind(DIM, 16, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell.flatten_parameters()
        out: torch.Tensor = self.cell(self.first(x))[0]
        return out


CELLS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm both ways": (nn.LSTM, {"bidirectional": True}),
    "lstm projected": (nn.LSTM, {"proj_size": 8}),
    "gru with dropout": (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
    "rnn without bias": (nn.RNN, {"bias": False}),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("units", ["cell", "first"])
def test_recurrent_layers(name: str, units: str, tmp_path: Path) -> None:
    kind, options = CELLS[name]

    def act(model: nn.Module) -> list[torch.Tensor]:
        found = trained(model, lambda model, step: model(X + step).square().mean())
        model.eval()
        packed = pack_padded_sequence(X, [6, 4, 3], batch_first=True)
        with torch.inference_mode():
            return [*found, model(X).clone(), model.cell(packed)[0].data.clone()]

    assert_alike(lambda: Recurrent(kind, options), act, tmp_path, "nvme", (units,))


class Looked(nn.Module):
    """Rows of a table, then a bilinear layer."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.mix = table, nn.Bilinear(DIM, DIM, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(ids)
        return self.mix(found, torch.tanh(found))


TABLES: dict[str, Callable[[], nn.Module]] = {
    "bag": lambda: nn.EmbeddingBag(VOCAB, DIM, mode="max"),
    "sparse bag": lambda: nn.EmbeddingBag(VOCAB, DIM, mode="sum", sparse=True),
    "sparse": lambda: nn.Embedding(VOCAB, DIM, sparse=True),
    "by frequency": lambda: nn.Embedding(VOCAB, DIM, padding_idx=3, scale_grad_by_freq=True),
}


@pytest.mark.parametrize("table", TABLES)
def test_tables(table: str, tmp_path: Path) -> None:
    """Two backwards of different rows: sparse gradients accumulate."""

    def act(model: nn.Module) -> list[torch.Tensor]:
        for step in range(2):
            model(tokens(step, 0)).square().mean().backward()
        return gradients(model)

    assert_alike(lambda: Looked(TABLES[table]()), act, tmp_path, "nvme", ("table", "mix"))
