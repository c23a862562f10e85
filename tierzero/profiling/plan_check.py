"""Predictions beside measurements: each case is planned, and trained in a process of its own."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierzero.config import Config
from tierzero.planner.machine import Drive, MachineProfile
from tierzero.profiling.bench.requests import OPS, MeasuredFile, Op, Point
from tierzero.profiling.compare import SIZES
from tierzero.profiling.measured_run import measured_run, only_steps

Settings = Mapping[str, Mapping[str, Any]]

_DRIVE_FILE = 1 << 30
_SAMPLE_S = 1.0

_NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "host"}
_HOST = {"params": "host", "optimizer": "host", "gradients": "host"}


def case(size: str, batch: int, seq_len: int, **sections: Any) -> dict[str, dict[str, Any]]:
    """A configuration of the comparison's model of ``size``, its blocks recomputed and updates beside the next forward
    alone, with more ``sections``.
    """
    train = {"batch_size": batch, "seq_len": seq_len, **sections.pop("train", {})}
    base = {"activations": {"recompute": "unit"}, "optimizer": {"overlap": "forward"}}
    return {"model": dict(SIZES[size]), "train": train, **base, **sections}


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "host": case("125m", 4, 256, placement=_HOST),
    "host, no recompute": case("125m", 8, 256, placement=_HOST, activations={"recompute": "none"}),
    "host, 256 tokens": case("125m", 4, 64, placement=_HOST),
    "host, 4096 tokens": case("125m", 16, 256, placement=_HOST),
    "nvme, 256 tokens": case("125m", 4, 64, placement=_NVME),
    "nvme, 1024 tokens": case("125m", 4, 256, placement=_NVME),
    "nvme, 4096 tokens": case("125m", 16, 256, placement=_NVME),
    "nvme, 4 micro-batches": case("125m", 16, 256, placement=_NVME, train={"micro_batch": 4}),
    "nvme, 1 GB": case("125m", 4, 256, placement=_NVME, tiers={"host": "1GB"}),
    "auto, 1 GB": case("125m", 4, 256, tiers={"host": "1GB"}),
    "auto, 500 MB": case("125m", 4, 256, tiers={"host": "500MB"}),
    "gradients on nvme": case("125m", 4, 256, placement={**_NVME, "gradients": "nvme"}),
    "overlap none": case("125m", 4, 256, placement=_NVME, optimizer={"overlap": "none"}),
    "overlap backward": case(
        "125m", 4, 256, placement=_NVME, optimizer={"overlap": "backward"}, train={"grad_clip": 0}
    ),
    "overlap both": case("125m", 4, 256, placement=_NVME, optimizer={"overlap": "both"}),
    "overlap both, 1 GB": case("125m", 4, 256, placement=_NVME, optimizer={"overlap": "both"}, tiers={"host": "1GB"}),
    "350m nvme": case("350m", 4, 256, placement=_NVME),
}
"""Configurations that different things bound."""


@dataclass(frozen=True)
class Trained:
    """Medians over the steps that count. Bytes: at most, of every tier as the pools count, and beyond ``baseline`` of
    the process.
    """

    step_s: float
    spread_s: float
    tier_bytes: dict[str, int]
    process_bytes: int
    nvme_bytes: float


def trained(settings: Settings, nvme: Path, steps: int, skip: int) -> Trained:
    """Trains in a fresh process. Raises RunFailedError with the end of what it printed when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "steps.jsonl"
        config = runnable(settings, nvme, steps, metrics)
        run = measured_run(["-m", "tierzero.profiling.plan_check", json.dumps(config.to_dict())], metrics)
    lines = run.records[skip:]
    baseline = json.loads(run.printed.splitlines()[-1])["baseline"]
    seconds = [line["step_s"] for line in lines]
    return Trained(
        statistics.median(seconds),
        max(seconds) - min(seconds),
        lines[-1]["peak_tier_bytes"],
        lines[-1]["peak_rss_bytes"] - baseline,
        statistics.median(line["nvme_read_bytes"] + line["nvme_write_bytes"] for line in lines),
    )


