"""What the folder of a record holds, and which timelines stay in it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from pathlib import Path
from typing import IO, Any

from tierzero.errors import ConfigError

RUN_FORMAT, RANK_FORMAT, VERSION = "tierzero-run", "tierzero-timeline", 1
RUN, STEPS, TIMELINE = "run.json", "steps.jsonl", "timeline"
_RANK_FILE = re.compile(r"rank-(\d{5})\.jsonl?|rank-(\d{5})-step-(\d{8})\.npy(?:\.part)?")

FIRST, NEWEST, EACH = 3, 20, 100
"""Spans are kept of the first steps, of the newest, and of each hundredth."""


def rank_about(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def rank_steps(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.jsonl"


def spans_file(folder: Path, rank: int, step: int) -> Path:
    return folder / TIMELINE / f"rank-{rank:05}-step-{step:08}.npy"


def rank_and_step(path: Path) -> tuple[int, int | None] | None:
    """Whose file it is, and of which step if of one; None for a file that is no rank's."""
    match = _RANK_FILE.fullmatch(path.name)
    if match is None:
        return None
    return int(match[1] or match[2]), int(match[3]) if match[3] else None


def stays(step: int) -> bool:
    """Whether the step's spans are kept for good."""
    return step <= FIRST or step % EACH == 0


def check_folder(folder: Path, key: str = "log.dir") -> None:
    """Makes the folder, and sees that files can be written in it. Raises ConfigError, naming ``key``."""
    try:
        (folder / TIMELINE).mkdir(parents=True, exist_ok=True)
        probe = folder / TIMELINE / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{key}: cannot write in {folder}: {error.strerror or error}") from None


def clear_own(folder: Path, rank: int, ranks: int, after: int) -> None:
    """Removes what an earlier run has left of this rank and of those behind the last: all of it, or with ``after`` the
    steps behind that one, which are made again.
    """
    for path in [*folder.iterdir(), *(folder / TIMELINE).iterdir()]:
        found = rank_and_step(path)
        if found is None or (found[0] != rank and not (rank == 0 and found[0] >= ranks)):
            continue
        if not after or (found[1] is not None and found[1] > after):
            path.unlink(missing_ok=True)
        elif path.suffix == ".jsonl":
            keep_steps(path, after)


def keep_steps(path: Path, last: int) -> None:
    """Cuts ``path`` off before the first line of a step after ``last``, or before one that was not finished."""
    with open(path, "r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > last:
                break
            end += len(line)
        file.truncate(end)


def _step_of(line: bytes) -> int:
    """The step of a line; 0 for one that has none, which is kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def strict_json(value: Any) -> str:
    """One line; a number that is not finite becomes null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def locked(folder: Path, rank: int) -> IO[str]:
    """This rank's part of the record is this process's until the file is closed. Raises ConfigError where another run
    has it, and OSError.
    """
    file = (folder / f".rank-{rank:05d}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"log.dir: {folder} is being written by another run; choose another folder") from None
    except OSError:
        pass  # a file system without locks
    return file
