"""Ranks of our own for the collectives, where nobody launched any: the first that fails ends all, with its cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tierzero.errors import RankLostError, TierZeroError
from tierzero.profiling.bench.collective import CollectivePlan, CollectiveReport, job_text
from tierzero.profiling.bench.timing import Progress

_MODULE = "tierzero.profiling.bench.collective"
_TURN_S = 0.05
_LAST_WORDS_S = 1.0
"""What the other ranks have to say when one has failed: the first one seen may only have lost contact."""
_START_S = 120.0


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[str]
    errors: Path

    def cause(self) -> str:
        """Why it ended."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        lines = self.errors.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
        return f"failed: {last}"

    def close(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)


def measure(plan: CollectivePlan, ranks: int, progress: Progress) -> CollectiveReport:
    """With gloo on ``ranks`` processes of this node. Raises TierZeroError with the cause when one fails."""
    progress("starting ranks", 0.0)
    started: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="tierzero-bench-") as folder:
        try:
            started.extend(_start(number, ranks, plan, Path(folder)) for number in range(ranks))
            return _report(started, progress, _START_S + 6 * plan.seconds)
        finally:
            for rank in started:
                rank.process.kill()
            for rank in started:
                rank.close()


def _start(number: int, ranks: int, plan: CollectivePlan, folder: Path) -> _Rank:
    own = {"RANK": number, "WORLD_SIZE": ranks, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": ranks}
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    errors = folder / f"{number}.log"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, job_text(plan, str(folder / "rendezvous"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            stderr=log,
            text=True,
            env=os.environ | {name: str(value) for name, value in own.items()} | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the process that waits
        )
    return _Rank(number, process, errors)


def _report(ranks: Sequence[_Rank], progress: Progress, limit_s: float) -> CollectiveReport:
    said: list[dict[str, Any]] = []
    output = ranks[0].process.stdout
    assert output is not None
    reader = threading.Thread(target=_listen, args=(output, said, progress), daemon=True)
    reader.start()
    ends = time.monotonic() + limit_s
    while any(rank.process.poll() is None for rank in ranks) and not any(rank.failed for rank in ranks):
        if time.monotonic() > ends:
            raise TierZeroError(f"bench collective: the ranks did not end within {limit_s:.0f} s")
        time.sleep(_TURN_S)
    if any(rank.failed for rank in ranks):
        raise TierZeroError(f"bench collective: {_first_cause(ranks)}")
    reader.join()
    return CollectiveReport.from_json(said[-1]["report"], said[-1]["notes"])


def _listen(output: IO[str], said: list[dict[str, Any]], progress: Progress) -> None:
    with suppress(ValueError):  # closed
        for line in output:
            found = json.loads(line)
            if "report" in found:
                said.append(found)
            else:
                progress(*found["progress"])


def _first_cause(ranks: Sequence[_Rank]) -> str:
    ends = time.monotonic() + _LAST_WORDS_S
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < ends:
        time.sleep(_TURN_S)
    causes = [f"rank {rank.number} {rank.cause()}" for rank in ranks if rank.failed]
    return next((cause for cause in causes if not _is_only_lost(cause)), causes[0])


def _is_only_lost(cause: str) -> bool:
    return any(sign in cause for sign in (RankLostError.__name__, "Connection closed by peer", "DistBackendError"))
