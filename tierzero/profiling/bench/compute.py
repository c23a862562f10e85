"""What forward and backward are made of: matrix products, fused attention and elementwise work, by data type."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from tierzero.profiling.bench.timing import Progress, Spread, rate, together

ROWS = (64, 256, 1024, 4096)
WIDTHS = (512, 1536, 4096)
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_HEAD = 64
_LENGTHS = (64, 256, 1024)
_CYCLE = 64 << 20
"""Bytes of different tensors that are worked on in turn: in training each comes from memory, and goes there."""
_SENSIBLE = 0.25
"""Of the rate of fp32: a type that a CPU multiplies slower than this is not for training there."""
_SHORT_S = 3.0
_DRAWN = 1 << 20


@dataclass(frozen=True)
class MatmulFigure:
    """Operations per second of ``rows`` through an MLP from width/2 to 2 ``width`` and back, and of its backward."""

    rows: int
    width: int
    flops: Spread


@dataclass(frozen=True)
class DtypeFigures:
    matmul: tuple[MatmulFigure, ...]
    attention: dict[int, Spread]
    """Operations per second by length of the sequence."""
    pointwise: dict[str, tuple[float, Spread]]
    """Bytes of one call, and bytes per second, by operation."""
    operations: Spread
    """Per second, each on a tensor so small that it costs nothing but its start."""

    @property
    def pointwise_bytes(self) -> Spread:
        return together(self.pointwise.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "matmul": [{"rows": f.rows, "width": f.width, "flops_per_s": f.flops.as_json()} for f in self.matmul],
            "attention": [{"seq_len": s, "flops_per_s": spread.as_json()} for s, spread in self.attention.items()],
            "small_operations_per_s": self.operations.as_json(),
            "pointwise": [{"op": op, "bytes_per_s": spread.as_json()} for op, (_, spread) in self.pointwise.items()],
        }


@dataclass(frozen=True)
class ComputeReport:
    device: str
    threads: int
    by_dtype: dict[str, DtypeFigures]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        by_dtype = {dtype: figures.as_json() for dtype, figures in self.by_dtype.items()}
        return {"device": self.device, "threads": self.threads, "by_dtype": by_dtype}


@dataclass(frozen=True)
class _Where:
    """The device and type to compute in. ``seconds``: for all of it."""

    device: torch.device
    dtype: torch.dtype
    seconds: float
    rng: torch.Generator

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def drawn(self, *shape: int) -> torch.Tensor:
        """Normal numbers; large tensors repeat a million of them, for drawing takes longer than what is measured."""
        numel = math.prod(shape)
        few = torch.randn(min(numel, _DRAWN), generator=self.rng, device=self.device).to(self.dtype)
        return few.repeat(-(-numel // few.numel()))[:numel].view(shape)

    def many(self, *shape: int) -> Iterator[torch.Tensor]:
        """Different ones again and again."""
        count = max(1, _CYCLE // (math.prod(shape) * self.dtype.itemsize))
        return itertools.cycle(self.drawn(count, *shape).unbind())

    def rate(self, work: Callable[[], object], amount: float, seconds: float) -> Spread:
        return rate(work, amount, seconds, self.finish)


def measure(
    device: torch.device,
    seconds: float,
    progress: Progress,
    rows: Sequence[int] = ROWS,
    widths: Sequence[int] = WIDTHS,
) -> ComputeReport:
    """With PyTorch's threads as they are set now, or on a GPU, within about ``seconds``."""
    rng = torch.Generator(device).manual_seed(0)
    notes: list[str] = []
    names = list(DTYPES)
    if device.type == "cpu" and not _fp16_is_sensible(rng):
        names.remove("fp16")
        notes.append("compute: fp16 is left out: this CPU multiplies it at less than a quarter of fp32's rate")
    found = {}
    for number, name in enumerate(names):

        def shown(what: str, done: float, number: int = number, name: str = name) -> None:
            progress(f"{name} {what}", (number + done) / len(names))

        where = _Where(device, DTYPES[name], seconds / len(names), rng)
        found[name], left_out = _figures(where, rows, widths, shown)
        if left_out:
            notes.append(
                f"compute: {len(left_out)} of the larger {name} products were left out for want of time; give more "
                "--seconds"
            )
    return ComputeReport(str(device), torch.get_num_threads(), found, tuple(notes))


def _fp16_is_sensible(rng: torch.Generator) -> bool:
    rates = []
    for dtype in (torch.float16, torch.float32):
        where = _Where(torch.device("cpu"), dtype, 0.0, rng)
        x, weight = where.drawn(128, 512), where.drawn(512, 512)
        rates.append(rate(lambda x=x, weight=weight: F.linear(x, weight), 1.0, 0.05).high)  # type: ignore[misc]
    return rates[0] >= _SENSIBLE * rates[1]


