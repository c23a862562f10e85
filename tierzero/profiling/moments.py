"""One training run with each type of the moments: what it moves, how long a step takes, and the loss it comes to."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tierzero as tz
from tierzero.config import Config
from tierzero.models import bundled_model
from tierzero.profiling.measured_run import measured_run

STATE_DTYPES = ("fp32", "bf16", "int8")
_WARM = 3
"""Steps at the start that are not counted: the first has no update before it."""
_LAST = 0.1
"""Of the steps, at the end, over which the loss is the mean."""


@dataclass(frozen=True)
class MomentRun:
    """``nvme_bytes`` per parameter and step, read and written; ``step_s`` a median; ``loss`` the mean of the last
    steps.
    """

    state_dtype: str
    seed: int
    nvme_bytes: float
    step_s: float
    loss: float


def compare(config: Path, steps: int, seeds: Sequence[int], changes: Sequence[str]) -> Iterator[MomentRun]:
    """Trains ``config`` with every type and seed, each in a process of its own. ``changes`` as of ``--set``.

    Raises ConfigError, and RunFailedError where a run fails.
    """
    with torch.device("meta"), tz.empty_init():
        model = bundled_model(Config.load(config).override(list(changes)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for seed in seeds:
        for state_dtype in STATE_DTYPES:
            yield _run(config, steps, seed, state_dtype, changes, parameters)


def _run(config: Path, steps: int, seed: int, state_dtype: str, changes: Sequence[str], parameters: int) -> MomentRun:
    said = [
        *changes,
        f"optimizer.state_dtype={state_dtype}",
        f"train.seed={seed}",
        "train.validation_batches=0",
        "train.sample_tokens=0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        arguments = ["-m", "tierzero", "train", str(config), "--steps", str(steps), "--metrics", str(metrics)]
        for change in said:
            arguments += ["--set", change]
        records = measured_run(arguments, metrics).records
    moved = [record["nvme_read_bytes"] + record["nvme_write_bytes"] for record in records[_WARM:]]
    last = records[-max(1, round(_LAST * steps)) :]
    return MomentRun(
        state_dtype,
        seed,
        statistics.mean(moved) / parameters,
        statistics.median(record["step_s"] for record in records[_WARM:]),
        statistics.mean(record["loss"] for record in last),
    )


def table(runs: Sequence[MomentRun]) -> list[str]:
    """Means over the seeds; the gap is to fp32 with the same seed, and beside it the largest of any seed."""
    lines = ["| state_dtype | NVMe bytes per parameter and step | step (s) | loss | gap to fp32 (largest) |"]
    lines.append("| --- | --- | --- | --- | --- |")
    exact = {run.seed: run.loss for run in runs if run.state_dtype == "fp32"}
    for state_dtype in STATE_DTYPES:
        own = [run for run in runs if run.state_dtype == state_dtype]
        gaps = [run.loss - exact[run.seed] for run in own]
        lines.append(
            f"| {state_dtype} | {statistics.mean(run.nvme_bytes for run in own):.1f} "
            f"| {statistics.mean(run.step_s for run in own):.3f} | {statistics.mean(run.loss for run in own):.4f} "
            f"| {statistics.mean(gaps):+.4f} ({max(gaps, key=abs):+.4f}) |"
        )
    return lines
