"""Candidates as real runs: a configuration checked before any of them, and each trained in a process of its own."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import tierzero as tz
from tierzero.config import Config
from tierzero.config.toml import toml_document
from tierzero.data import open_data
from tierzero.errors import ConfigError, TierZeroError
from tierzero.models import bundled_model
from tierzero.planner.memory_plan import plan_memory
from tierzero.planner.overlap import has_tried_tiles, planned_overlap
from tierzero.profiling.measured_run import RunFailedError, RunTooLongError, measured_run, only_steps
from tierzero.profiling.tune.candidates import Candidate, Facts
from tierzero.profiling.tune.halving import Failed, Limits, Measured
from tierzero.runtime.budgets import budgets_here
from tierzero.runtime.draft import draft
from tierzero.tiers.directory import TierDirectory
from tierzero.training.ranks import Ranks, micro_batches
from tierzero.training.settings import said_with

_SLOWER = 4
"""A candidate is given up that takes so many times what the default takes,"""
_MORE_S = 60.0
"""and this much more."""


def checked(config: Config, ranks: int) -> Facts:
    """Checks all that a run of ``ranks`` processes on this machine would, and says what it does. Raises ConfigError."""
    if "RANK" in os.environ:
        raise ConfigError("tune: it starts the ranks itself; give --ranks instead of using torchrun")
    config.check()
    _, micro_steps = micro_batches(config, Ranks(0, ranks, 0, ranks))
    open_data(config)
    with torch.device("meta"), tz.empty_init():
        model = bundled_model(config)
    drafted = draft(model, config, None, ranks)
    shape, budgets = drafted.shape(), budgets_here(config, ranks)
    plan = plan_memory(shape, drafted.request(config, ranks), budgets)
    if plan.nvme_state:
        for path in config.tiers.nvme:
            TierDirectory.open(path, rank=0).close()
    return Facts(
        on_host=budgets.device_is_host,
        uses_nvme=plan.nvme_state > 0,
        moves_tiles=plan.staging > 0,
        gathers=plan.arena > 0,
        tile=plan.tile,
        prefetch=plan.prefetch,
        threads=config.train.threads or max(1, _cores() // ranks),
        units=len(shape.unit_names),
        largest_shard=max(group.layout.shard_numel for group in shape.groups),
        micro_steps=micro_steps,
        overlap=planned_overlap(config.optimizer.overlap, shape, plan, budgets, config.checkpoint.durable),
        may_try=has_tried_tiles(plan),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Runs:
    """Measures candidates of ``config`` on ``ranks`` processes. No run takes longer than ``limits`` allow for all."""

    config: Config
    ranks: int
    limits: Limits
    _a_step_s: float | None = None
    """What the default's first run took for each step, start included."""
    _first_failure: RunFailedError | None = None

    def measure(self, candidate: Candidate, steps: int) -> Measured | Failed:
        """Trains for the warm-up and ``steps`` more."""
        skip, began = self.limits.warm_up, time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            metrics, file = Path(folder) / "steps.jsonl", Path(folder) / "run.toml"
            said = said_with(self.config, candidate.settings())
            file.write_text(toml_document(only_steps(said, skip + steps, metrics)), encoding="utf-8")
            try:
                run = measured_run(
                    [*self._launch(), "-m", "tierzero", "train", str(file)], metrics, self._limit_s(steps)
                )
            except RunFailedError as error:
                self._first_failure = self._first_failure or error
                return Failed(str(error).replace(f"{file}: ", ""))
        if self._a_step_s is None:
            self._a_step_s = (time.monotonic() - began) / (skip + steps)
        counted = run.records[skip:]
        moved = statistics.median(line["nvme_read_bytes"] + line["nvme_write_bytes"] for line in counted)
        return Measured(statistics.median(line["step_s"] for line in counted), moved)

    def failure(self, why: str) -> TierZeroError:
        """The error to raise where the default does not run: what the user can change stays that."""
        failure = self._first_failure
        if isinstance(failure, RunTooLongError):
            return ConfigError(f"tune: the first steps of the configuration as it is: {why}; give more --minutes")
        return (
            ConfigError(why)
            if failure is not None and failure.code == 2
            else TierZeroError(f"tune: a run of the configuration failed: {why}")
        )

    def _launch(self) -> list[str]:
        if self.ranks == 1:
            return []
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]

    def _limit_s(self, steps: int) -> float:
        if self._a_step_s is None:
            return self.limits.seconds
        return _SLOWER * self._a_step_s * (self.limits.warm_up + steps) + _MORE_S
