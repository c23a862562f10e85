"""JSON files with a checksum of their own, so that a damaged one is told from a good one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from tierzero.errors import CheckpointError

CHECKSUM = "xxh3"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object with its checksum."""
    text = json.dumps({**value, CHECKSUM: _checksum(value)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def check_json(path: Path, value: Mapping[str, Any], what: str) -> None:
    """Raises CheckpointError when an object does not match its checksum."""
    if value.get(CHECKSUM) != _checksum(value):
        raise CheckpointError(f"{path}: {what} does not match its checksum: the file is damaged")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Raises CheckpointError when the file is missing or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {what} is missing; the checkpoint is incomplete or this is not one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {what} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} is not a JSON object")
    return value


def _checksum(value: Mapping[str, Any]) -> str:
    """xxh3_64 of the object in one fixed spelling, the checksum itself left out."""
    plain = json.loads(json.dumps({key: item for key, item in value.items() if key != CHECKSUM}))
    return xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
