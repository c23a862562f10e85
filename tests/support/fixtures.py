"""Fixtures that several packages of tests share; a package's conftest takes what it wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .rank_pool import RankPool


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
