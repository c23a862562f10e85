"""Writes a record beside the training, on a thread of its own. A drive that fails ends the record, never the run."""

from __future__ import annotations

import os
import queue
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_WAITING = 1000
"""Jobs that may wait for a slow drive: further ones are dropped, and counted."""


class Writing:
    """Runs jobs that write files, in order, on one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: queue.Queue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.Queue(_WAITING)
        self._failed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="tierzero-record", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], afterwards: Callable[[], None] = lambda: None) -> None:
        """Runs ``job``, then ``afterwards`` whether it succeeded or not, or is not run at all."""
        try:
            self._jobs.put_nowait((job, afterwards))
        except queue.Full:
            self._dropped += 1
            afterwards()

    def close(self) -> None:
        """Waits for all jobs."""
        self._jobs.put(None)
        self._thread.join()
        if self._dropped:
            warnings.warn(
                f"log.dir: {self._folder} is on a drive that did not keep up; {self._dropped} writes were left out",
                stacklevel=2,
            )

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, afterwards = item
            try:
                if not self._failed:
                    job()
            except Exception as error:
                self._failed = True
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                warnings.warn(
                    f"log.dir: cannot write in {self._folder}: {reason}; the training goes on without its record",
                    stacklevel=2,
                )
            finally:
                afterwards()
            del item, job, afterwards  # an idle thread must not keep a model alive


def append(path: Path, line: str) -> None:
    """Adds a line, visible at once to whoever follows the file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_array(path: Path, values: npt.NDArray[Any]) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        np.save(file, values, allow_pickle=False)
    os.replace(part, path)
