"""Systems side by side: each in a process of its own, in alternating rounds, quoted as medians and as ratios to plain
PyTorch."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tierzero.config import Config
from tierzero.errors import ConfigError, TierZeroError
from tierzero.profiling.systems import Workload

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 256, "layers": 4, "heads": 4, "vocab": 4096},
    "125m": {"dim": 768, "layers": 12, "heads": 12, "vocab": 25600},
    "350m": {"dim": 1024, "layers": 24, "heads": 16, "vocab": 25600},
    "1.3b": {"dim": 2048, "layers": 24, "heads": 16, "vocab": 25600},
    "3b": {"dim": 2688, "layers": 34, "heads": 21, "vocab": 25600},
}
_ALL = ("params", "optimizer", "gradients")


def _placed(params: str, optimizer: str, gradients: str) -> dict[str, Any]:
    return {"placement": dict(zip(_ALL, (params, optimizer, gradients), strict=True))}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "fsdp2": ("fsdp2", {}),
    "deepspeed-nvme": ("deepspeed", {}),
    "tierzero-host": ("tierzero", _placed("host", "host", "host")),
    "tierzero-optimizer-nvme": ("tierzero", _placed("host", "nvme", "host")),
    "tierzero-nvme": ("tierzero", _placed("nvme", "nvme", "host")),
    "tierzero-nvme-forward": ("tierzero", _placed("nvme", "nvme", "host") | {"optimizer": {"overlap": "forward"}}),
    "tierzero-nvme-gradients": ("tierzero", _placed("nvme", "nvme", "nvme")),
}
"""What can be compared: the system and its configuration. In ``tierzero-nvme`` gradients stay on the host, where bf16
takes 2 bytes per parameter."""
BESIDE_IO = "plain-beside-io"
"""Plain PyTorch beside a process that moves as many bytes per step on the drive as a run from NVMe measured with it."""
COMPARED = (*VARIANTS, BESIDE_IO)


@dataclass(frozen=True)
class Row:
    """One system's medians over all rounds."""

    name: str
    parameters: int
    step_s: float
    tokens_per_s: float
    peak_rss: int
    disk_bytes_per_parameter: float
    last_loss: float
    waiting_s: float


def run_once(work: Workload) -> dict[str, Any]:
    """Measures one system in a fresh process. Raises TierZeroError with the end of what it printed when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tierzero.profiling.systems", json.dumps(asdict(work))],
        capture_output=True,
        text=True,
        env=environment(),
    )
    if done.returncode != 0:
        raise TierZeroError(
            f"{work.system} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
        )
    outcome: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return outcome


def environment() -> dict[str, str]:
    """Of a measured process."""
    return {**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}


def parse_settings(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``section.key=value`` assignments, as `tierzero train --set` takes them, as sections. Raises ConfigError."""
    given: dict[str, dict[str, Any]] = Config.from_dict({}).override(assignments).given()
    return given


def as_variant(work: Workload, name: str) -> Workload:
    """``work`` for one of `VARIANTS`; its own configuration goes over the variant's, key by key."""
    system, config = VARIANTS[name]
    merged = {key: {**config.get(key, {}), **work.config.get(key, {})} for key in {*config, *work.config}}
    return replace(work, system=system, config=merged)


def bytes_from(work: Workload, names: Sequence[str]) -> str | None:
    """The variant whose bytes per step `BESIDE_IO` moves; None where that is not measured. Raises ConfigError where
    it cannot be.
    """
    if BESIDE_IO not in names:
        return None
    if work.warmup < 2:
        raise ConfigError(f"{BESIDE_IO} finds its rate in two steps: --warmup {work.warmup} must be at least 2")
    for name in names:
        if name != BESIDE_IO and _on_nvme(as_variant(work, name)):
            return name
    raise ConfigError(
        f"{BESIDE_IO} moves as many bytes per step as a run from NVMe: name such a system too, as tierzero-nvme"
    )


def _on_nvme(work: Workload) -> bool:
    return work.system == "tierzero" and "nvme" in work.config.get("placement", {}).values()


def compare(work: Workload, names: Sequence[str], rounds: int, progress: Any = None) -> list[Row]:
    """Runs every named one of `COMPARED` ``rounds`` times, in turn; `BESIDE_IO` last, for which the others are
    measured first. Raises ConfigError, TierZeroError.
    """
    example = bytes_from(work, names)
    outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in sorted(outcomes, key=lambda name: name == BESIDE_IO):
            if progress is not None:
                progress(f"round {number + 1}/{rounds}: {name}")
            if name == BESIDE_IO and example is not None:
                outcomes[name].append(run_once(_beside(work, example, outcomes[example][-1])))
            else:
                outcomes[name].append(run_once(as_variant(work, name)))
    return [_row(name, work, results) for name, results in outcomes.items()]


def _beside(work: Workload, name: str, outcome: dict[str, Any]) -> Workload:
    """Plain PyTorch beside the bytes per step of ``name``."""
    nbytes = int(statistics.median(_moved(work, outcome)))
    if not nbytes:
        raise TierZeroError(f"{BESIDE_IO}: {name} moved no bytes on a drive; give a folder on one with --nvme")
    return replace(as_variant(work, "plain"), beside=nbytes)


def _moved(work: Workload, outcome: dict[str, Any]) -> list[int]:
    """Bytes of each step after the warm-up, reads and writes together."""
    counted = slice(work.warmup, None)
    return [
        read + written
        for read, written in zip(outcome["disk_read"][counted], outcome["disk_write"][counted], strict=True)
    ]


def _row(name: str, work: Workload, results: list[dict[str, Any]]) -> Row:
    counted = slice(work.warmup, None)
    step = statistics.median(value for result in results for value in result["step_s"][counted])
    moved = [nbytes for result in results for nbytes in _moved(work, result)]
    parameters = int(results[0]["parameters"])
    waits = [sum(stall.values()) for result in results for stall in result["stall_s"][counted]]
    return Row(
        name,
        parameters,
        step,
        work.accumulate * work.batch * work.seq_len / step,
        int(statistics.median(result["peak_rss"] for result in results)),
        statistics.median(moved) / parameters,
        float(results[0]["loss"][-1]),
        statistics.median(waits) if waits else 0.0,
    )


def bound(row: Row, compute_s: float, disk_rate: float) -> float:
    """The least time a step can take that computes for ``compute_s`` and moves the row's bytes at ``disk_rate`` bytes
    per second, both at once.
    """
    return max(compute_s, row.disk_bytes_per_parameter * row.parameters / disk_rate)


def table(rows: Sequence[Row], disk_rate: float) -> str:
    """The rows as Markdown, with ratios to the first, whose step stands for the computing, and to the bound."""
    base = rows[0]
    ratio = f"/ {base.name}"
    titles = ["system", "step s", ratio, "/ bound", "tokens/s", "peak RSS GB", ratio]
    titles += ["disk B/param/step", "waiting s", "loss"]
    lines = [markdown_row(titles), markdown_row(["---"] * len(titles))]
    for row in rows:
        cells = (
            row.name,
            f"{row.step_s:.2f}",
            f"{row.step_s / base.step_s:.2f}",
            f"{row.step_s / bound(row, base.step_s, disk_rate):.2f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.peak_rss / 1e9:.2f}",
            f"{row.peak_rss / base.peak_rss:.2f}",
            f"{row.disk_bytes_per_parameter:.1f}",
            f"{row.waiting_s:.2f}",
            f"{row.last_loss:.5f}",
        )
        lines.append(markdown_row(cells))
    return "\n".join(lines)


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
