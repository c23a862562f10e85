"""Errors of TierZero: each one is a line that says what is wrong, where, and what to do."""

from __future__ import annotations


class TierZeroError(Exception):
    """Base of every error that TierZero raises on purpose."""


class ConfigError(TierZeroError, ValueError):
    """Something the user can change: a key, a path, a size, a call out of order. The command line exits with 2."""


class BudgetError(ConfigError):
    """A memory or disk budget does not hold what it must hold.

    ``missing`` is how many bytes the named budget lacks.
    """

    def __init__(self, message: str, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


class TierError(TierZeroError, OSError):
    """A read, a write or a worker of a storage tier failed. The command line exits with 1."""


class NotResidentError(TierZeroError, RuntimeError):
    """The values of a parameter were asked for where they cannot be paged in."""


class CheckpointError(TierZeroError, RuntimeError):
    """A checkpoint cannot be written, or what is read is incomplete, damaged or does not fit the model."""


class RankMismatchError(TierZeroError, RuntimeError):
    """Ranks do different things at the same point of the program."""


class RankLostError(TierZeroError, RuntimeError):
    """Another rank has ended, or did not answer in time."""
