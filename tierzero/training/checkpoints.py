"""The checkpoint folders of a run: their names, the newest one, and which to keep."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..config import Config
from ..errors import ConfigError

_NAME = re.compile(r"step-([0-9]{8,})")


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps goes."""
    return directory / f"step-{step:08d}"


def all_in(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, oldest first. A checkpoint gets its name when it is complete."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def keep_newest(directory: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints."""
    for path in all_in(directory)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def check_directory(config: Config) -> None:
    """Makes ``checkpoint.dir`` and sees that it can be written to. Raises ConfigError."""
    directory = config.checkpoint.dir
    if directory is None or not config.checkpoint.every:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"checkpoint.dir: cannot make {directory}: {error.strerror or error}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"checkpoint.dir: cannot write to {directory}: permission denied")


def to_resume(config: Config, wanted: str | None) -> Path | None:
    """The checkpoint to go on from: a path as it is, ``auto`` the newest in ``checkpoint.dir``. None: start afresh.

    Raises ConfigError.
    """
    if wanted is None:
        return None
    if wanted == "auto":
        if config.checkpoint.dir is None:
            raise ConfigError("--resume auto: set checkpoint.dir, the folder to look for checkpoints in")
        return max(all_in(config.checkpoint.dir), key=_step_of, default=None)
    path = Path(wanted).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--resume {wanted}: no such checkpoint folder; give one, or auto for the newest")
    return path
