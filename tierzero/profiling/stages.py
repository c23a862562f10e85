"""What each ZeRO stage holds and moves per rank, measured in real runs on several ranks next to the formulas.

``python -m tierzero.profiling.stages JOB`` is what a rank runs, under torchrun.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierzero as tz
from tierzero.errors import TierZeroError
from tierzero.models import GPT, Block
from tierzero.profiling.compare import environment, markdown_row
from tierzero.sharding.stages import KINDS, STAGES

_OPTIMIZER_BYTES = {"bf16": 10, "fp16": 12}
"""The remainder of a split master and two moments, or a whole master and those."""


@dataclass(frozen=True)
class StageJob:
    """A GPT of the given size, trained for a few steps at one stage."""

    stage: int
    precision: str = "bf16"
    dim: int = 256
    layers: int = 12
    vocab: int = 8192
    seq_len: int = 64
    steps: int = 3


@dataclass(frozen=True)
class StageRow:
    """One stage: persistent bytes per parameter and rank by kind of state, and bytes moved per parameter, gradient and
    weight being 2 bytes: as the formulas say and as counted. ``losses`` are rank 0's.
    """

    stage: int
    formula: dict[str, float]
    measured: dict[str, float]
    formula_volume: float
    measured_volume: float
    losses: tuple[float, ...]


def formula_bytes(stage: int, ranks: int, precision: str) -> dict[str, float]:
    """Bytes per parameter and rank: 2 of weights, 2 of gradients, 10 or 12 of optimizer state, what the stage shards
    divided by the ranks (Rajbhandari et al., 2020).
    """
    whole = {"params": 2, "gradients": 2, "optimizer": _OPTIMIZER_BYTES[precision]}
    return {kind: size / (ranks if kind in STAGES[stage].sharded else 1) for kind, size in whole.items()}


def formula_volume(stage: int) -> float:
    """Elements moved per parameter and step: an all-reduce counts 2, a gather or a scatter 1."""
    return 3.0 if stage == 3 else 2.0


def measure(jobs: Sequence[StageJob], ranks: int, progress: Callable[[str], None]) -> list[StageRow]:
    """Runs the jobs in turn, each on ``ranks`` processes. Raises TierZeroError with what a failed one said."""
    rows = []
    for job in jobs:
        progress(f"stage {job.stage} on {ranks} ranks")
        found = _run(job, ranks)
        parameters = found["parameters"]
        held = {kind: sum(found["placement"][kind].values()) / parameters for kind in KINDS}
        moved = sum(found["comm_bytes"].values()) / (2 * parameters)
        formula = formula_bytes(job.stage, ranks, job.precision)
        rows.append(StageRow(job.stage, formula, held, formula_volume(job.stage), moved, tuple(found["losses"])))
    return rows


def _run(job: StageJob, ranks: int) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "tierzero.profiling.stages", json.dumps(asdict(job))],
        capture_output=True,
        text=True,
        env=environment() | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        raise TierZeroError(f"stage {job.stage} failed: {said[0] if said else done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(rows: Sequence[StageRow]) -> str:
    """The rows as Markdown."""
    titles = [
        "stage",
        *[f"{kind}, formula" for kind in KINDS],
        *KINDS,
        "all, formula",
        "all",
        "moved, formula",
        "moved",
    ]
    lines = [markdown_row(titles), markdown_row(["---"] * len(titles))]
    for row in rows:
        numbers = [
            *[row.formula[kind] for kind in KINDS],
            *[row.measured[kind] for kind in KINDS],
            sum(row.formula.values()),
            sum(row.measured.values()),
            row.formula_volume,
            row.measured_volume,
        ]
        lines.append(markdown_row([str(row.stage), *[f"{number:.2f}" for number in numbers]]))
    return "\n".join(lines)


def draw(rows: Sequence[StageRow], ranks: int, path: Path) -> None:
    """Bytes per parameter as stacked bars, the formula as a line over each, and volume beside it; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, traffic) = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained", width_ratios=[3, 2])
    names = [f"stage {row.stage}" for row in rows]
    bottom = [0.0] * len(rows)
    for kind, color in zip(KINDS, ("#2266aa", "#66aadd", "#bbbbbb"), strict=True):
        heights = [row.measured[kind] for row in rows]
        memory.bar(names, heights, bottom=bottom, label=kind, color=color, width=0.6)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for axis, formulas in (
        (memory, [sum(row.formula.values()) for row in rows]),
        (traffic, [row.formula_volume for row in rows]),
    ):
        for index, value in enumerate(formulas):
            axis.hlines(value, index - 0.38, index + 0.38, color="#cc3311", label="formula" if index == 0 else None)
    traffic.bar(names, [row.measured_volume for row in rows], color="#2266aa", width=0.6)
    memory.set_title(f"bytes per parameter and rank, {ranks} ranks")
    traffic.set_title("elements moved per parameter and step")
    memory.legend(frameon=False)
    for axis in (memory, traffic):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 1.1 * max(bottom if axis is memory else [3.0, *(row.measured_volume for row in rows)]))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run_rank(job: StageJob) -> dict[str, Any]:
    """Trains as one rank on data of its own; the figures of the last step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = tz.Config.from_dict(
        {
            "train": {"precision": job.precision},
            "tiers": {"prefetch": 0},
            "sharding": {"stage": job.stage},
            "placement": dict.fromkeys(KINDS, "host"),
        }
    )
    torch.manual_seed(0)
    model = tz.shard(GPT(job.dim, job.layers, 4, job.vocab, job.seq_len), config, units=(Block,))
    optimizer = tz.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(job.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(job.vocab, (2, job.seq_len + 1), generator=generator)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = tz.stats(model) | {"losses": losses}
    tz.close(model)
    return found


def main() -> None:
    """A rank; rank 0 prints its figures."""
    outcome = run_rank(StageJob(**json.loads(sys.argv[1])))
    if dist.get_rank() == 0:
        print(json.dumps(outcome), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
