"""The largest model that trains under a cap on memory: sizes in ascending order, each in a capped process."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from tierzero.profiling.compare import SIZES, as_variant, environment
from tierzero.profiling.memory_cap import run_capped
from tierzero.profiling.systems import Workload


@dataclass(frozen=True)
class Attempt:
    """One size under the cap. ``peak`` is the kernel's figure in bytes (None where it gives none), ``problem`` the last
    line of what a failed run said.
    """

    size: str
    trained: bool
    parameters: int = 0
    step_s: float = 0.0
    peak: int | None = None
    disk_bytes_per_parameter: float = 0.0
    losses: tuple[float, ...] = ()
    problem: str = ""


def climb(
    work: Workload, sizes: Sequence[str], variant: str, limit: int, progress: Callable[[str], None]
) -> Iterator[Attempt]:
    """Trains ``sizes`` one after another, until one does not fit into ``limit`` bytes."""
    for size in sizes:
        progress(f"{size} ...")
        attempt = _attempt(size, replace(as_variant(work, variant), **SIZES[size]), limit)  # type: ignore[arg-type]
        yield attempt
        if not attempt.trained:
            return


def _attempt(size: str, work: Workload, limit: int) -> Attempt:
    command = [sys.executable, "-m", "tierzero.profiling.systems", json.dumps(asdict(work))]
    done = run_capped(command, limit, environment())
    if done.returncode != 0 or done.killed:
        said = done.stderr.strip().splitlines()
        why = "killed: out of memory" if done.killed else (said[-1] if said else f"exit code {done.returncode}")
        return Attempt(size, False, peak=done.peak, problem=why)
    outcome = json.loads(done.stdout.strip().splitlines()[-1])
    counted = slice(min(work.warmup, work.steps - 1), None)
    moved = [sum(pair) for pair in zip(outcome["disk_read"][counted], outcome["disk_write"][counted], strict=True)]
    return Attempt(
        size,
        True,
        outcome["parameters"],
        statistics.median(outcome["step_s"][counted]),
        done.peak if done.peak is not None else max(outcome["build_peak_rss"], outcome["peak_rss"]),
        statistics.median(moved) / outcome["parameters"],
        tuple(outcome["loss"]),
    )


def table(attempts: Sequence[Attempt], limit: int) -> str:
    """The attempts as Markdown."""
    lines = ["| size | parameters | cap GiB | peak GiB | step s | disk B/param/step | losses |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for a in attempts:
        peak = f"{a.peak / 2**30:.2f}" if a.peak is not None else "?"
        cap = f"{limit / 2**30:.2f}"
        if a.trained:
            losses = " ".join(f"{loss:.3f}" for loss in a.losses)
            moved = f"{a.disk_bytes_per_parameter:.1f}"
            cells = (f"{a.parameters / 1e6:,.0f} M", cap, peak, f"{a.step_s:.1f}", moved, losses)
        else:
            cells = ("", cap, peak, "", "", a.problem)
        lines.append(f"| {a.size} | {' | '.join(cells)} |")
    return "\n".join(lines)
