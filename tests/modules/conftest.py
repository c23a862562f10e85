"""Fixtures of the tests of users' models."""

from __future__ import annotations

from ..support.fixtures import one_thread, two_ranks

__all__ = ["one_thread", "two_ranks"]
