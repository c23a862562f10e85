"""The Adam kernel against other ways to update the same state: rates in parameters per second, in turns."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tierzero.optim.formats import Moments, StateFormat, state_format, store_master
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.kernel import update, warm_up
from tierzero.optim.moments import store_moments
from tierzero.tiers import HostAllocator, page_round

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True, step=3)


@dataclass(frozen=True)
class AdamRate:
    """One way: the median rate in parameters per second, and the median of each round's ratio of ours to it."""

    name: str
    rate: float
    ours_over_it: float


@dataclass
class Tiles:
    """bf16 training state in tiles of ``tile`` elements: of each the weight, the segments of ``fmt``, the gradient."""

    fmt: StateFormat
    tiles: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    _allocator: HostAllocator = field(default_factory=HostAllocator)

    def _take(self, tile: int) -> list[torch.Tensor]:
        """Views of one buffer, as a tile lies in staging memory."""
        arrays = [(part.dtype, part.values(tile)) for part in self.fmt.optimizer]
        arrays = [(torch.bfloat16, tile), *arrays, (torch.bfloat16, tile)]
        sizes = [page_round(count * dtype.itemsize) for dtype, count in arrays]
        parts = self._allocator.allocate(sum(sizes)).split(sizes)
        return [part[: count * dtype.itemsize].view(dtype) for part, (dtype, count) in zip(parts, arrays, strict=True)]

    @classmethod
    def drawn(cls, numel: int, tile: int, moments: Moments = "fp32") -> Tiles:
        generator = torch.Generator().manual_seed(0)
        found = cls(state_format(torch.bfloat16, moments))
        for _ in range(numel // tile):
            weight, *segments, grad = found._take(tile)
            parts = found._by_name(segments)
            store_master(found.fmt, torch.randn(tile, generator=generator), weight, parts)
            m, v = 1e-2 * torch.randn(tile, generator=generator), 1e-4 * torch.rand(tile, generator=generator)
            store_moments(found.fmt, m, v, parts)
            grad.copy_(1e-2 * torch.randn(tile, generator=generator))
            found.tiles.append((weight, *segments, grad))
        return found

    def _by_name(self, segments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {part.name: values for part, values in zip(self.fmt.optimizer, segments, strict=True)}

    def update(self, index: int) -> None:
        """One step of the tile ``index`` by the kernel, on the calling thread."""
        weight, *segments, grad = self.tiles[index]
        update(self.fmt, weight, self._by_name(segments), grad, HYPER, 0.5)


def in_shares(
    executor: ThreadPoolExecutor, threads: int, count: int, call: Callable[[int], object]
) -> Callable[[], object]:
    """All ``count`` tiles, each thread an equal share of them as OpenMP's static schedule would give it."""

    def share(thread: int) -> None:
        for index in range(thread, count, threads):
            call(index)

    return lambda: list(executor.map(share, range(threads)))


def measure(
    *, numel: int, tile: int, threads: int, rounds: int, moments: Moments = "fp32", compiled: Path | None = None
) -> tuple[list[AdamRate], bool | None]:
    """Ours first, with ``moments`` stored so, then the function ``adam`` of the shared library ``compiled``,
    ``torch.optim.AdamW(fused=True)`` on fp32 with the casts that bf16 training needs, and DeepSpeed's where it is
    installed, with and without those.

    Also returns whether the library's results are ours to the bit (None without it).
    """
    ours, same = Tiles.drawn(numel, tile, moments), None
    warm_up(ours.fmt, torch.bfloat16)
    count = numel // tile
    with ThreadPoolExecutor(threads) as executor:
        ways = {"tierzero": in_shares(executor, threads, count, ours.update)}
        if compiled is not None and moments == "fp32":
            theirs = Tiles.drawn(numel, tile)
            call = _from_library(compiled, theirs)
            ways["vectorised C++"] = in_shares(executor, threads, count, call)
            for way in ways.values():
                way()
            same = all(
                torch.equal(a, b)
                for x, y in zip(ours.tiles, theirs.tiles, strict=True)
                for a, b in zip(x, y, strict=True)
            )
        ways["torch fused, with casts"] = _torch_fused(numel, tile, threads)
        for casts in (True, False):
            deepspeed = _deepspeed(numel, casts)
            if deepspeed is not None:
                ways[f"DeepSpeedCPUAdam, {'with' if casts else 'no'} casts"] = deepspeed
        return _rates(ways, count * tile, rounds), same


def _from_library(path: Path, state: Tiles) -> Callable[[int], None]:
    function = ctypes.CDLL(str(path)).adam
    scalars = [ctypes.c_float(value) for value in HYPER.scalars()]

    def call(index: int) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in state.tiles[index]]
        function(*pointers, ctypes.c_long(state.tiles[index][0].numel()), ctypes.c_float(0.5), *scalars)

    return call


def _torch_fused(numel: int, tile: int, threads: int) -> Callable[[], None]:
    torch.set_num_threads(threads)
    masters = [torch.randn(tile, requires_grad=True) for _ in range(numel // tile)]
    weights = [master.detach().bfloat16() for master in masters]
    grads = [torch.randn(tile).bfloat16() for _ in masters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return step


def _deepspeed(numel: int, casts: bool) -> Callable[[], object] | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    master = torch.randn(numel, requires_grad=True)
    master.grad = torch.randn(numel)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    if not casts:
        step: Callable[[], object] = optimizer.step
        return step
    weight, grad = torch.empty(numel, dtype=torch.bfloat16), torch.randn(numel).bfloat16()

    def cast_and_step() -> None:
        master.grad.copy_(grad)  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            weight.copy_(master)

    return cast_and_step


def _rates(ways: dict[str, Callable[[], object]], numel: int, rounds: int) -> list[AdamRate]:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        order: Sequence[str] = list(ways) if number % 2 else list(ways)[::-1]
        for name in order:
            started = time.perf_counter()
            ways[name]()
            if number:  # the first round warms up
                rates[name].append(numel / (time.perf_counter() - started))
    ours = rates["tierzero"]
    return [
        AdamRate(name, statistics.median(found), statistics.median(a / b for a, b in zip(ours, found, strict=True)))
        for name, found in rates.items()
    ]