def runnable(settings: Settings, nvme: Path, steps: int, metrics: Path | None = None) -> Config:
    """The configuration of a case: drives where it may need them, nothing but training."""
    values: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in settings.items()}
    values.setdefault("tiers", {}).setdefault("nvme", [str(nvme)])
    return Config.from_dict(only_steps(values, steps, metrics))


def _train(values: dict[str, Any]) -> None:
    """In the process that is measured: the baseline is what it holds before it has a model."""
    from tierzero.train import prepare, train
    from tierzero.training.memory import rss_bytes

    tiny = {
        "model": {"dim": 64, "layers": 2, "vocab": 256},
        "train": {"steps": 2, "batch_size": 2, "seq_len": 32, "validation_batches": 0, "sample_tokens": 0},
        "tiers": {"nvme": values["tiers"]["nvme"]},
        "placement": {"params": "nvme", "optimizer": "nvme"},
    }
    train(prepare(Config.from_dict(tiny)))  # libraries, kernels, threads
    baseline = rss_bytes()
    train(prepare(Config.from_dict(values)))
    print(json.dumps({"baseline": baseline}))


class DriveNow:
    """The rates of a drive at the moment: a drive's swing more than a prediction may be wrong. Use as a context."""

    def __init__(self, nvme: Path, block: int = 8 << 20, depth: int = 8) -> None:
        # A folder of its own: the runs beside it use the other.
        self._folder = tempfile.TemporaryDirectory(dir=nvme, prefix=".drive-")
        self._file = MeasuredFile([Path(self._folder.name)], _DRIVE_FILE, (block,), depth)
        self._point = Point(True, block, depth)

    def __enter__(self) -> DriveNow:
        self._file.__enter__()
        self._file.fill(_SAMPLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()
        self._folder.cleanup()

    def sample(self) -> dict[Op, float]:
        """Bytes per second of each direction."""
        return {op: self._file.run(self._point, op, _SAMPLE_S).rate for op in OPS}


def with_drive(machine: MachineProfile, samples: Sequence[Mapping[Op, float]]) -> MachineProfile:
    """``machine`` with the means of ``samples`` for its drive."""
    means = {op: statistics.mean(sample[op] for sample in samples) for op in OPS}
    drive = Drive(name="as measured beside the case", **means)
    return machine.model_copy(update={"drives": (drive,), "striped": None})


@dataclass(frozen=True)
class Checked:
    """One case: seconds and bytes as predicted and as measured. ``drive``: bytes per second of reads and writes
    together, beside it.
    """

    name: str
    bound_by: str
    predicted_s: float
    measured: Trained
    predicted_bytes: Mapping[str, int]
    """By tier as the pools count, ``process``: of host and device together with activations, ``moved``: in a step."""
    drive: float

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted_s / self.measured.step_s


def table(rows: Sequence[Checked]) -> str:
    """As Markdown; bytes in MB, predicted / measured."""
    found = [
        "| case | bound | drive GB/s | predicted s | measured s | ratio | device MB | host MB | nvme MB | moved MB | "
        "process MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = {**row.measured.tier_bytes, "process": row.measured.process_bytes, "moved": row.measured.nvme_bytes}
        pairs = [
            f"{row.predicted_bytes[name] / 1e6:.0f} / {measured[name] / 1e6:.0f}"
            for name in (*row.measured.tier_bytes, "moved", "process")
        ]
        found.append(
            f"| {row.name} | {row.bound_by} | {row.drive / 1e9:.2f} | {row.predicted_s:.2f} | "
            f"{row.measured.step_s:.2f} | {row.ratio:.2f} | {' | '.join(pairs)} |"
        )
    return "\n".join(found)


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]))
