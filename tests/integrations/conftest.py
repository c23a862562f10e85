"""Fixtures of the tests of other libraries' training loops."""

from __future__ import annotations

from ..support.fixtures import one_thread, two_ranks

__all__ = ["one_thread", "two_ranks"]
