"""Small awkward models, each with a loss whose data depends on the step and the rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

DIM = 24
VOCAB = 101


def generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(7919 * step + rank)


def vectors(step: int, rank: int, rows: int = 5, dim: int = DIM) -> torch.Tensor:
    return torch.randn(rows, dim, generator=generator(step, rank))


def tokens(step: int, rank: int, rows: int = 3, length: int = 8, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(vocab, (rows, length), generator=generator(step, rank))


def regression(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Mean square of what the model makes of random vectors, against their shifted sines."""
    x = vectors(step, rank)
    out = model(x)
    assert isinstance(out, torch.Tensor)
    return F.mse_loss(out, torch.sin(3 * x)[:, : out.shape[-1]])


def language(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    ids = tokens(step, rank, length=9)
    logits = model(ids[:, :-1])
    assert isinstance(logits, torch.Tensor)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Block(nn.Module):
    """Residual MLP; odd hidden width."""

    def __init__(self, dim: int = DIM, hidden: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two linear layers; ``order(step-independent)`` is given by subclasses."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Tied(nn.Module):
    """Embedding and head share a weight: one parameter under two names, or by ``F.linear(x, self.embed.weight)``."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.functional = functional
        if not functional:
            self.head = nn.Linear(DIM, VOCAB, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight) if self.functional else self.head(x)


class Scale(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((numel,), 0.8))
        self.power = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Borrower(nn.Module):
    """Uses parameters of a module whose forward is over, elementwise and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Scale(1)
        self.wide = Scale(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.own(x))
        for block in self.blocks:
            x = block(x) * self.own.scale + self.wide.scale
            x = x * self.own.power
        down = self.blocks[0].down
        assert isinstance(down, nn.Linear)
        return x + F.linear(torch.tanh(F.linear(x, down.weight.t())), down.weight, down.bias)


class Captured(nn.Module):
    """Parameters kept in a plain list and in a closure, used where their module's forward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bag = [block.up.weight for block in self.blocks if isinstance(block, Block)]
        bias = self.bag[0]
        self.extra: Callable[[torch.Tensor], torch.Tensor] = lambda x: x + bias.mean(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.extra(x) + torch.stack(self.bag).mean((0, 1))


class Albert(nn.Module):
    """One block applied ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.block = Block()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return self.last(x)


class Routed(Stack):
    """Runs the blocks that the caller names, in that order."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        return self.last(x)


def skipping(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Stochastic depth: every block is left out with probability 0.4, the same on all ranks."""
    keep = torch.rand(3, generator=generator(step, 99)) > 0.4
    x = vectors(step, rank)
    return F.mse_loss(model(x, tuple(index for index in range(3) if keep[index])), torch.sin(x))


def branching(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    return F.mse_loss(model(x, ((0,), (1, 2), (2, 1, 0), (1, 1))[step % 4]), torch.sin(x))


def twice(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Two forwards before one backward."""
    return regression(model, step, rank) + 0.5 * regression(model, step + 1000, rank)


class Structured(nn.Module):
    """Dicts, tuples, None and plain values go in and come out of the model and of its units."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(
            self, state: dict[str, torch.Tensor], bias: tuple[torch.Tensor, None], *, scale: float
        ) -> tuple[dict[str, torch.Tensor], None, str]:
            h = self.block(state["h"]) * scale + bias[0]
            return {"h": h, "count": state["count"] + 1}, None, "done"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Structured.Inner() for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, batch: dict[str, torch.Tensor | None]) -> dict[str, object]:
        h = batch["x"]
        assert isinstance(h, torch.Tensor)
        state = {"h": h, "count": torch.zeros((), dtype=torch.int64)}
        for inner in self.inner:
            state, nothing, _ = inner(state, (h, None), scale=0.9)
            assert nothing is None
        return {"out": self.last(state["h"]), "count": state["count"], "mask": batch["mask"]}


def structured(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    found = model({"x": x, "mask": None})
    assert int(found["count"]) == 2
    assert found["mask"] is None
    return F.mse_loss(found["out"], torch.sin(x))


class Normed(nn.Module):
    """Batch norm: running statistics in fp32 and an int64 counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 31, bias=False), nn.BatchNorm1d(31), nn.Tanh(), nn.Linear(31, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[None]
        return self.last(h + self.attention(h, h, h)[0])[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x[None])[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, 17, num_layers=2, batch_first=True)
        self.gru = nn.GRU(17, 13, batch_first=True)
        self.last = nn.Linear(13, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x[None])
        return self.last(self.gru(hidden)[0])[0]


class Reparametrized(nn.Module):
    """Weights that are computed from others: weight norm, orthogonal, spectral norm (whose buffers every forward
    changes)."""

    def __init__(self, spectral: bool = True) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.spectral = nn.Linear(DIM, DIM)
        if spectral:
            parametrizations.spectral_norm(self.spectral)
        self.orthogonal = parametrizations.orthogonal(nn.Linear(DIM, DIM, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.orthogonal(torch.tanh(self.spectral(torch.tanh(self.normed(x)))))


class Odd(nn.Module):
    """All sizes prime, parameters of no dimensions, of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 29)
        self.down = nn.Linear(29, 13, bias=False)
        self.shift = nn.Parameter(torch.zeros(13))
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.tanh(self.up(x))) * self.gain + self.shift
        return h * self.one + self.none.sum()


class Many(nn.Module):
    """Three hundred tiny modules of three parameters each."""

    def __init__(self, count: int = 300) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(count))
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, gain in zip(self.parts, self.gains, strict=True):
            x = x + 0.01 * gain * part(x)
        return x


class Wide(nn.Module):
    """One parameter larger than every tile, in a unit much larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3001, DIM)
        self.block = Block()
        self.last = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.embed(ids * 29)))


class Unused(Stack):
    """A block and a parameter never get a gradient; another block only on odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        return self.last(self.blocks[1](x) if odd else x)


def unused(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    return F.mse_loss(model(x, odd=bool(step % 2)), torch.sin(x))


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.a = nn.Linear(DIM, 3, bias=False)
        self.b = nn.Linear(3, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class Lora(nn.Module):
    """A frozen embedding, then adapted layers: the first units have nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Experts(nn.Module):
    """Four experts inside one unit; ``chosen`` of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        return x + torch.stack([self.experts[index](x) for index in chosen]).mean(0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x


def routed_by_rank(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Rank 0 uses experts 0 and 1, rank 1 expert 2; nobody ever uses expert 3."""
    x = vectors(step, rank)
    return F.mse_loss(model(x, (0, 1) if rank == 0 else (2,)), torch.sin(x))


def penalized(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """An L2 penalty over all parameters, taken outside the model's forward."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return regression(model, step, rank) + 1e-2 * penalty
