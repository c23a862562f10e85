"""The unfinished folder of an import: parts that are whole stay when the import is interrupted, and the next one of the
same files and choices goes on behind them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierzero.checkpoint.manifest import rank_stem
from tierzero.checkpoint.output import give_name, partial_of
from tierzero.tiers.file import sync_path, write_json_flushed

_IDENTITY = "import.json"


def identity_of(files: Iterable[Path], choices: Sequence[Any]) -> str:
    """What makes two imports the same: the files, by name, size and time of change, and ``choices``."""
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(set(files))]
    return json.dumps([stats, list(choices)])


def written_bytes(target: Path, identity: str) -> int:
    """Bytes on the drive of what an interrupted import of this ``identity`` has left."""
    staging = partial_of(target)
    if not _is_of(staging, identity):
        return 0
    return sum(path.stat().st_blocks * 512 for path in staging.glob("*.bin"))


def _is_of(staging: Path, identity: str) -> bool:
    known = staging / _IDENTITY
    return known.is_file() and known.read_text(encoding="utf-8") == identity


@contextmanager
def unfinished_folder(target: Path, identity: str) -> Iterator[Path]:
    """A temporary folder beside ``target``, which gets that name at the end. An error removes it; an interrupt, or the
    end of the process, leaves it for an import of the same ``identity``. Raises OSError.
    """
    staging = partial_of(target)
    known = staging / _IDENTITY
    if not _is_of(staging, identity):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        known.write_text(identity, encoding="utf-8")
    try:
        yield staging
        known.unlink()
        give_name(staging, target)
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def is_whole(staging: Path, part: int) -> bool:
    """Whether this part was written to its end: its index gets its name when its data has been flushed."""
    return (staging / f"{rank_stem(part)}.json").is_file()


def finish_part(staging: Path, part: int, index: dict[str, Any]) -> None:
    """Once the data of a part is on the drive. Raises OSError."""
    write_json_flushed(staging / f"{rank_stem(part)}.json", index)
    sync_path(staging)
