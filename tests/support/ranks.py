"""Starting ranks as real processes, with a deadline after which they are ended whatever they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .forked import ROOT, Module
from .training import Result

DEADLINE_S = 120.0
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Job:
    """Files of one job in a folder of their own; ``runs`` as `tests.support.rank_job` reads them."""

    folder: Path
    runs: dict[str, Any]
    nvme: Path
    processes: list[subprocess.Popen[bytes] | Module] = field(default_factory=list)

    def write(self, rendezvous: bool) -> Path:
        self.folder.mkdir(parents=True)
        self.nvme.mkdir(exist_ok=True)
        job = {
            "runs": self.runs,
            "nvme": str(self.nvme),
            "progress": str(self.folder),
            "results": str(self.folder / "results.pt"),
        }
        if rendezvous:
            job["rendezvous"] = str(self.folder / "rendezvous")
        path = self.folder / "job.json"
        path.write_text(json.dumps(job))
        return path

    def wait_for_step(self, step: int, ranks: int = 2) -> list[int]:
        """Waits until every rank has begun ``step``; returns their process ids."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            seen = [path.read_text().split() for path in sorted(self.folder.glob("rank*"))]
            if len(seen) == ranks and all(len(words) == 2 and int(words[1]) >= step for words in seen):
                return [int(pid) for pid, _ in seen]
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.02)
        raise AssertionError(f"the ranks did not come to step {step}:\n{self.output()}")

    def finish(self, timeout_s: float = DEADLINE_S) -> list[int]:
        """Exit codes; raises TimeoutExpired when a process does not end."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("*.log")))

    def results(self) -> dict[str, Result]:
        loaded = torch.load(self.folder / "results.pt", weights_only=False)
        return {name: Result(**values) for name, values in loaded.items()}


@contextmanager
def started(job: Job, ranks: int = 2, torchrun: bool = False) -> Iterator[Job]:
    """The job's processes, in process groups of their own; what is left of them at the end is killed."""
    path = job.write(rendezvous=not torchrun)
    try:
        if torchrun:
            job.processes.append(_torchrun(path, ranks, job.folder / "0.log"))
        for rank in () if torchrun else range(ranks):
            own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            environment = _ENVIRONMENT | {name: str(value) for name, value in own.items()}
            log = job.folder / f"{rank}.log"
            job.processes.append(Module("tests.support.rank_job", [str(path)], environment, log, log))
        yield job
    finally:
        for process in job.processes:
            kill_group(process)


def _torchrun(path: Path, ranks: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tests.support.rank_job", str(path)]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=_ENVIRONMENT, stdout=file, stderr=file, start_new_session=True)


def kill_group(process: subprocess.Popen[bytes] | Module) -> None:
    """Kills the process and all that it started, if it still runs."""
    if process.poll() is None:
        with suppress(ProcessLookupError):  # a fork that has not come to its own session yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def run_ranks(job: Job, ranks: int = 2, torchrun: bool = False) -> dict[str, Result]:
    """Runs a job to its end. Fails with the ranks' output when one of them fails."""
    with started(job, ranks, torchrun):
        codes = job.finish()
        assert codes == [0] * len(codes), f"exit codes {codes}:\n{job.output()}"
        return job.results()
