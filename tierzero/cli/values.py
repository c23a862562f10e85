"""What options of several commands may be."""

from __future__ import annotations

import typer


def size(text: str) -> int:
    """Bytes stated by ``text``. Raises BadParameter."""
    from ..config.rules import parse_size

    found = parse_size(text)
    if found is None or found < 0:
        raise typer.BadParameter(f'{text!r} is no size; write bytes, or text such as "16GB" or "512MiB"')
    return found
