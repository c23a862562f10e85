"""What stands sealed in lasting tier files, by their records, without a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierzero.checkpoint.manifest import step_of
from tierzero.errors import CheckpointError, ConfigError
from tierzero.tiers.directory import lasting_folder
from tierzero.tiers.seals import Key, PlacedRecord, newest_everywhere, read_record, record_paths

_FOLDER = re.compile(r"(lasting-[0-9a-f]+)-rank-(\d+)")


@dataclass(frozen=True)
class SealedState:
    """The sealed state of one run as far as it was looked at: ``step`` is None where there is none to go on from."""

    run: str
    """What its folders are named after."""
    folders: list[str]
    """Of the run on each drive that was looked at; the rank follows."""
    ranks: list[int]
    """That have a folder there."""
    problems: list[str]
    step: int | None = None
    number: int | None = None
    """Counts the seals."""
    world_size: int | None = None
    drives: list[int] | None = None
    """Numbers of those that were looked at, from 1."""
    drives_in_all: int | None = None
    layout: dict[str, Any] | None = None
    """As in the record, and the tile in elements."""
    slots: list[int] | None = None
    """Weights and optimizer objects of these ranks in the first slot, and in the second."""

    def as_json(self) -> dict[str, Any]:
        return {"complete": self.step is not None and not self.problems, **asdict(self)}


def sealed_states(paths: Sequence[Path]) -> list[SealedState]:
    """Of each run with lasting tier files on the drives ``paths``: as in tiers.nvme, or the folder of a rank there,
    which then is about its run only. Nothing where there are none. Changes nothing, also beside a run.
    """
    drives: dict[str, list[Path]] = {}
    for path in paths:
        for run in dict.fromkeys(_runs(path)):
            drives.setdefault(run, []).append(_drive(path))
    return [_state(run, list(dict.fromkeys(found))) for run, found in sorted(drives.items())]


def _drive(path: Path) -> Path:
    path = path.absolute()
    return path.parents[1] if _FOLDER.fullmatch(path.name) else path


def _runs(path: Path) -> Iterator[str]:
    one = _FOLDER.fullmatch(path.absolute().name)
    if one is not None:
        yield one[1]
        return
    yield from (found[1] for found in _named(path, "*"))


def _named(drive: Path, run: str) -> Iterator[re.Match[str]]:
    for folder in sorted(lasting_folder(drive, run, 0).parent.glob(f"{run}-rank-*")):
        found = _FOLDER.fullmatch(folder.name)
        if found is not None and folder.is_dir():
            yield found


def _state(run: str, drives: list[Path]) -> SealedState:
    ranks = sorted({int(found[2]) for drive in drives for found in _named(drive, run)})
    problems: list[str] = []
    records = {
        (drive, rank): dict(_records(lasting_folder(drive, run, rank), problems)) for drive in drives for rank in ranks
    }
    folders = [str(lasting_folder(drive, run, 0).parent / f"{run}-rank-") for drive in drives]
    try:
        key = newest_everywhere([set(found) for found in records.values()])
    except LookupError:
        lacking = [lasting_folder(drive, run, rank) for (drive, rank), found in records.items() if not found]
        where = f": {lacking[0]} has none" if lacking else ""
        problems.append(f"the records of the last sealed step are not on all drives and ranks{where}")
        key = None
    if key is None:
        return SealedState(run, folders, ranks, problems)
    newest = {place: found[key] for place, found in records.items()}
    first = next(iter(newest.values()))
    of_each_rank = [newest[drives[0], rank].record.slots for rank in ranks]
    slots = Counter(slot for objects in of_each_rank for slot, _ in objects)
    return SealedState(
        run,
        folders,
        ranks,
        problems,
        step_of(first.record.content["manifest"]),
        key.number,
        first.record.ranks,
        [newest[drive, ranks[0]].drive + 1 for drive in drives],
        first.drives,
        first.record.layout | {"tile": first.record.content["tile"]},
        [slots[0], slots[1]],
    )


def _records(folder: Path, problems: list[str]) -> Iterable[tuple[Key, PlacedRecord]]:
    for path in record_paths(folder):
        try:
            placed = read_record(path)
        except (CheckpointError, ConfigError) as error:
            if path.exists():  # a run beside lets go of old ones
                problems.append(str(error))
        else:
            yield placed.record.key, placed
