"""Keys that a command proposes: as lines to read, and written into what a configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..config.toml import toml_text

Settings = Mapping[str, Mapping[str, Any]]
"""Values by section and key."""


def said_with(config: Config, changes: Settings) -> dict[str, dict[str, Any]]:
    """What the configuration says, paths made absolute, and ``changes`` over it."""
    every, given = config.to_dict(), config.given()
    said = {name: {key: _short(every[name][key]) for key in keys if key in every[name]} for name, keys in given.items()}
    for name, keys in changes.items():
        said[name] = {**said.get(name, {}), **keys}
    return said


def _short(value: Any) -> Any:
    """A placement on one tier as its name."""
    return next(iter(value)) if isinstance(value, dict) and list(value.values()) == [1.0] else value


def set_lines(changes: Settings) -> list[str]:
    """A line for each key, under one heading."""
    pairs = [f"{name}.{key} = {toml_text(value)}" for name, keys in changes.items() for key, value in keys.items()]
    return [f"{'set' if number == 0 else '':<9}{pair}" for number, pair in enumerate(pairs)]
