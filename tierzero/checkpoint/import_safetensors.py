"""From a folder of safetensors files to a checkpoint that training starts from, piece by piece."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import xxhash

from tierzero.checked_json import CHECKSUM, read_json, write_json
from tierzero.checkpoint.import_parts import finish_part, identity_of, is_whole, unfinished_folder, written_bytes
from tierzero.checkpoint.index import Check, Extent, index_as_json
from tierzero.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    ParameterRecord,
    rank_stem,
    record_as_json,
    written_version,
)
from tierzero.checkpoint.output import (
    ByteProgress,
    OutputFile,
    bytes_of,
    check_space,
    check_unused,
    failures_named,
)
from tierzero.checkpoint.safetensors_files import SafetensorsSource
from tierzero.errors import ConfigError
from tierzero.optim.formats import Segment, StateFormat, state_format, store_master
from tierzero.runtime.draft import DTYPES
from tierzero.tiers import PAGE, page_round
from tierzero.tiers.file import sync_path

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Name patterns of the buffers among the tensors of a folder, which does not say what is one."""
_PIECE = 1 << 20
"""Elements of an extent; the conversion needs some 40 bytes for each."""
_PART = 1 << 30
"""Bytes of tensors after which a data file ends: an import that was interrupted goes on behind the last whole one."""
_MOMENTS = ("m", "v")
"""Segments that are zero at the start."""


def import_safetensors(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    precision: str = "bf16",
    buffers: Sequence[str] = BUFFERS,
    skip: Sequence[str] = (),
    progress: ByteProgress | None = None,
) -> None:
    """Writes a checkpoint to ``out`` that training begins from: the weights of the safetensors files in ``folder``,
    moments of zero, step 0, ``extra`` {"step": 0, "imported": the folder's name}.

    ``precision`` ("bf16", "fp16" or "fp32") is that of the model that will load it; the master is the value in the
    file, exactly, where fp32 can hold it. Tensors whose names match a pattern in ``buffers``, and those not of floating
    point, become buffers of the dtype they have; weights beside running statistics take the dtype of these; those that
    match ``skip`` are left out. Memory is that of a piece of a tensor. The folder appears whole or not at all. An
    import that was interrupted goes on when it is called again.

    Raises ConfigError, before anything is written, for a bad argument or folder, anything that stands at ``out``
    already or too little space (BudgetError), and CheckpointError for a failing drive.
    """
    if precision not in DTYPES:
        raise ConfigError(f"import: precision is {precision!r}; use one of {', '.join(map(repr, DTYPES))}")
    target = Path(out)
    check_unused(target)
    with SafetensorsSource(Path(folder), "import") as source:
        plan = _plan(source, DTYPES[precision], buffers, skip)
        files = [entry.path for entry in source.entries.values()]
        identity = identity_of(files, [VERSION, _PART, _PIECE, precision, list(buffers), list(skip)])
        check_space(target, plan.nbytes - written_bytes(target, identity))
        with failures_named(target), unfinished_folder(target, identity) as staging:
            _write_parts(staging, source, plan, progress)
            extra = {"step": 0, "imported": Path(folder).name}
            _write_manifest(staging, source, plan, extra)


