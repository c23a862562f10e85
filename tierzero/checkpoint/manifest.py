"""The files of a checkpoint and what stands in them.

A checkpoint is a folder::

    manifest.json        one JSON object, written last: format, parameters by name, optimizer, buffers, extra
    rank-00000.json      the index of a rank's data: for each extent what it holds, where, and its checksum; the
    rank's RNG state rank-00000.bin       the data: raw little-endian elements, each extent on its own 4096-byte
    boundary

An extent holds elements ``[start, stop)`` of one segment ("weight", "lo", "m", "v", "master") of one flattened
parameter. Nothing refers to padding, tiles, units or ranks of the run that wrote it, so any world size and placement
can read it. No pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierzero.errors import CheckpointError

FORMAT = "tierzero-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Extent:
    """Elements ``[start, stop)`` of ``segment`` of ``parameter``: ``nbytes`` at byte ``offset`` of the rank's data
    file; xxh3_64 as hex.
    """

    parameter: str
    segment: str
    start: int
    stop: int
    offset: int
    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class ParameterRecord:
    """What the manifest says of a parameter; ``step`` counts its updates, ``names`` are all names of a tied one."""

    names: list[str]
    shape: list[int]
    dtype: str
    trainable: bool
    step: int


def rank_stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


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


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint. Raises CheckpointError for anything else, a newer format included."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    manifest = read_json(folder / MANIFEST, "the manifest")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST}: format is {manifest.get('format')!r}, not {FORMAT!r}")
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST}: version {version} is newer than this TierZero reads ({VERSION}); upgrade it"
        )
    return manifest


def extents_from(index: Mapping[str, Any], path: Path) -> list[Extent]:
    try:
        return [Extent(**entry) for entry in index["extents"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: the index is damaged: {error}") from None


def record_as_json(record: ParameterRecord | Extent) -> dict[str, Any]:
    return asdict(record)