def _figures(
    where: _Where, rows: Sequence[int], widths: Sequence[int], progress: Progress
) -> tuple[DtypeFigures, list[tuple[int, int]]]:
    progress("products", 0.0)
    matmul, left_out = _products(replace(where, seconds=0.6 * where.seconds), rows, widths, progress)
    progress("attention", 0.6)
    attention = {length: _attention(where, length, 0.2 / len(_LENGTHS) * where.seconds) for length in _LENGTHS}
    progress("elementwise", 0.8)
    elementwise = _elementwise(where, 0.17 * where.seconds)
    return DtypeFigures(tuple(matmul), attention, elementwise, _operations(where, 0.03 * where.seconds)), left_out


def _products(
    where: _Where, rows: Sequence[int], widths: Sequence[int], progress: Progress
) -> tuple[list[MatmulFigure], list[tuple[int, int]]]:
    """The smallest first; what the time no longer allows is left out."""
    sizes = sorted(((r, w) for r in rows for w in widths), key=lambda size: size[0] * size[1] ** 2)
    found: list[MatmulFigure] = []
    left_out = []
    started = time.perf_counter()
    for number, (r, w) in enumerate(sizes):
        progress(f"{r} x {w}", 0.6 * number / len(sizes))
        left = where.seconds - (time.perf_counter() - started)
        # Six products, each called three times at least, at the best rate so far.
        needed = 18 * 2.0 * r * w**2 / max(figure.flops.high for figure in found) if found else 0.0
        if needed > max(left, 0.2 * where.seconds):
            left_out.append((r, w))
            continue
        found.append(MatmulFigure(r, w, _mlp_products(where, r, w, max(left, 0.0) / (len(sizes) - number))))
    return found, left_out


def _mlp_products(where: _Where, rows: int, width: int, seconds: float) -> Spread:
    flops, small, large = 2.0 * rows * width**2, width // 2, 2 * width
    narrow, wide = where.many(rows, small), where.many(rows, large)
    up, down = where.many(large, small), where.many(small, large)
    ways = (
        lambda: F.linear(next(narrow), next(up)),
        lambda: F.linear(next(wide), next(down)),
        lambda: next(narrow).mm(next(down)),
        lambda: next(wide).mm(next(up)),
        lambda: next(narrow).t().mm(next(wide)),
        lambda: next(wide).t().mm(next(narrow)),
    )
    return together((flops, where.rate(_kept(way), flops, seconds / len(ways))) for way in ways)


def _kept(way: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """``way``, whose last results stay, so that the next one is written to other memory."""
    first = way()
    results = deque([first], max(1, _CYCLE // first.nbytes))
    return lambda: results.append(way())


def _attention(where: _Where, length: int, seconds: float) -> Spread:
    """Forward and backward of fused causal attention, counted as if it were not causal."""
    tokens, heads = (1024, 4) if seconds < _SHORT_S / 10 else (4096, 12)
    batch = max(1, tokens // length)
    query, key, value = (where.drawn(batch, heads, length, _HEAD).requires_grad_() for _ in range(3))
    grad = where.drawn(batch, heads, length, _HEAD)

    def both() -> None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(mixed, (query, key, value), grad)

    return where.rate(both, 3.5 * 4.0 * batch * heads * length**2 * _HEAD, seconds)


def _elementwise(where: _Where, seconds: float) -> dict[str, tuple[float, Spread]]:
    """Bytes of inputs and outputs, on tensors as large as activations are."""
    nbytes = (256 << 20) if where.device.type == "cuda" else (6 << 20)
    rows = nbytes // where.dtype.itemsize // 1024
    xs, grads, others = where.many(rows, 1024), where.many(rows, 1024), where.many(rows, 1024)
    weight = where.drawn(1024).requires_grad_()
    x = next(xs).requires_grad_()
    activated, normed = F.gelu(x), F.layer_norm(x, (1024,), weight)

    def gelu_backward() -> torch.Tensor:
        return torch.autograd.grad(activated, x, next(grads), retain_graph=True)[0]

    def norm_backward() -> torch.Tensor:
        return torch.autograd.grad(normed, (x, weight), next(grads), retain_graph=True)[0]

    ways: dict[str, tuple[int, Callable[[], torch.Tensor]]] = {
        "gelu forward": (2, lambda: F.gelu(next(xs))),
        "gelu backward": (3, gelu_backward),
        "layer_norm forward": (2, lambda: F.layer_norm(next(xs), (1024,), weight)),
        "layer_norm backward": (3, norm_backward),
        "add": (3, lambda: next(grads) + next(others)),
    }
    return {
        name: (float(tensors * nbytes), where.rate(_kept(way), float(tensors * nbytes), seconds / len(ways)))
        for name, (tensors, way) in ways.items()
    }


def _operations(where: _Where, seconds: float) -> Spread:
    """With the graph that a backward needs, as in training."""
    x = where.drawn(16).requires_grad_()
    return where.rate(lambda: x + x, 1.0, seconds)
