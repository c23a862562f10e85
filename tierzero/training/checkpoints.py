"""The checkpoint folders of a run: their names, the newest one, and which to keep."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from pathlib import Path

from ..checkpoint.manifest import read_manifest, standing_folder
from ..checkpoint.removal import remove_behind
from ..config import Config
from ..errors import CheckpointError, ConfigError

_NAME = re.compile(r"step-([0-9]{8,})")


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps goes."""
    return directory / f"step-{step:08d}"


def all_in(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, oldest first. A checkpoint gets its name when it is complete."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint by its name."""
    return int(path.name.rpartition("-")[2])


def step_in_name(path: Path) -> int | None:
    """The step that the name of a checkpoint of `folder_of` states; None for another name."""
    return step_of(path) if _NAME.fullmatch(path.name) else None


def before(checkpoint: Path) -> Path | None:
    """The newest checkpoint beside this one that is older."""
    if not _NAME.fullmatch(checkpoint.name):
        return None
    older = [path for path in all_in(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    return older[-1] if older else None


def left_behind(config: Config) -> str:
    """What a run that was stopped can be gone on from."""
    if config.checkpoint.durable:
        return "--resume auto goes on from the last sealed step"
    directory = config.checkpoint.dir
    found = all_in(directory) if directory is not None else []
    if found:
        return f"the newest checkpoint is {found[-1]}; --resume auto goes on from it"
    return "no checkpoint was written: set checkpoint.dir and checkpoint.every to be able to go on"


def keep_newest(directory: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints."""
    for path in all_in(directory)[:-keep]:
        remove_behind(path)


def check_directory(config: Config) -> None:
    """Makes ``checkpoint.dir`` and sees that it can be written to. Raises ConfigError."""
    directory = config.checkpoint.dir
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"checkpoint.dir: cannot make {directory}: {error.strerror or error}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"checkpoint.dir: cannot write to {directory}: permission denied")


def set_aside_others(directory: Path, resume: Path | None, start: int) -> Path | None:
    """Moves checkpoints that a run going on from ``resume``, at step ``start``, does not continue into a folder of
    their own; returns that.

    They belong to another run, or are from after ``start``, a part of this one that is given up. Left there, they would
    be overwritten or removed one by one, and be what ``--resume auto`` finds.
    """
    own = resume is not None and resume.resolve().parent == directory.resolve()
    later = [path for path in all_in(directory) if not own or step_of(path) > start]
    if not later:
        return None
    aside = next(p for number in itertools.count(1) if not os.path.lexists(p := directory / f"earlier-{number}"))
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    return aside


def to_resume(config: Config, wanted: str | None) -> Path | None:
    """The checkpoint to go on from: a path as it is, ``auto`` the newest in ``checkpoint.dir``. None: start afresh.

    Raises ConfigError for what is no checkpoint.
    """
    if wanted is None:
        return None
    if not wanted.strip():
        raise ConfigError("--resume: the path is empty; give a checkpoint folder, or auto for the newest")
    if wanted == "auto":
        return _newest(config.checkpoint.dir, quiet=config.checkpoint.durable)
    path = Path(wanted).expanduser()
    try:
        read_manifest(standing_folder(path))
    except CheckpointError as error:
        inside = all_in(path)
        advice = f"did you mean {inside[-1]}?" if inside else "give a checkpoint folder, or auto for the newest"
        raise ConfigError(f"--resume {wanted}: {error}; {advice}") from None
    return path


def _newest(directory: Path | None, quiet: bool) -> Path | None:
    """The newest checkpoint whose manifest can be read; damaged ones are passed over with a warning. ``quiet``: there
    may be something else to go on from where there is none.
    """
    if directory is None:
        raise ConfigError("--resume auto: set checkpoint.dir, the folder to look for checkpoints in")
    found = all_in(directory)
    for path in reversed(found):
        try:
            read_manifest(path)
        except CheckpointError as error:
            warnings.warn(f"--resume auto: passing over a damaged checkpoint: {error}", stacklevel=2)
        else:
            return path
    if not found and not quiet:
        warnings.warn(f"--resume auto: no checkpoint in {directory}, starting afresh", stacklevel=2)
    if found:
        raise ConfigError(f"--resume auto: none of the {len(found)} checkpoints in {directory} can be read; move them")
    return None
