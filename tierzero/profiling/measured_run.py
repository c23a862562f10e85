"""A training run in a process of its own, and what its steps measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tierzero.errors import TierZeroError
from tierzero.profiling.compare import environment

_ERROR = "tierzero: error: "
_ENDING_S = 20.0
"""What a run may take to remove its tier files after it was asked to end."""


class RunFailedError(TierZeroError):
    """The run ended with ``code``, or was ended; the message is the last that it said."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class RunTooLongError(RunFailedError):
    """The run was ended because its time was up."""


@dataclass(frozen=True)
class MeasuredRun:
    """The records of all steps, see `tierzero.training.metrics.Record`, and what was printed."""

    records: list[dict[str, Any]]
    printed: str


def only_steps(said: Mapping[str, Mapping[str, Any]], steps: int, metrics: Path | None) -> dict[str, dict[str, Any]]:
    """What a configuration says, changed so that a run of it is ``steps`` steps and writes nothing but ``metrics``."""
    values = {section: dict(keys) for section, keys in said.items() if section not in ("checkpoint", "log")}
    train = values.get("train", {})
    values["train"] = {**train, "steps": steps, "validation_every": 0, "validation_batches": 0, "sample_tokens": 0}
    if metrics is not None:
        values["log"] = {"metrics": str(metrics)}
    return values


def measured_run(arguments: Sequence[str], metrics: Path, limit_s: float | None = None) -> MeasuredRun:
    """Runs Python with ``arguments``, which trains and writes ``metrics``, for ``limit_s`` at most.

    Raises RunFailedError. Whatever else ends the wait, such as Ctrl-C, ends the run too.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed, failed = Path(folder) / "stdout", Path(folder) / "stderr"
        with printed.open("wb") as out, failed.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for this process, which ends the run in its own way
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise RunTooLongError(f"was ended after {limit_s:.0f} s", 1) from None
            finally:
                _end(process)
        if code:
            raise RunFailedError(_last_words(failed.read_text(errors="replace"), code), code)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return MeasuredRun(records, printed.read_text(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a run that still goes on to clean up and end; kills it and its ranks when it does not in time."""
    if process.poll() is not None:
        return
    ranks: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # it ends just now
        ranks = psutil.Process(process.pid).children(recursive=True)
    try:
        process.terminate()
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        process.wait()


def _last_words(text: str, code: int) -> str:
    """The reason that a run gave: the first that a rank states, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    stated = [line.partition(_ERROR)[2] for line in lines if _ERROR in line]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return next(iter([*stated, *lines[-1:]]), how)
