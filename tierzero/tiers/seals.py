"""Records of sealed states: which slot of each lasting object belongs to one, so that another process can take it up.

Every lasting object has two slots in its file. Whoever seals a state writes a record of the slots that it is in, and
from then on writes each object's next bytes to its other slot. What a record names is whole on the drive for as long
as the record is there: objects are written and flushed before it, and it gets its name by a rename. So a process may
end at any moment.

Records stand on every drive of every rank, each of its own. One is let go of only when all drives of all ranks have
the next; so whatever moment they end at, there is a newest one that stands everywhere. Kinds of records (`Kind`):

======= ===========================================================================================
BEGUN   number 0, before the first seal: what has no other record everywhere was never sealed
SEALED  a state
ENDED   the run has come to its end and wants its states no more; it is the last to be removed
======= ===========================================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tierzero.checked_json import check_json, read_json
from tierzero.errors import CheckpointError, ConfigError
from tierzero.tiers.file import sync_path, write_json_flushed

_NAME = re.compile(r"sealed-([0-9]{8,})\.json")
FORMAT = "tierzero-sealed"
VERSION = 1


class Kind(Enum):
    """See the module's docstring."""

    BEGUN = "begun"
    SEALED = "sealed"
    ENDED = "ended"


@dataclass(frozen=True)
class Key:
    """What is the same in the records of one state on all drives of all ranks. ``number`` counts seals; ``life`` is
    that of the processes that sealed it: others that went on from an earlier state may have sealed as many.
    """

    number: int
    life: str
    kind: Kind


@dataclass(frozen=True)
class SealRecord:
    """One rank's record."""

    key: Key
    ranks: int
    layout: dict[str, Any]
    """See `TieredStore.layout`."""
    slots: list[tuple[int, int]]
    """Slot and checksum of every lasting object, in order."""
    content: dict[str, Any]
    """What belongs to the state beside the objects; anything JSON can hold."""


@dataclass(frozen=True)
class PlacedRecord:
    """A record, and which of how many drives it is of."""

    record: SealRecord
    drive: int
    drives: int


@dataclass
class Found:
    """The records on one rank's drives: for each drive those that are whole, and what is wrong with others."""

    drives: list[dict[Key, SealRecord]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)


def write_record(folders: Sequence[Path], record: SealRecord) -> None:
    """The record is on every drive, whole and flushed, when this returns. Raises OSError."""
    for drive, folder in enumerate(folders):
        path = _path(folder, record.key.number)
        write_json_flushed(
            path,
            {
                "format": FORMAT,
                "version": VERSION,
                "number": record.key.number,
                "life": record.key.life,
                "kind": record.key.kind.value,
                "ranks": record.ranks,
                "drive": drive,
                "drives": len(folders),
                "layout": record.layout,
                "slots": "".join(str(slot) for slot, _ in record.slots),
                "digests": [f"{digest:016x}" for _, digest in record.slots],
                "content": record.content,
            },
        )
        sync_path(folder)


def read_records(folders: Sequence[Path]) -> Found:
    """What stands in ``folders``, one for each drive in its order. Raises nothing: what is wrong is told."""
    found = Found()
    for drive, folder in enumerate(folders):
        records: dict[Key, SealRecord] = {}
        for path in record_paths(folder):
            try:
                placed = read_record(path)
            except CheckpointError as error:
                found.damaged.append(str(error))
            except ConfigError as error:
                found.misplaced.append(str(error))
            else:
                if (placed.drive, placed.drives) == (drive, len(folders)):
                    records[placed.record.key] = placed.record
                    continue
                found.misplaced.append(
                    f"{path} is of drive {placed.drive + 1} of {placed.drives}, tiers.nvme has it as {drive + 1} "
                    f"of {len(folders)}: give the same paths in the same order"
                )
        found.drives.append(records)
    return found


def record_paths(folder: Path) -> list[Path]:
    """The records in a folder, older ones first."""
    return [_path(folder, number) for number in _numbers(folder)]


def read_record(path: Path) -> PlacedRecord:
    """Raises CheckpointError for a damaged one, ConfigError for one of a newer version."""
    value = read_json(path, "the record")
    check_json(path, value, "the record")
    if value["format"] != FORMAT or value["version"] > VERSION:
        raise ConfigError(f"{path} has version {value['version']}; this TierZero reads {VERSION}: upgrade it")
    pairs = zip(value["slots"], value["digests"], strict=True)
    record = SealRecord(
        Key(value["number"], value["life"], Kind(value["kind"])),
        value["ranks"],
        value["layout"],
        [(int(slot), int(digest, 16)) for slot, digest in pairs],
        value["content"],
    )
    return PlacedRecord(record, value["drive"], value["drives"])


def newest_everywhere(drives: Sequence[set[Key]]) -> Key | None:
    """The state to go on from, given the records on every drive of every rank; None where there was none, or where it
    is not wanted any more. Raises LookupError where records of a state are missing on some of them.
    """
    anywhere = set[Key]().union(*drives)
    everywhere = set.intersection(*drives) if drives else set()
    newest = max(everywhere, key=lambda key: key.number, default=None)
    if newest is not None:
        return newest if newest.kind is Kind.SEALED else None
    if any(key.kind is Kind.ENDED for key in anywhere) or all(key.kind is Kind.BEGUN for key in anywhere):
        return None
    raise LookupError


def remove_records(folders: Sequence[Path], but: int | None = None) -> None:
    """Removes all records but those of this number, older ones first."""
    for folder in folders:
        for number in _numbers(folder):
            if number != but:
                _path(folder, number).unlink(missing_ok=True)


def _numbers(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _path(folder: Path, number: int) -> Path:
    return folder / f"sealed-{number:08d}.json"
