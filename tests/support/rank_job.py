"""What a rank of the multi-process tests runs: ``python -m tests.support.rank_job JOB.json`` (or under torchrun).

The job trains one model per entry of ``runs``, in order, each rank on rows of its own, and rank 0 saves the results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.models import batch, net
from tests.support.training import Recipe, Result, configured, tight, train_sharded

ROWS = 4


def rows_of_this_rank(step: int) -> tuple[torch.Tensor, ...]:
    rank, size = dist.get_rank(), dist.get_world_size()
    share = ROWS // size
    return tuple(part[rank * share : (rank + 1) * share] for part in batch(step, rows=ROWS))


def mean_over_ranks(values: list[float]) -> list[float]:
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return [float(value) for value in mean / dist.get_world_size()]


def accident(spec: dict[str, Any], progress: Path, step: int) -> None:
    """Tells the test where this rank is, and does to it what the job says: die, raise, or take long."""
    (progress / f"rank{dist.get_rank()}").write_text(f"{os.getpid()} {step}")
    if step < spec.get("until", step + 1):
        time.sleep(spec.get("sleep_s", 0.0))
    if spec.get("rank") == dist.get_rank() and spec.get("step") == step:
        if spec["what"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("this rank fails on purpose")


def run(spec: dict[str, Any], nvme: Path, progress: Path) -> Result:
    recipe = Recipe(**spec.get("recipe", {}), batches=rows_of_this_rank)
    config = configured(nvme, **spec.get("config", {}))
    if spec.get("tight"):
        config = tight(net, config)

    def between(step: int) -> None:
        accident(spec.get("accident", {}), progress, step)

    result = train_sharded(net(), config, recipe, between=between, poison=spec.get("poison", False))
    result.losses = mean_over_ranks(result.losses)
    return result


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    if "rendezvous" in job:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    results = {name: run(spec, Path(job["nvme"]), Path(job["progress"])) for name, spec in job["runs"].items()}
    if dist.get_rank() == 0:
        torch.save({name: vars(result) for name, result in results.items()}, job["results"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
