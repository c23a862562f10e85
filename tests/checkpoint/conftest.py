"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator

import pytest

from ..support.fixtures import one_thread, two_ranks

__all__ = ["no_large_files", "one_thread", "two_ranks"]


@pytest.fixture
def no_large_files() -> Iterator[Callable[[], None]]:
    """A file size limit makes a short write first, then an error, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
