"""From a checkpoint to a Hugging Face style folder of safetensors files, extent by extent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tierzero.checkpoint.output import (
    ByteProgress,
    OutputFile,
    bytes_of,
    check_space,
    failures_named,
    partial_of,
)
from tierzero.checkpoint.safetensors_files import header
from tierzero.checkpoint.tensors import CheckpointTensors, ExportTensor
from tierzero.errors import ConfigError

INDEX = "model.safetensors.index.json"
_COMPANIONS = frozenset(
    [
        *("README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        "chat_template.jinja",
    ]
)
"""What people put beside the weights."""


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    weights: str = "trained",
    max_file_bytes: int = 5_000_000_000,
    only: Sequence[str] = (),
    progress: ByteProgress | None = None,
) -> None:
    """Writes the weights and persistent buffers of a checkpoint to the folder ``out``: as ``model.safetensors`` or,
    above ``max_file_bytes``, as numbered files and an index.

    Names are the model's own, a tied parameter's the canonical one. ``dtype`` None keeps that of each weight; "fp32"
    gives the exact fp32 master, "bf16" and "fp16" are rounded from it where the weight is not of that dtype already.
    With ``weights`` "ema" all of that is of the averages that a run with ``optimizer.ema`` keeps: in a weight's own
    dtype what the model computes with inside `tierzero.averaged`. Buffers are the model's, and keep their dtype.
    ``only``: patterns of the names to write, such as ``["*.lora_*"]``; empty for all.

    Memory is a few extents, and every checksum is verified. A file gets its name when it is complete, and holds the
    identity of the checkpoint: a call after an interruption goes on with the missing ones.

    Raises ConfigError, before anything is written, for a bad argument, other content in ``out`` or too little space
    (BudgetError), and CheckpointError for a damaged checkpoint or a failing drive.
    """
    target = Path(out)
    if max_file_bytes < 1:
        raise ConfigError(f"max_file_bytes is {max_file_bytes}; it must be at least 1")
    with CheckpointTensors(checkpoint, dtype, weights) as source, failures_named(target):
        tensors = _selected(source.tensors, only)
        plan = _plan(source, tensors, dtype, max_file_bytes)
        _check_content(target, plan)
        missing = [file for file in plan.files if not (target / file.name).exists()]
        check_space(target, sum(file.nbytes for file in missing))
        target.mkdir(parents=True, exist_ok=True)
        for name in (*(file.name for file in plan.files), INDEX):
            partial_of(target / name).unlink(missing_ok=True)
        total = sum(tensor.nbytes for tensor in tensors)
        done = total - sum(file.data_nbytes for file in missing)
        for file in missing:
            for nbytes in _write(target / file.name, file, source):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        if plan.index is not None and not (target / INDEX).exists():
            with OutputFile(target / INDEX) as index:
                index.write(plan.index)


@dataclass(frozen=True)
class _File:
    name: str
    header: bytes
    tensors: tuple[ExportTensor, ...]

    @property
    def data_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.data_nbytes


@dataclass(frozen=True)
class _Plan:
    files: tuple[_File, ...]
    index: bytes | None
    """Contents of the index; None where one file holds it all."""


def _selected(tensors: list[ExportTensor], only: Sequence[str]) -> list[ExportTensor]:
    for pattern in only:
        if not any(fnmatchcase(tensor.name, pattern) for tensor in tensors):
            raise ConfigError(f"export: no tensor of the checkpoint matches {pattern!r}; `tierzero inspect` lists them")
    return [tensor for tensor in tensors if not only or any(fnmatchcase(tensor.name, pattern) for pattern in only)]


def _plan(source: CheckpointTensors, tensors: list[ExportTensor], dtype: str | None, most: int) -> _Plan:
    # Equal headers mean equal data: the identity stands for the checkpoint's contents.
    metadata = {"format": "pt", "tierzero.checkpoint": source.identity, "tierzero.dtype": dtype or "stored"}
    if source.weights != "trained":
        metadata["tierzero.weights"] = source.weights
    groups = _divided(tensors, most)
    files = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        ordered = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)  # so that all are aligned
        described = header([(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered], metadata)
        files.append(_File(name, described, tuple(ordered)))
    if len(files) == 1:
        return _Plan(tuple(files), None)
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(file.data_nbytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return _Plan(tuple(files), (json.dumps(index, indent=2) + "\n").encode())


def _divided(tensors: list[ExportTensor], most: int) -> list[list[ExportTensor]]:
    """In order; a tensor larger than ``most`` bytes gets a file of its own."""
    groups: list[list[ExportTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if groups[-1] and used + tensor.nbytes > most:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    return groups


def _check_content(target: Path, plan: _Plan) -> None:
    """Raises ConfigError for anything in ``target`` that neither this export wrote nor usually stands beside it."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ConfigError(f"{target}: stands there and is no folder; choose another path")
    files = {file.name: file for file in plan.files}
    ours = {partial_of(target / name).name for name in (*files, INDEX)} | _COMPANIONS
    for path in sorted(target.iterdir()):
        if path.name in ours:
            continue
        known = path.name in files or (path.name == INDEX and plan.index is not None)
        if not known:
            raise ConfigError(f"{target}: holds {path.name}, which is not of this export; choose an empty folder")
        if not (_is_written(path, files[path.name]) if path.name in files else path.read_bytes() == plan.index):
            raise ConfigError(
                f"{path}: is of another checkpoint, dtype, choice of weights or division into files; remove it or "
                "choose an empty folder"
            )


def _is_written(path: Path, file: _File) -> bool:
    if not path.is_file() or path.stat().st_size != file.nbytes:
        return False
    with path.open("rb") as written:
        return written.read(len(file.header)) == file.header


def _write(path: Path, file: _File, source: CheckpointTensors) -> Iterator[int]:
    """Writes one file, giving the bytes of data after each piece."""
    with OutputFile(path) as output:
        output.write(file.header)
        for tensor in file.tensors:
            for start, stop in source.pieces(tensor):
                raw = bytes_of(source.read(tensor, start, stop))
                output.write(raw)
                yield len(raw)
