"""What all ranks do together fails on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


def outcome_of(runtime: Runtime, work: Callable[[], None]) -> tuple[Exception | None, bool]:
    """Runs ``work`` on every rank: what failed on this one, and whether it failed on any. Every rank must call it."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    failed = failure is not None
    if runtime.collectives is not None:
        failed = bool(runtime.collectives.small_max(torch.tensor([int(failed)], device="cpu"))[0])
    return failure, failed
