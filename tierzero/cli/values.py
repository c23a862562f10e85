"""What options of several commands may be, and what is done with them."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def size(text: str) -> int:
    """Bytes stated by ``text``. Raises BadParameter."""
    from ..config.rules import parse_size

    found = parse_size(text)
    if found is None or found < 0:
        raise typer.BadParameter(f'{text!r} is no size; write bytes, or text such as "16GB" or "512MiB"')
    return found


def sizes(text: str) -> tuple[int, ...]:
    """Several, with commas between them. Raises BadParameter."""
    return tuple(sorted({size(part) for part in text.split(",")}))


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, with commas between them. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of whole numbers; write such as 1,8,16")
    return tuple(sorted({int(part) for part in parts}))


def check_new(path: Path) -> None:
    """Sees that `write_new` can write ``path``, before long work for it. Raises ConfigError."""
    from ..errors import ConfigError

    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another --out, or remove it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        problem = "is not a folder that can be written to" if path.parent.exists() else "does not exist"
        raise ConfigError(f"{path}: cannot write the configuration: {path.parent} {problem}")


def write_new(path: Path, text: str) -> None:
    """Writes a configuration to a file that does not exist yet. Raises ConfigError."""
    from ..errors import ConfigError

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; choose another --out, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the configuration: {error.strerror or error}") from None