@dataclass(frozen=True)
class _Plan:
    """What becomes of the tensors, by name."""

    source: SafetensorsSource
    formats: dict[str, StateFormat]
    buffers: tuple[str, ...]

    @functools.cached_property
    def parts(self) -> list[list[str]]:
        """Names of the tensors in each data file."""
        found: list[list[str]] = [[]]
        used = 0
        for name in (*self.formats, *self.buffers):
            if found[-1] and used >= _PART:
                found.append([])
                used = 0
            found[-1].append(name)
            used += self.source.entries[name].nbytes
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of data that are written: zeros are holes."""
        entries = self.source.entries
        return sum(
            entries[name].numel * (fmt.weight_dtype.itemsize + sum(part.dtype.itemsize for part in _written(fmt)))
            for name, fmt in self.formats.items()
        ) + sum(entries[name].nbytes for name in self.buffers)


def _written(fmt: StateFormat) -> list[Segment]:
    """The segments beside the weight that are not zero."""
    return [part for part in fmt.optimizer if part.name not in _MOMENTS]


def _plan(source: SafetensorsSource, dtype: torch.dtype, buffers: Sequence[str], skip: Sequence[str]) -> _Plan:
    formats: dict[str, StateFormat] = {}
    found: list[str] = []
    for name, entry in source.entries.items():
        if any(fnmatchcase(name, pattern) for pattern in skip):
            continue
        if entry.dtype.is_complex:
            raise ConfigError(
                f"import: tensor {name!r} is {entry.dtype}, which cannot be trained; leave it out by skip"
            )
        if not entry.dtype.is_floating_point or any(fnmatchcase(name, pattern) for pattern in buffers):
            found.append(name)
            continue
        statistics = source.entries.get(f"{name.rpartition('.')[0]}.running_mean")
        formats[name] = state_format(statistics.dtype if statistics is not None else dtype)
    if not formats:
        raise ConfigError("import: no tensor of the folder is a parameter; see the patterns of buffers and skip")
    return _Plan(source, formats, tuple(found))


class _Data:
    """The data file of a part and its extents."""

    def __init__(self, file: OutputFile) -> None:
        self.file = file
        self.extents: list[Extent] = []
        self.checks: list[Check] = []

    def add(self, name: str, segment: str, start: int, values: torch.Tensor) -> None:
        raw = bytes_of(values)
        self._note(name, segment, start, values.numel(), Check.of(self.file.position, raw))
        self.file.write(raw)
        self.file.skip(page_round(raw.nbytes) - raw.nbytes)

    def add_zeros(self, name: str, segment: str, start: int, numel: int) -> None:
        nbytes = numel * torch.float32.itemsize
        self._note(name, segment, start, numel, Check(self.file.position, nbytes, _digest_of_zeros(nbytes)))
        self.file.skip(page_round(nbytes))

    def _note(self, name: str, segment: str, start: int, numel: int, check: Check) -> None:
        self.extents.append(Extent(name, segment, start, start + numel, check.offset, check.nbytes))
        self.checks.append(check)


@functools.lru_cache(maxsize=64)
def _digest_of_zeros(nbytes: int) -> str:
    return xxhash.xxh3_64_hexdigest(bytes(nbytes))


def _write_parts(staging: Path, source: SafetensorsSource, plan: _Plan, progress: ByteProgress | None) -> None:
    sizes = [sum(source.entries[name].nbytes for name in names) for names in plan.parts]
    done = 0
    for part, names in enumerate(plan.parts):
        if is_whole(staging, part):
            done += sizes[part]
            continue
        with OutputFile(staging / f"{rank_stem(part)}.bin") as file:
            data = _Data(file)
            for nbytes in _add_tensors(data, names, source, plan):
                done += nbytes
                if progress is not None:
                    progress(done, sum(sizes))
        finish_part(staging, part, index_as_json(file.position, {}, data.extents, data.checks))


def _add_tensors(data: _Data, names: Sequence[str], source: SafetensorsSource, plan: _Plan) -> Iterator[int]:
    """Gives the bytes that were read after each piece."""
    for name in names:
        for start, stop in _pieces(source.entries[name].numel):
            values = source.read(name, start, stop)
            if name in plan.formats:
                _add_parameter(data, name, plan.formats[name], start, values)
            else:
                data.add(name, "buffer", start, values)
            yield values.nbytes


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, _PIECE):
        yield start, min(start + _PIECE, numel)


def _add_parameter(data: _Data, name: str, fmt: StateFormat, start: int, values: torch.Tensor) -> None:
    weight = torch.empty(values.numel(), dtype=fmt.weight_dtype, device="cpu")
    parts = {part.name: torch.empty(values.numel(), dtype=part.dtype, device="cpu") for part in _written(fmt)}
    master = values.float()
    store_master(fmt, master, weight, parts)
    if fmt.name == "fp16" and bool((weight.isinf() & master.isfinite()).any()):
        raise ConfigError(f"import: tensor {name!r} has values beyond the range of fp16; use bf16 or fp32")
    data.add(name, "weight", start, weight)
    for segment, stored in parts.items():
        data.add(name, segment, start, stored)
    for segment in _MOMENTS:
        data.add_zeros(name, segment, start, values.numel())


def _write_manifest(staging: Path, source: SafetensorsSource, plan: _Plan, extra: dict[str, Any]) -> None:
    records = {
        name: record_as_json(
            ParameterRecord([name], list(source.entries[name].shape), _name(fmt.weight_dtype), trainable=True, step=0)
        )
        for name, fmt in plan.formats.items()
    }
    buffers = {
        name: {"shape": list(source.entries[name].shape), "dtype": _name(source.entries[name].dtype)}
        for name in plan.buffers
    }
    manifest = {
        "format": FORMAT,
        "version": written_version(records),
        "world_size": len(plan.parts),
        "page": PAGE,
        "parameters": records,
        "buffers": buffers,
        "optimizer": None,
        "extra": extra,
        "indexes": [
            read_json(staging / f"{rank_stem(part)}.json", "the index")[CHECKSUM] for part in range(len(plan.parts))
        ],
    }
    write_json(staging / MANIFEST, manifest)
    sync_path(staging / MANIFEST)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
