"""Translates a DeepSpeed configuration: every key that is given is accounted for, once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..config import Config
from ..messages import keys_of, sections_of, shown
from ..toml import toml_document
from .draft import RULES, SECTIONS, Added, Draft, Entry
from .given import read
from .optimizer_meanings import translate_optimizer
from .rules import KeyRule, Outcome, Path
from .state_meanings import translate_state
from .training_meanings import translate_training

_NAMED_IN_SUMMARY = 12


@dataclass(frozen=True)
class Translation:
    """A configuration, and what became of every key that it was made from.

    ``origin``: where each key of the configuration that is not at its default comes from.
    """

    source: str
    file: str
    config: Config
    origin: Mapping[str, str]
    entries: tuple[Entry, ...]
    added: tuple[Added, ...]

    def having(self, *outcomes: Outcome) -> tuple[Entry, ...]:
        """The keys with one of these outcomes."""
        return tuple(entry for entry in self.entries if entry.outcome in outcomes)

    @property
    def mapped(self) -> tuple[Entry, ...]:
        """Keys that have become keys here and mean the same."""
        return self.having(Outcome.MAPPED)

    @property
    def not_needed(self) -> tuple[Entry, ...]:
        """Keys whose job is done without one, or that say what is so anyway."""
        return self.having(Outcome.NOT_NEEDED)

    @property
    def differing(self) -> tuple[Entry, ...]:
        """Keys to look at: what they do is different here, is to be done in another way, or nobody knows them."""
        return self.having(Outcome.DIFFERS, Outcome.UNKNOWN)

    def summary(self) -> str:
        """One line that names the keys to look at; empty where there are none."""
        keys = list(dict.fromkeys(_named(entry) for entry in self.differing))
        if not keys:
            return ""
        more = f" and {len(keys) - _NAMED_IN_SUMMARY} more" if len(keys) > _NAMED_IN_SUMMARY else ""
        names = ", ".join(keys[:_NAMED_IN_SUMMARY])
        return f"{self.source}: not quite the same here: {names}{more}; `tierzero import-config {self.file}` says how"

    def toml(self) -> str:
        """The configuration as a TOML file that says where each value comes from. Raises ConfigError."""
        name = os.path.basename(self.source)
        return f"# Translated from {name!a} (DeepSpeed).\n\n{toml_document(self.config.given(), self.origin)}"


def _named(entry: Entry) -> str:
    """The key, or the section that is one row for all that is in it."""
    rule = _rule_of(tuple(entry.key.split(".")))
    return entry.key if rule is None else ".".join(rule.path)


def translate(config: str | os.PathLike[str] | Mapping[str, Any], ranks: int | None = None) -> Translation:
    """Translates a DeepSpeed JSON file, or its content as a dict.

    ``ranks``: how many ranks will run, which DeepSpeed multiplies into the batch when a job starts. Raises ConfigError
    with every key that the user must change.
    """
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ConfigError(f"ranks = {ranks!r}: must be a whole number from 1")
    draft = Draft(read(config))
    translate_state(draft)
    translate_training(draft, ranks)
    translate_optimizer(draft)
    for path, value in draft.leaves.items():
        if path not in draft.entries:
            _by_table(draft, path, value)
    if draft.problems:
        first, *others = draft.problems
        more = f" (as well: {', '.join(others)})" if others else ""
        raise ConfigError(f"{draft.given.source}: {draft.problems[first]}{more}")
    entries = tuple(draft.entries[path] for path in draft.leaves)
    file = "FILE.json" if isinstance(config, Mapping) else draft.given.source
    return Translation(draft.given.source, file, _built(draft), draft.origin, entries, tuple(draft.added))


def _built(draft: Draft) -> Config:
    in_order = {
        section: {key: draft.values[f"{section}.{key}"] for key in keys_of(cls) if f"{section}.{key}" in draft.values}
        for section, cls in sections_of(Config).items()
    }
    given = {section: values for section, values in in_order.items() if values}
    source = draft.given.source
    said = {target: f"{source}: {key}" for target, key in draft.origin.items()}
    config = Config.from_translation(given, source, draft.given.base, said)
    config.check()
    return config


def _by_table(draft: Draft, path: Path, value: Any) -> None:
    """What the table alone says about a key."""
    key = ".".join(path)
    rule = _rule_of(path)
    if rule is None:
        _unruled(draft, path, key, value)
    elif value is None or value == {}:
        draft.entries[path] = Entry(key, value, Outcome.NOT_NEEDED, rule.to, "nothing is said by it")
    elif (off := _off(draft, path, rule)) is not None:
        draft.entries[path] = Entry(key, value, Outcome.NOT_NEEDED, rule.to, off)
    elif rule.outcome in (Outcome.DIFFERS, Outcome.REFUSED) and rule.is_plain(value):
        draft.entries[path] = Entry(key, value, Outcome.NOT_NEEDED, rule.to, "makes no difference with this value")
    elif rule.outcome is Outcome.REFUSED:
        draft.problems.setdefault(rule.key, f"{key} = {shown(value)}: {rule.why}")
    elif rule.outcome is Outcome.MAPPED:
        why = f'"auto" leaves it to the default of {rule.to[0]}' if value == "auto" else "is not read with the others"
        draft.entries[path] = Entry(key, value, Outcome.DIFFERS, rule.to, why)
    else:
        draft.entries[path] = Entry(key, value, rule.outcome, rule.to, rule.why)


def _rule_of(path: Path) -> KeyRule | None:
    """The row for exactly this key, else the one for the section that it is in."""
    if path in RULES:
        return RULES[path]
    inside = (RULES.get(path[:depth]) for depth in range(len(path) - 1, 0, -1))
    return next((rule for rule in inside if rule is not None and rule.is_section), None)


def _off(draft: Draft, path: Path, rule: KeyRule) -> str | None:
    """Why the section that the key is in does not act; None where it does."""
    if path[0] in draft.off:
        return draft.off[path[0]]
    if not rule.is_section or rule.outcome is Outcome.NOT_NEEDED:
        return None
    inside = {leaf: value for leaf, value in draft.leaves.items() if leaf[: len(rule.path)] == rule.path}
    own = inside.get((*rule.path, "enabled"))
    switches = [value for leaf, value in inside.items() if leaf[-1] == "enabled"]
    on = bool(own) if own is not None else any(switches) if switches else rule.on or inside.get(rule.path) is True
    return None if on else f"{'.'.join(rule.path)} is off"


def _unruled(draft: Draft, path: Path, key: str, value: Any) -> None:
    """A section that is not one, or a key that nobody knows."""
    if path in SECTIONS:
        if value is None or value == {}:
            draft.entries[path] = Entry(key, value, Outcome.NOT_NEEDED, (), "nothing is said by it")
        else:
            draft.problems.setdefault(key, f"{key} = {shown(value)}: must be an object with keys below it")
        return
    near = _nearest(path)
    advice = f"did you mean {near}?" if near else "no key of DeepSpeed is like it"
    draft.entries[path] = Entry(key, value, Outcome.UNKNOWN, (), f"unknown and left out; {advice}")


def _nearest(path: Path) -> str | None:
    """The known key in the same section with the most similar name, else one of that name anywhere."""
    beside = {known[-1]: ".".join(known) for known in (*RULES, *SECTIONS) if known[:-1] == path[:-1]}
    close = difflib.get_close_matches(path[-1], beside, 1, 0.7)
    if close:
        return beside[close[0]]
    anywhere = {known[-1]: ".".join(known) for known in RULES}
    close = difflib.get_close_matches(path[-1], anywhere, 1, 0.85)
    return anywhere[close[0]] if close else None
