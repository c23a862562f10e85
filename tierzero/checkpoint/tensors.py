"""A checkpoint's tensors as other programs know them: by name, in a dtype of choice, read piece by piece."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tierzero.checked_json import CHECKSUM
from tierzero.checkpoint.manifest import MANIFEST, read_manifest, standing_folder
from tierzero.checkpoint.reader import CheckpointReader
from tierzero.errors import CheckpointError, ConfigError
from tierzero.optim.formats import join_master, split_master
from tierzero.runtime.draft import DTYPES

WEIGHTS = ("trained", "ema")
"""Which weights of a checkpoint are exported: those that are trained, or their averages."""
PIECE = 1 << 20
"""Elements of a tensor that are converted and written at a time."""


@dataclass(frozen=True)
class ExportTensor:
    """A parameter or buffer and how it is written. ``names`` are all names of a tied parameter, ``name`` first."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    """As written."""
    stored: torch.dtype
    """Of ``segment`` in the checkpoint."""
    segment: str
    master: str | None
    """The segment that the fp32 master takes beside the weight, where ``dtype`` is made from a master."""
    as_weight: bool = False
    """Values are rounded as a weight is from its master: what is written is what the model computes with."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """As written."""
        return self.numel * self.dtype.itemsize


class CheckpointTensors:
    """An open checkpoint's tensors: parameters in the model's order, then buffers.

    A parameter of floating point is written in the asked dtype, from its fp32 master where it has one; where the
    weight has that dtype already, it is written as it is. Buffers and all else keep theirs.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: str | None, weights: str = "trained") -> None:
        """Opens the checkpoint at ``path``; ``dtype`` is "bf16", "fp16", "fp32" or None (each weight's own).
        ``weights`` is one of `WEIGHTS`; with "ema" the averages are the masters.

        Raises ConfigError for another dtype, averages that are not there or a path without a checkpoint, and
        CheckpointError for an incomplete one.
        """
        self.folder = checkpoint_folder(path)
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; use one of {', '.join(map(repr, DTYPES))}, or none to keep it")
        if weights not in WEIGHTS:
            raise ConfigError(f"weights is {weights!r}; use one of {', '.join(map(repr, WEIGHTS))}")
        self.weights = weights
        self.manifest = read_manifest(self.folder)
        self.identity: str = self.manifest[CHECKSUM]
        """Of the checkpoint's whole contents: the manifest's checksum covers those of the indexes, these the data's."""
        self.reader = CheckpointReader(self.folder, self.manifest)
        try:
            if weights == "ema" and not self.reader.has_averages:
                raise ConfigError(f"{self.folder}: has no averages of the weights; runs with optimizer.ema save them")
            self.tensors = [*self._parameters(dtype, weights == "ema"), *self._buffers()]
            for tensor in self.tensors:
                self.reader.check_covers(tensor.name, tensor.segment, tensor.numel)
                if tensor.master is not None:
                    self.reader.check_covers(tensor.name, tensor.master, tensor.numel)
        except BaseException:
            self.reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.close()

    def _parameters(self, dtype: str | None, averages: bool) -> Iterator[ExportTensor]:
        for name, record in self.manifest["parameters"].items():
            stored = self._dtype(name, record)
            written = DTYPES[dtype] if dtype is not None and stored.is_floating_point else stored
            names, shape = tuple(record["names"]), tuple(record["shape"])
            if averages and record["trainable"]:
                yield ExportTensor(name, names, shape, written, torch.float32, "ema", None, as_weight=written == stored)
                continue
            master = None
            if written != stored:
                master = next((kind for kind in ("lo", "master") if (name, kind) in self.reader.by_segment), None)
            yield ExportTensor(name, names, shape, written, stored, "weight", master)

    def _buffers(self) -> Iterator[ExportTensor]:
        for name, record in self.manifest["buffers"].items():
            stored = self._dtype(name, record)
            yield ExportTensor(name, (name,), tuple(record["shape"]), stored, stored, "buffer", None)

    def _dtype(self, name: str, record: dict[str, Any]) -> torch.dtype:
        found = getattr(torch, str(record["dtype"]), None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(
                f"{self.folder / MANIFEST}: {name!r} has the dtype {record['dtype']!r}, which this PyTorch lacks"
            )
        return found

    def pieces(self, tensor: ExportTensor) -> Iterator[tuple[int, int]]:
        """Elements ``[start, stop)`` that together are the flattened tensor, in order."""
        for start in range(0, tensor.numel, PIECE):
            yield start, min(start + PIECE, tensor.numel)

    def read(self, tensor: ExportTensor, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the flattened tensor as they are written, 1-D, in host memory.

        Raises CheckpointError for damage, and ConfigError for a value that is finite and would not be so in fp16.
        """
        values = self._segment(tensor, tensor.segment, tensor.stored, start, stop)
        if tensor.master == "lo":
            values = join_master(values, self._segment(tensor, "lo", torch.int16, start, stop))
        elif tensor.master is not None:
            values = self._segment(tensor, tensor.master, torch.float32, start, stop)
        if values.dtype == tensor.dtype:
            return values
        if tensor.as_weight and tensor.dtype is torch.bfloat16:
            written = torch.empty_like(values, dtype=tensor.dtype)
            split_master(values, written, torch.empty_like(values, dtype=torch.int16))
            return written
        written = values.to(tensor.dtype)
        if tensor.dtype is torch.float16 and bool((written.isinf() & values.isfinite()).any()):
            raise ConfigError(f"parameter {tensor.name!r} has values beyond the range of fp16; use bf16 or fp32")
        return written

    def _segment(self, tensor: ExportTensor, segment: str, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=dtype, device="cpu")
        if start < stop:
            try:
                self.reader.read(tensor.name, segment, start, values)
            except OSError as error:
                raise CheckpointError(f"{self.folder}: {segment} of {tensor.name!r} cannot be read: {error}") from error
        return values


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of the checkpoint at ``path``. Raises ConfigError where there is none."""
    folder = standing_folder(Path(path))
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such checkpoint folder")
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"{folder}: is no checkpoint, as it has no {MANIFEST}; name the folder of one")
    return folder
