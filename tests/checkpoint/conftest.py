"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from ..support.rank_pool import RankPool


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other's threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.fixture
def no_large_files() -> Iterator[Callable[[], None]]:
    """A file size limit makes a short write first, then an error, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
