"""The files of a checkpoint and what stands in them.

A checkpoint is a folder::

    manifest.json        one JSON object, written last: format, parameters by name, optimizer, buffers, extra
    rank-00000.json      the index of a rank's data (`tierzero.checkpoint.index`) and the rank's RNG state
    rank-00000.bin       the data: raw little-endian elements; version 1 has each extent on its own 4096-byte boundary

Each JSON file ends with a checksum of itself, and the manifest lists those of the indexes: files that are damaged, or
come from different checkpoints, are told by that.

An extent holds elements ``[start, stop)`` of one segment ("weight", "lo", "m", "v", "master", ...) of one flattened
parameter. Nothing refers to padding, tiles, units or ranks of the run that wrote it, so any world size and placement
can read it. No pickle anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from tierzero.checked_json import CHECKSUM, check_json, read_json
from tierzero.checkpoint.index import RankIndex
from tierzero.errors import CheckpointError
from tierzero.optim.formats import Moments, StateFormat, state_format

FORMAT = "tierzero-checkpoint"
VERSION = 4
"""The newest. A checkpoint that needs nothing of it says that it is of version 3, which earlier releases read."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ParameterRecord:
    """What the manifest says of a parameter; ``step`` counts its updates, ``names`` are all names of a tied one,
    ``moments`` is how those are stored (left out where "fp32").
    """

    names: list[str]
    shape: list[int]
    dtype: str
    trainable: bool
    step: int
    moments: Moments = "fp32"


def rank_stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def replaced_folder(target: Path) -> Path:
    """Where the checkpoint at ``target`` stands while a new one takes its place."""
    return target.with_name(f".{target.name}.replaced")


def standing_folder(target: Path) -> Path:
    """``target``, or where its checkpoint was left by a process that ended while it replaced it."""
    replaced = replaced_folder(target)
    return replaced if not target.exists() and (replaced / MANIFEST).exists() else target


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
    check_json(folder / MANIFEST, manifest, "the manifest")
    return manifest


def read_index(folder: Path, rank: int, manifest: Mapping[str, Any]) -> RankIndex:
    """The index of a rank's data. Raises CheckpointError when it is missing, damaged, or of another checkpoint."""
    path = folder / f"{rank_stem(rank)}.json"
    index = read_json(path, f"the index of rank {rank}")
    check_json(path, index, f"the index of rank {rank}")
    if index[CHECKSUM] != manifest["indexes"][rank]:
        raise CheckpointError(f"{path}: the index of rank {rank} belongs to another checkpoint than {MANIFEST}")
    return RankIndex.parsed(index, manifest["version"], path)


def step_of(manifest: Mapping[str, Any]) -> int:
    """As the run counts it in ``extra``, else the updates of the parameter that had most."""
    extra = manifest["extra"]
    if isinstance(extra, dict) and isinstance(extra.get("step"), int):
        return int(extra["step"])
    return max((int(record["step"]) for record in manifest["parameters"].values()), default=0)


def record_as_json(record: ParameterRecord) -> dict[str, Any]:
    found = asdict(record)
    if record.moments == "fp32":
        del found["moments"]
    return found


def written_version(parameters: Mapping[str, Mapping[str, Any]]) -> int:
    """Of a checkpoint with these records: the first that has all that they say."""
    return 4 if any("moments" in record for record in parameters.values()) else 3


def saved_format(name: str, record: Mapping[str, Any], folder: Path) -> StateFormat:
    """How the state of a trained parameter is stored in a checkpoint. Raises CheckpointError where nobody knows."""
    moments = record.get("moments", "fp32")
    if moments not in get_args(Moments):
        raise CheckpointError(f"{folder / MANIFEST}: parameter {name!r} has moments of {moments!r}, which are unknown")
    return state_format(getattr(torch, record["dtype"]), moments)
