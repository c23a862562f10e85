"""`tz.record`: the record of a model's steps, from the runtime to the files."""

from __future__ import annotations

import datetime
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.records import files
from tierzero.records.writing import Writing, append, write_array, write_whole
from tierzero.runtime.accounts import first_units, trained_bytes
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.spans import Kind
from tierzero.runtime.timeline import RecordedStep
from tierzero.tiers import Tier


class Recording:
    """A record that is being written. ``steps`` counts the steps that have ended, earlier runs' included."""

    def __init__(self, runtime: Runtime, folder: Path, steps: int, timeline: bool, config: Config | None) -> None:
        self._runtime, self._folder, self.steps = runtime, folder, steps
        self._rank, self._first = runtime.world.rank, runtime.world.rank == 0
        self._timeline = timeline
        self._nvme_bytes = runtime.store.bytes_by_tier()[Tier.NVME]
        self._clocks = _clocks(runtime)
        self._wall = time.time() - time.perf_counter()
        files.check_folder(folder)
        try:
            self._lock = files.locked(folder, self._rank)
            self._prepare(config)
        except OSError as error:
            raise ConfigError(f"log.dir: cannot write in {folder}: {error.strerror or error}") from None
        self._writing = Writing(folder)
        if timeline:
            runtime.timeline.start(self._deliver)

    def _prepare(self, config: Config | None) -> None:
        files.clear_own(self._folder, self._rank, self._runtime.world.size, self.steps)
        steps = self._folder / files.STEPS
        if self._first and steps.exists():
            files.keep_steps(steps, self.steps) if self.steps else steps.unlink()
        if self._first:
            write_whole(self._folder / files.RUN, files.strict_json(_about_run(self._runtime, config)))
        if self._timeline:
            about = files.strict_json(_about_rank(self._runtime, self._nvme_bytes))
            write_whole(files.rank_about(self._folder, self._rank), about)

    def log(self, values: Mapping[str, Any]) -> None:
        """Adds what the loop knows of the step that has just ended, such as {"loss": 2.5}; rank 0's counts."""
        if self._first:
            step = self.steps if self._timeline else int(values.get("step", self.steps))
            line = files.strict_json({"step": step, **values})
            self._writing.submit(lambda: append(self._folder / files.STEPS, line))

    def close(self) -> None:
        """Ends the record; what has been recorded is on its way to the drive when this returns."""
        self._runtime.timeline.stop()
        self._writing.close()
        self._lock.close()

    # On the training thread, at the end of a step.

    def _deliver(self, step: RecordedStep) -> None:
        self.steps += 1
        number, figures = self.steps, self._figures(step)
        page = step.page

        def write() -> None:
            spans, dropped = page.close() if page is not None else (None, 0)
            figures["spans"] = 0 if spans is None else len(spans)
            figures["dropped"] = step.dropped + dropped
            if spans is not None:
                spans["start"] -= step.started
                spans["end"] -= step.started
                write_array(files.spans_file(self._folder, self._rank, number), spans)
            append(files.rank_steps(self._folder, self._rank), files.strict_json(figures))
            old = number - files.NEWEST
            if old > 0 and not files.stays(old):
                files.spans_file(self._folder, self._rank, old).unlink(missing_ok=True)

        def give_back() -> None:
            if page is not None:
                self._runtime.timeline.take_back(page)

        self._writing.submit(write, give_back)

    def _figures(self, step: RecordedStep) -> dict[str, Any]:
        runtime, moved = self._runtime, self._runtime.last_step
        pools = runtime.pools
        before, self._clocks = self._clocks, _clocks(runtime)
        device = sum(pools[name].used for name in ("device", "arena", "buckets"))
        most = sum(pools[name].peak for name in ("device", "arena", "buckets"))
        return {
            "step": self.steps,
            "start": self._wall + step.started,
            "began_s": step.began - step.started,
            "end_s": step.ended - step.started,
            "step_s": step.ended - step.began,
            "phase_s": step.phases,
            "nvme_read_bytes": moved.nvme_read_bytes,
            "nvme_write_bytes": moved.nvme_write_bytes,
            **{name: value - before[name] for name, value in self._clocks.items()},
            **{name: getattr(moved, name) for name in _AHEAD},
            "start_bytes": trained_bytes(first_units(runtime), Tier.NVME),
            **asdict(runtime.updates.outcome),
            "comm_bytes": moved.comm_bytes,
            "tier_bytes": {"device": device, "host": pools["host"].used, "nvme": self._nvme_bytes},
            "peak_tier_bytes": {"device": most, "host": pools["host"].peak, "nvme": self._nvme_bytes},
        }


_AHEAD = ("tried_bytes", "kept_bytes", "redone_bytes", "read_ahead_bytes", "cold_start_s")


def _clocks(runtime: Runtime) -> dict[str, float]:
    """Seconds that run on: the drive's with a request in flight, those of update threads with what they waited for."""
    return {
        "nvme_read_busy_s": runtime.engine.read_busy_s,
        "nvme_write_busy_s": runtime.engine.write_busy_s,
        "update_s": runtime.updater.kernel_seconds,
    }


def _about_run(runtime: Runtime, config: Config | None) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "format": files.RUN_FORMAT,
        "version": files.VERSION,
        "written": now,
        "ranks": runtime.world.size,
        "parameters": sum(slot.slot.numel for slot in runtime.slots()),
        "trained_bytes": runtime.world.size * trained_bytes(runtime.units),
        "config": None if config is None else config.to_dict(),
        "torch": str(torch.__version__),
    }


def _about_rank(runtime: Runtime, nvme_bytes: int) -> dict[str, Any]:
    pools = runtime.pools
    capacity = sum(pools[name].capacity for name in ("device", "arena", "buckets"))
    return {
        "format": files.RANK_FORMAT,
        "version": files.VERSION,
        "rank": runtime.world.rank,
        "machine": platform.node(),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
        "device": str(runtime.device.torch_device),
        "overlap": runtime.overlap,
        "tile": runtime.plan.tile,
        "prefetch": runtime.plan.prefetch,
        "units": [unit.title for unit in runtime.units],
        "kinds": {kind.name.lower(): int(kind) for kind in Kind},
        "budgets": {"device": capacity, "host": pools["host"].capacity, "nvme": nvme_bytes},
    }


_STARTING = threading.Lock()


@contextmanager
def record(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    steps: int = 0,
    timeline: bool = True,
    config: Config | None = None,
) -> Iterator[Recording]:
    """Inside, every step of the sharded model is recorded in ``folder``, for ``tierzero report``. Every rank enters,
    with the same folder.

    ``steps``: taken before, by a run that this one resumes, whose record goes on; with 0 an older record in the folder
    is replaced. ``timeline=False`` leaves the timelines out. ``config`` is kept for the reader.
    Raises ConfigError where the folder cannot be written, or the model is being recorded already. A drive that fails
    later ends the record with a warning.
    """
    runtime = runtime_of(model)
    runtime.require_open()
    with _STARTING:
        if runtime.timeline.on:
            raise ConfigError("record: this model is being recorded already; end that record first")
        recording = Recording(runtime, Path(folder), steps, timeline, config)
    try:
        yield recording
    finally:
        recording.close()
