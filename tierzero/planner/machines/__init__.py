"""Profiles of common machines, from data sheets, to plan on paper with."""

from __future__ import annotations

from importlib.resources import files

_SUFFIX = ".json"


def bundled_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(_SUFFIX) for entry in files(__name__).iterdir() if entry.name.endswith(_SUFFIX)
    )


def bundled_text(name: str) -> str | None:
    """The JSON of a profile by its name, with or without ``.json``; None where there is none of that name."""
    plain = name.removesuffix(_SUFFIX)
    if plain not in bundled_names():
        return None
    return files(__name__).joinpath(plain + _SUFFIX).read_text(encoding="utf-8")
