"""A translation as text and as JSON."""

from __future__ import annotations

import math
import os
from typing import Any

from ..messages import shown
from .draft import Entry
from .rules import Outcome
from .translation import Translation

_TITLES = {
    Outcome.MAPPED: "mapped",
    Outcome.NOT_NEEDED: "not needed",
    Outcome.DIFFERS: "differs: look at these",
    Outcome.UNKNOWN: "unknown: left out",
}
_WIDEST = 64


def lines(translation: Translation) -> list[str]:
    """Every key that was given, by what became of it, then what was added."""
    rows: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES.values()}
    for entry in translation.entries:
        rows[_TITLES[entry.outcome]].append((f"{entry.key} = {shown(entry.value)}", _became(translation, entry)))
    rows["added: DeepSpeed's own defaults, which are not the defaults here"] = [
        (f"{added.key} = {shown(added.value)}", added.why) for added in translation.added
    ]
    width = min(_WIDEST, max((len(left) for below in rows.values() for left, _ in below), default=0))
    found = []
    for title, below in rows.items():
        if below:
            found += [f"{title} ({len(below)})", *(f"  {left:<{width}}  {right}".rstrip() for left, right in below)]
    return [_printable(line) for line in found]


def as_json(translation: Translation) -> dict[str, Any]:
    """What JSON can hold."""
    return {
        "source": translation.source,
        "config": translation.config.given(),
        "toml": translation.toml(),
        "keys": [
            {
                "key": entry.key,
                "value": _plain(entry.value),
                "outcome": str(entry.outcome),
                "tierzero": list(entry.to),
                "why": entry.why,
            }
            for entry in translation.entries
        ],
        "added": [{"key": each.key, "value": _plain(each.value), "why": each.why} for each in translation.added],
    }


def _became(translation: Translation, entry: Entry) -> str:
    given = translation.config.given()
    if entry.outcome is Outcome.NOT_NEEDED:
        steered = f" ({', '.join(entry.to)})" if entry.to else ""
        return f"{entry.why}{steered}"
    parts = []
    for target in entry.to:
        section, _, key = target.partition(".")
        value = given.get(section, {}).get(key)
        from_here = value is not None and (entry.outcome is Outcome.MAPPED or translation.origin[target] == entry.key)
        parts.append(f"{target} = {shown(value)}" if from_here else target)
    return ": ".join(part for part in (", ".join(parts), entry.why) if part)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _printable(line: str) -> str:
    """Half a surrogate pair, which JSON may hold, cannot be printed."""
    return line.encode("utf-8", "backslashreplace").decode()
