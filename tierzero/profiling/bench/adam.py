"""The Adam kernel by number of threads, on bf16 training state as the update works on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tierzero.optim.formats import state_format
from tierzero.optim.gradient import accumulate
from tierzero.optim.gradient import warm_up as warm_up_gradients
from tierzero.optim.kernel import warm_up
from tierzero.profiling.adam_bench import Tiles, in_shares
from tierzero.profiling.bench.timing import Progress, Spread, rate
from tierzero.tiers.free_memory import available_bytes

BYTES = 14
"""Of a parameter: weight, remainder, two moments, gradient."""
_TILE = 1 << 20
_MOST = 64 << 20
_PER_SECOND = 16 << 20
"""A short run draws less state: drawing takes time too."""
_LARGER_THAN_CACHES = 256 << 20


@dataclass(frozen=True)
class AdamReport:
    """Parameters per second by threads, on state of ``numel`` parameters. ``gradients``: parameters whose gradient is
    taken over from autograd, with the sum of squares, on all cores.
    """

    numel: int
    by_threads: dict[int, Spread]
    gradients: Spread
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"threads": threads, "parameters_per_s": spread.as_json()} for threads, spread in self.by_threads.items()
        ]
        return {
            "parameters": self.numel,
            "bytes_per_parameter": BYTES,
            "rows": rows,
            "gradients_per_s": self.gradients.as_json(),
        }


def thread_counts(cores: int) -> list[int]:
    """The powers of two below ``cores``, and that."""
    counts = [1 << bit for bit in range(cores.bit_length()) if 1 << bit < cores]
    return [*counts, cores]


def measure(cores: int, seconds: float, progress: Progress) -> AdamReport:
    """Rates with 1 to ``cores`` threads within about ``seconds``."""
    counts = thread_counts(cores)
    room = available_bytes() // (4 * BYTES)
    numel = max(1 << 20, min(_MOST, room, int(seconds * _PER_SECOND)))
    tile = max(1 << 14, min(_TILE, numel // (4 * cores)))
    progress("state", 0.0)
    fmt = state_format(torch.bfloat16)
    warm_up(fmt, torch.bfloat16)
    state = Tiles.drawn(numel, tile)
    found = {}
    for number, threads in enumerate(counts):
        progress(f"{threads} threads", number / (len(counts) + 1))
        with ThreadPoolExecutor(threads) as executor:
            run = in_shares(executor, threads, len(state.tiles), state.update)
            found[threads] = rate(run, len(state.tiles) * tile, seconds / (len(counts) + 1))
    progress("gradients", len(counts) / (len(counts) + 1))
    gradients = _gradients(state, cores, seconds / (len(counts) + 1))
    measured = len(state.tiles) * tile
    notes = []
    if measured * BYTES < _LARGER_THAN_CACHES:
        notes.append(
            f"adam: a short run on {measured * BYTES / 1e6:.0f} MB of state, part of which the caches may hold; "
            "give it more --seconds for rates from memory"
        )
    return AdamReport(measured, found, gradients, tuple(notes))


def _gradients(state: Tiles, cores: int, seconds: float) -> Spread:
    """Each tile's is taken over from other memory, as autograd hands it over."""
    with ThreadPoolExecutor(max(1, cores - 1)) as executor:

        def take_over() -> None:
            for weight, *_, gradient in state.tiles:
                accumulate(gradient, weight, overwrite=True, threads=cores, executor=executor)

        warm_up_gradients(torch.bfloat16, torch.bfloat16)
        return rate(take_over, sum(tile[0].numel() for tile in state.tiles), seconds)
