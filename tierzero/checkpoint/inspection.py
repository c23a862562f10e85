"""What a checkpoint is, and whether it is whole, without a model."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tierzero.checkpoint.index import Check, RankIndex, arrays_of, named
from tierzero.checkpoint.manifest import MANIFEST, rank_stem, read_index, read_manifest, saved_format, step_of
from tierzero.checkpoint.output import ByteProgress
from tierzero.checkpoint.reader import CheckpointReader
from tierzero.checkpoint.tensors import checkpoint_folder
from tierzero.errors import CheckpointError
from tierzero.optim.formats import AVERAGE

_COMMA = ", "


@dataclass(frozen=True)
class Damage:
    """One thing wrong with a checkpoint: a file as a whole, or ``nbytes`` at byte ``offset`` of it, which hold elements
    of ``segment`` of ``parameter``: several with commas between where one checksum is of them all.
    """

    file: str
    problem: str
    segment: str | None = None
    parameter: str | None = None
    offset: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        if self.segment is None or self.parameter is None:
            return f"{self.file}: {self.problem}"
        what = named([self.segment], self.parameter.split(_COMMA))
        where = f"{what}, {self.nbytes:,} bytes at {self.offset:,}"
        return f"{self.file}: {where}: {self.problem}"


@dataclass(frozen=True)
class TensorSummary:
    """A parameter or, where ``step`` is None, a buffer."""

    name: str
    shape: list[int]
    dtype: str
    trainable: bool
    step: int | None
    tied: list[str]
    """The other names of a tied parameter."""


@dataclass(frozen=True)
class CheckpointSummary:
    """What a checkpoint holds."""

    path: str
    format_version: int
    step: int
    """As the run counts it in ``extra``, else the updates of the parameter that had most."""
    world_size: int
    parameters: int
    elements: int
    """Of all parameters together."""
    dtypes: dict[str, int]
    """Elements by the dtype of the weight."""
    segment_bytes: dict[str, int]
    optimizer: list[dict[str, Any]] | None
    """Hyperparameters and number of parameters of each group."""
    extra: list[str]
    """Its keys, if it is an object."""
    tensors: list[TensorSummary] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointSummary:
    """Reads the manifest and the indexes of the checkpoint at ``path``, and checks that the data files are long enough
    and cover every array; not the data, see `verify_checkpoint`.

    Raises ConfigError where no checkpoint is, and CheckpointError for one that is damaged or incomplete.
    """
    folder = checkpoint_folder(path)
    manifest = read_manifest(folder)
    reader = CheckpointReader(folder, manifest)
    try:
        for segment, name, numel in _arrays(folder, manifest, reader.has_averages):
            reader.check_covers(name, segment, numel)
        by_segment: Counter[str] = Counter()
        for (_, segment), places in reader.by_segment.items():
            by_segment[segment] += sum(place.extent.nbytes for place in places)
    finally:
        reader.close()
    return _summary(folder, manifest, dict(by_segment))


def verify_checkpoint(path: str | os.PathLike[str], progress: ByteProgress | None = None) -> list[Damage]:
    """Reads the checkpoint at ``path`` to its end and returns everything that is wrong with it; nothing: it is whole.

    Memory is the largest range that has a checksum. ``progress`` is told the bytes read and their total. Raises
    ConfigError where no checkpoint is.
    """
    folder = checkpoint_folder(path)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(MANIFEST, _without(folder / MANIFEST, error))]
    found: list[Damage] = []
    ranks: list[_RankData] = []
    for rank in range(int(manifest["world_size"])):
        try:
            ranks.append(_RankData.of(folder, rank, manifest))
        except CheckpointError as error:
            name = f"{rank_stem(rank)}.json"
            found.append(Damage(name, _without(folder / name, error)))
    total, done = sum(data.nbytes for data in ranks), 0
    for data in ranks:
        for nbytes, damage in data.check():
            found += [damage] if damage else []
            done += nbytes
            if progress is not None:
                progress(done, total)
    return found or _uncovered(folder, manifest)


@dataclass(frozen=True)
class _RankData:
    path: Path
    index: RankIndex

    @staticmethod
    def of(folder: Path, rank: int, manifest: Mapping[str, Any]) -> _RankData:
        return _RankData(folder / f"{rank_stem(rank)}.bin", read_index(folder, rank, manifest))

    @property
    def nbytes(self) -> int:
        return sum(check.nbytes for check in self.index.checks)

    def check(self) -> Iterator[tuple[int, Damage | None]]:
        """Bytes of each range with a checksum and what is wrong with it."""
        try:
            with self.path.open("rb") as file:
                for check in self.index.checks:
                    problem = _problem(file, check)
                    os.posix_fadvise(file.fileno(), check.offset, check.nbytes, os.POSIX_FADV_DONTNEED)
                    yield check.nbytes, self._damage(check, problem) if problem else None
        except OSError as error:  # of opening it: those of reading are told by range
            yield self.nbytes, Damage(self.path.name, f"cannot be read: {error.strerror}")

    def _damage(self, check: Check, problem: str) -> Damage:
        segments, parameters = (_COMMA.join(names) for names in arrays_of(self.index.inside(check)))
        return Damage(self.path.name, problem, segments, parameters, check.offset, check.nbytes)


def _problem(file: BinaryIO, check: Check) -> str | None:
    try:
        file.seek(check.offset)
        raw = file.read(check.nbytes)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(raw) < check.nbytes:
        return f"the file ends after {len(raw):,} of them"
    return None if check.matches(raw) else "does not match its checksum"


def _uncovered(folder: Path, manifest: Mapping[str, Any]) -> list[Damage]:
    """Arrays whose extents leave gaps, in a checkpoint whose files are sound."""
    try:
        reader = CheckpointReader(folder, manifest)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    found = []
    try:
        for segment, name, numel in _arrays(folder, manifest, reader.has_averages):
            try:
                reader.check_covers(name, segment, numel)
            except CheckpointError as error:
                found.append(Damage(MANIFEST, _without(folder, error)))
    finally:
        reader.close()
    return found


def _arrays(folder: Path, manifest: Mapping[str, Any], averages: bool) -> Iterator[tuple[str, str, int]]:
    """Segment, name and elements of every array that a checkpoint must hold."""
    for name, record in manifest["parameters"].items():
        numel = math.prod(record["shape"])
        yield "weight", name, numel
        if not record["trainable"]:
            continue
        for part in (*saved_format(name, record, folder).optimizer, *((AVERAGE,) if averages else ())):
            yield part.name, name, part.values(numel)
    for name, record in manifest["buffers"].items():
        yield "buffer", name, math.prod(record["shape"])


def _summary(folder: Path, manifest: Mapping[str, Any], segment_bytes: dict[str, int]) -> CheckpointSummary:
    parameters, extra, groups = manifest["parameters"], manifest["extra"], manifest["optimizer"]
    dtypes: Counter[str] = Counter()
    for record in parameters.values():
        dtypes[record["dtype"]] += math.prod(record["shape"])
    return CheckpointSummary(
        path=str(folder),
        format_version=manifest["version"],
        step=step_of(manifest),
        world_size=manifest["world_size"],
        parameters=len(parameters),
        elements=sum(dtypes.values()),
        dtypes=dict(dtypes),
        segment_bytes=segment_bytes,
        optimizer=None
        if groups is None
        else [{**group["hyperparameters"], "parameters": len(group["parameters"])} for group in groups],
        extra=list(extra) if isinstance(extra, dict) else [],
        tensors=[*_parameter_rows(manifest), *_buffer_rows(manifest)],
    )


def _parameter_rows(manifest: Mapping[str, Any]) -> Iterator[TensorSummary]:
    for name, record in manifest["parameters"].items():
        others = [other for other in record["names"] if other != name]
        yield TensorSummary(name, record["shape"], record["dtype"], record["trainable"], record["step"], others)


def _buffer_rows(manifest: Mapping[str, Any]) -> Iterator[TensorSummary]:
    for name, record in manifest["buffers"].items():
        yield TensorSummary(name, record["shape"], record["dtype"], False, None, [])


def _without(path: Path, error: Exception) -> str:
    return str(error).removeprefix(f"{path}: ")
