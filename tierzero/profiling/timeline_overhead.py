"""What recording costs: the same steps of one model with and without it, in turns, so that what else the machine does
meets both alike."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tierzero as tz
from tierzero.models import bundled_model
from tierzero.records.reading import mean, number, read_run
from tierzero.runtime.spans import Kind
from tierzero.runtime.timeline import Timeline

_SPANS = 20_000


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step, medians; ``ratio`` is the median over the rounds of with / without, and ``cpu_ratio`` that of
    the processor time, which neighbours on the machine disturb less.
    """

    without_s: float
    with_s: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float
    spans: float
    """A step's."""
    span_s: float
    """What one takes, alone."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        return [
            f"without  {1e3 * self.without_s:.2f} ms a step",
            f"with     {1e3 * self.with_s:.2f} ms a step, {self.spans:.0f} spans",
            f"ratio    {self.ratio:.4f} (quarters of the rounds: below {self.low:.4f}, above {self.high:.4f})",
            f"cpu      {self.cpu_ratio:.4f}",
            f"a span   {1e6 * self.span_s:.2f} µs",
        ]


def measure(config: tz.Config, rounds: int, steps: int, say: Callable[[str], None] = lambda text: None) -> Overhead:
    """``rounds`` times ``steps`` steps without and as many with a record, in either order in turn. The first step of
    each is left out of its median.
    """
    stepping = _steps(config)
    times: dict[bool, list[float]] = {False: [], True: []}
    ratios, of_cpu = [], []
    with tempfile.TemporaryDirectory(prefix="tierzero-overhead-") as name:
        model = next(stepping)
        assert isinstance(model, torch.nn.Module)
        try:
            for _ in range(4):
                next(stepping)
            for number_of_round in range(rounds):
                wall, cpu = {}, {}
                for recorded in (False, True) if number_of_round % 2 else (True, False):
                    with tz.record(model, name) if recorded else nullcontext():
                        wall[recorded], cpu[recorded] = _timed(stepping, steps)
                    times[recorded] += wall[recorded]
                ratios.append(median(wall[True]) / median(wall[False]))
                of_cpu.append(median(cpu[True]) / median(cpu[False]))
                say(f"round {number_of_round + 1}/{rounds}: {ratios[-1]:.4f}")
        finally:
            tz.close(model)
        lines = read_run(Path(name)).ranks[0].steps.values()
        spans = mean(number(line, "spans") or 0.0 for line in lines)
    quarter = len(ratios) // 4
    ratios.sort()
    return Overhead(
        median(times[False]),
        median(times[True]),
        median(ratios),
        ratios[quarter],
        ratios[-1 - quarter],
        median(of_cpu),
        spans,
        span_seconds(),
    )


def _steps(config: tz.Config) -> Iterator[object]:
    """The model first, then a step with each `next`."""
    train = config.train
    torch.manual_seed(train.seed)
    with torch.device("meta"), tz.empty_init():
        model = bundled_model(config)
    tz.shard(model, config)
    yield model
    optimizer = tz.AdamW(model.parameters(), lr=config.optimizer.lr)
    ids = torch.randint(config.model.vocab, (train.batch_size, train.seq_len + 1))
    while True:
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        if config.optimizer.overlap != "backward":
            tz.clip_grad_norm_(model, train.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def _timed(stepping: Iterator[object], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step but the first, of the clock and of all threads' processor time."""
    wall, cpu = [], []
    for _ in range(steps):
        began = time.perf_counter(), time.process_time()
        next(stepping)
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    return wall[1:], cpu[1:]


def span_seconds() -> float:
    """What one span takes on this machine, with its page empty and not full."""
    timeline = Timeline(_SPANS)
    timeline.start(lambda step: None)
    began = time.perf_counter()
    for _ in range(_SPANS):
        with timeline.span(Kind.PAGE_IN, 1, 0, 2, 3):
            pass
    took = time.perf_counter() - began
    timeline.stop()
    return took / _SPANS
