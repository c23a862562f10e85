"""Old checkpoints are removed beside whatever comes next: a file system takes about a second for some gigabytes."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path

_SHORT_S = 0.1
"""What is gone in this time is gone when the call returns."""


def remove_behind(folder: Path) -> None:
    """Takes the folder's name from it at once and its files in a thread, for whose end the process waits. What a killed
    process leaves of it, the next call for this name removes.
    """
    leavings = list(folder.parent.glob(f".{folder.name.removeprefix('.')}.removed-*"))
    if folder.exists():
        numbers = itertools.count()
        name = folder.name.removeprefix(".")
        aside = next(p for n in numbers if not os.path.lexists(p := folder.with_name(f".{name}.removed-{n}")))
        folder.rename(aside)
        leavings.append(aside)
    if leavings:
        thread = threading.Thread(target=_remove, args=(leavings,), name="tierzero-removal")
        thread.start()
        thread.join(_SHORT_S)


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
