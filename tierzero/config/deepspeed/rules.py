"""What a row of the tables of DeepSpeed's keys says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

Path = tuple[str, ...]
"""Where a key is in the JSON, outermost section first."""


class Outcome(StrEnum):
    """What became of a key."""

    MAPPED = "mapped"
    NOT_NEEDED = "not needed"
    DIFFERS = "differs"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True)
class KeyRule:
    """One key of DeepSpeed, or a whole section with all below it, and what becomes of it.

    ``to``: the keys here that it sets, or that decide what it decided. ``plain``: values of a key that differs or is
    refused with which both programs do the same. ``on``: whether a section acts that has no ``enabled``.
    """

    path: Path
    outcome: Outcome
    why: str
    to: tuple[str, ...] = ()
    plain: tuple[Any, ...] = ()
    is_section: bool = False
    on: bool = False

    @property
    def key(self) -> str:
        """As it is written in documentation."""
        return ".".join(self.path) + (".*" if self.is_section else "")

    def is_plain(self, value: Any) -> bool:
        """Whether ``value`` makes no difference."""
        return value is None or any(value == each for each in self.plain)


def mapped(key: str, to: str, why: str) -> KeyRule:
    """A key with a counterpart; how its value is translated is in `meanings`."""
    return KeyRule((key,), Outcome.MAPPED, why, tuple(to.split()))


def not_needed(key: str, why: str, to: str = "") -> KeyRule:
    """A key whose job is done without one, by ``to`` where it can be steered."""
    return KeyRule((key,), Outcome.NOT_NEEDED, why, tuple(to.split()))


def differs(key: str, why: str, to: str = "", plain: tuple[Any, ...] = ()) -> KeyRule:
    """A key without a counterpart that changes no weights, or is to be done in another way."""
    return KeyRule((key,), Outcome.DIFFERS, why, tuple(to.split()), plain)


def refused(key: str, why: str, to: str = "", plain: tuple[Any, ...] = (False,)) -> KeyRule:
    """A key that would make training differ without a word."""
    return KeyRule((key,), Outcome.REFUSED, why, tuple(to.split()), plain)


def section(rule: KeyRule, on: bool = False) -> KeyRule:
    """``rule`` for everything below its key. ``on``: it acts by being there, without an ``enabled``."""
    return replace(rule, is_section=True, on=on)


def under(prefix: str, *rules: KeyRule) -> tuple[KeyRule, ...]:
    """``rules`` for keys in the section ``prefix``."""
    return tuple(replace(rule, path=(*prefix.split("."), *rule.path)) for rule in rules)
