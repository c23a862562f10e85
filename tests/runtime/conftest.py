"""Fixtures of the runtime's tests."""

from __future__ import annotations

from ..support.fixtures import one_thread

__all__ = ["one_thread"]
