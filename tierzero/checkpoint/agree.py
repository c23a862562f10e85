"""One outcome for all ranks: none goes on, or waits for ever, after another's failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.outcome import outcome_of
from tierzero.runtime.runtime import Runtime


def together(runtime: Runtime, folder: Path, task: str, work: Callable[[], None]) -> None:
    """Runs ``work`` on every rank. Raises CheckpointError on all of them when it fails on any (a ConfigError stays one
    on its rank); ``task`` ("write it") completes the message.
    """
    failure, failed = outcome_of(runtime, work)
    if isinstance(failure, CheckpointError | ConfigError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"checkpoint {folder}: rank {runtime.world.rank} cannot {task}: {failure}") from failure
    if failed:
        raise CheckpointError(f"checkpoint {folder}: another rank could not {task}; its message says why")
