"""Records of sealed states: which slot of each lasting object belongs to one, so that another process can take it up.

Every lasting object has two slots in its file. Whoever seals a state writes a record of the slots that it is in, and
from then on writes each object's next bytes to its other slot. What a record names is whole on the drive for as long
as the record is there: objects are written and flushed before it, and it gets its name by a rename. So a process may
end at any moment.

Of several ranks each has records of its own. A rank lets go of its last but one only when all ranks have written their
last; whatever moment they end at, there is a newest state that all of them have.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierzero.checked_json import check_json, read_json, write_json
from tierzero.errors import CheckpointError, ConfigError

_NAME = re.compile(r"sealed-([0-9]{8,})\.json")
FORMAT = "tierzero-sealed"
VERSION = 1


@dataclass(frozen=True)
class SealRecord:
    """One sealed state of one rank. ``number`` counts seals; all ranks give the same state the same number."""

    number: int
    layout: dict[str, Any]
    """See `TieredStore.layout`."""
    slots: list[tuple[int, int]]
    """Slot and checksum of every lasting object, in order."""
    content: dict[str, Any]
    """What belongs to the state beside the objects; anything JSON can hold."""


def write_record(folder: Path, record: SealRecord) -> None:
    """The record is there, whole and on the drive, when this returns. Raises OSError."""
    path = _path(folder, record.number)
    unfinished = path.with_suffix(".tmp")
    write_json(
        unfinished,
        {
            "format": FORMAT,
            "version": VERSION,
            "number": record.number,
            "layout": record.layout,
            "slots": "".join(str(slot) for slot, _ in record.slots),
            "digests": [f"{digest:016x}" for _, digest in record.slots],
            "content": record.content,
        },
    )
    _sync(unfinished)
    unfinished.rename(path)
    _sync(folder)


def read_records(folder: Path) -> list[SealRecord]:
    """The records that are whole, oldest first; none where there is no such folder. Raises ConfigError for one of a
    newer version.
    """
    found = []
    for number in _numbers(folder):
        path = _path(folder, number)
        with contextlib.suppress(CheckpointError):  # a damaged one is as good as none
            value = read_json(path, "the record")
            check_json(path, value, "the record")
            if value["format"] == FORMAT and value["version"] <= VERSION:
                pairs = zip(value["slots"], value["digests"], strict=True)
                slots = [(int(slot), int(digest, 16)) for slot, digest in pairs]
                found.append(SealRecord(number, value["layout"], slots, value["content"]))
                continue
            raise ConfigError(f"{path}: version {value['version']} is not what this TierZero reads ({VERSION})")
    return found


def remove_records(folder: Path, but: Sequence[int] = ()) -> None:
    """Removes all records but those with these numbers."""
    for number in _numbers(folder):
        if number not in but:
            _path(folder, number).unlink(missing_ok=True)


def _numbers(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _path(folder: Path, number: int) -> Path:
    return folder / f"sealed-{number:08d}.json"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
