"""Writes configurations as TOML; the standard library only reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHORT_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def toml_text(value: Any) -> str:
    """A plain value, list or table as it is written in TOML, on one line. Raises ConfigError for what TOML has not."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {toml_text(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    raise ConfigError(f"{value!r} cannot be written as TOML")


def toml_document(sections: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str] | None = None) -> str:
    """A configuration as a TOML file; a key that is None is left out, as TOML has no word for it.

    ``comments``: for "section.key", what stands behind it on its line. Raises ConfigError.
    """
    said = comments or {}
    parts = []
    for section, values in sections.items():
        lines = [f"[{_key(section)}]"]
        for key, value in values.items():
            if value is None:
                continue
            comment = _comment(said.get(f"{section}.{key}", ""))
            lines.append(f"{_key(key)} = {toml_text(value)}{comment}")
        if len(lines) > 1:
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not valid Unicode text, so it cannot be written as TOML") from None
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    # Other line separators are allowed in TOML, but editors break lines at them.
    plain = character.isprintable() or character == " "
    return character if plain else f"\\U{ord(character):08X}"


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}inf"


def _comment(text: str) -> str:
    """Nothing in it may end the line or be a control character."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return f"  # {plain}" if plain.strip() else ""
