"""A translation in the making: what is given, what has become of it so far, and what is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..messages import shown
from .given import Given, keys_given
from .rules import KeyRule, Outcome, Path
from .training_table import AUTO, TRAINING_RULES
from .zero_table import ZERO_RULES

RULES: dict[Path, KeyRule] = {rule.path: rule for rule in (*ZERO_RULES, *TRAINING_RULES)}
SECTIONS = frozenset(rule.path[:depth] for rule in RULES.values() for depth in range(1, len(rule.path)))
_STOPS = frozenset(path for path, rule in RULES.items() if not rule.is_section)


@dataclass(frozen=True)
class Entry:
    """One key that was given: what became of it, which keys here it set or what decides in its place, and why."""

    key: str
    value: Any
    outcome: Outcome
    to: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Added:
    """A key that was set because what DeepSpeed does without it is not the default here."""

    key: str
    value: Any
    why: str


@dataclass
class Draft:
    """``values`` are keys of TierZero as "section.key", ``origin`` for each the key of DeepSpeed that it comes from."""

    given: Given
    leaves: dict[Path, Any] = field(init=False)
    entries: dict[Path, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    added: list[Added] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)
    """Sections that do not act, and why, beside those whose own ``enabled`` says so."""

    def __post_init__(self) -> None:
        self.leaves = dict(keys_given(self.given.values, _STOPS))

    def value(self, key: str) -> Any:
        """The value of ``key``, None where it is left out."""
        return self.leaves.get(tuple(key.split(".")))

    def has(self, key: str) -> bool:
        """Whether anything is given at ``key`` or below it."""
        path = tuple(key.split("."))
        return any(leaf[: len(path)] == path and value is not None for leaf, value in self.leaves.items())

    def number(self, key: str, *, whole: bool = False) -> Any:
        """The number at ``key``; None where it is left out, "auto" where the Trainer fills it in, or is none."""
        value = self.value(key)
        if value is None or value == "auto":
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not _is_finite(value) or (whole and value != int(value)):
            self.refuse(key, f"must be a {'whole ' if whole else ''}number")
            return None
        return int(value) if whole else value

    def flag(self, key: str, default: bool) -> bool:
        """The switch at ``key``."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
            return default
        return value

    def refuse(self, key: str, why: str) -> None:
        """The user must change ``key``."""
        value = self.value(key)
        self.problems.setdefault(key, f"{key}: {why}" if value is None else f"{key} = {shown(value)}: {why}")
        self.tell(key, Outcome.REFUSED, why)

    def tell(self, key: str, outcome: Outcome, why: str, *to: str) -> None:
        """What became of ``key``, if it was given."""
        path = tuple(key.split("."))
        if path in self.leaves:
            self.entries[path] = Entry(key, self.leaves[path], outcome, to, why)

    def set(self, key: str, target: str, value: Any, note: str = "") -> None:
        """``key`` has become ``target``. ``note``: how what that does differs."""
        self.put(target, value, key)
        self.tell(key, Outcome.DIFFERS if note else Outcome.MAPPED, note, target)

    def put(self, target: str, value: Any, key: str) -> None:
        """``target`` has this value because of ``key``, whatever it had before."""
        self.values[target] = value
        self.origin[target] = key
        self.added = [each for each in self.added if each.key != target]

    def add(self, target: str, value: Any, why: str) -> None:
        """``target`` has this value although nothing was said."""
        self.put(target, value, f"added: {why}")
        self.added.append(Added(target, value, why))

    def auto(self, key: str, target: str) -> bool:
        """Whether ``key`` is "auto". The Trainer's own default is written in its place where it has one."""
        if self.value(key) != "auto":
            return False
        argument, default = AUTO.get(key, ("", None))
        filled = f"filled in from the Trainer's {argument}" if argument else "filled in by the Trainer"
        if default is None:
            self.tell(key, Outcome.DIFFERS, f'"auto" is {filled} there: set {target}', target)
        else:
            self.set(key, target, default, f'"auto" is {filled} there; its default is written: set yours')
        return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False
