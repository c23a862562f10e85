"""Turns what pydantic found wrong into one line a person can act on."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError

_LONGEST_VALUE = 60


def keys_of(section: type[BaseModel]) -> list[str]:
    """The keys of a section as the user writes them."""
    return [field.alias or name for name, field in section.model_fields.items()]


def sections_of(config: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Section name -> its class, in the order of the documentation."""
    found = {}
    for name, field in config.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation
    return found


def nearest_key(where: tuple[str, ...], config: type[BaseModel]) -> str:
    """Advice for the unknown key at ``where``: the key that was probably meant, or the keys that there are."""
    sections = sections_of(config)
    name = where[-1]
    if len(where) == 1:
        section, _, key = name.partition(".")
        if section in sections and key in keys_of(sections[section]):
            return f"sections are nested: {{{section!r}: {{{key!r}: ...}}}}"
        close = difflib.get_close_matches(name, sections, 1, 0.7)
        if close:
            return f"did you mean [{close[0]}]?"
        here: list[str] = []
        advice = f"the sections are {', '.join(sections)}"
    else:
        here = keys_of(sections[where[0]])
        advice = f"the keys of [{where[0]}] are {', '.join(here)}"
        close = difflib.get_close_matches(name, here, 1, 0.6)
        if close:
            return f"did you mean {where[0]}.{close[0]}?"
    everywhere = [(key, section) for section, cls in sections.items() for key in keys_of(cls)]
    exact = [f"{section}.{key}" for key, section in everywhere if key == name]
    if exact:
        return f"did you mean {' or '.join(exact)}?"
    close = difflib.get_close_matches(name, [key for key, _ in everywhere], 1, 0.75)
    if close:
        section = next(section for key, section in everywhere if key == close[0])
        return f"did you mean {section}.{close[0]}?"
    return advice


def shown(value: Any) -> str:
    """``value`` on one line, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _describe(error: Mapping[str, Any], config: type[BaseModel]) -> str:
    where = tuple(str(part) for part in error["loc"])
    dotted = ".".join(where)
    if error["type"] == "extra_forbidden":
        return f"{dotted}: unknown key; {nearest_key(where, config)}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{dotted} = {shown(error['input'])}: must be a table, [{dotted}] with keys below it"
    message = str(error["ctx"]["error"]) if "error" in error.get("ctx", {}) else str(error["msg"])
    if len(where) < 2:  # a rule over several keys: its message names them
        return f"{dotted}.{message}" if dotted else message
    return f"{dotted} = {shown(error['input'])}: {message}"


def config_error(
    source: str, found: ValidationError, config: type[BaseModel], said: Mapping[str, str] | None = None
) -> ConfigError:
    """One line for the first error, and the keys of the others. ``said``: for keys that do not come from ``source``,
    where they come from.
    """
    errors: Iterable[Mapping[str, Any]] = found.errors(include_url=False)
    # Unknown keys first: a misspelt key is the cause of what else is missing.
    ordered = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    keys = [".".join(str(part) for part in error["loc"][:2]) for error in ordered]
    others = [key for key in dict.fromkeys(keys) if key and key != keys[0]]
    more = f" (wrong as well: {', '.join(others)})" if others else ""
    text = _describe(ordered[0], config)  # begins with the key, also where a rule over several keys was broken
    origin = next((how for key, how in (said or {}).items() if text.startswith(f"{key} ")), source)
    return ConfigError(f"{origin}: {text}{more}")
