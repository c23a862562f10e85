"""Safetensors files: headers that are written, and folders that are read range by range.

A file is the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor), and
the data.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.safetensors_folder import SafetensorsFolder

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """A file's bytes before the data, a multiple of 8; the tensors' data must follow in this order, without gaps.

    Raises ConfigError for a dtype that the format lacks.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_NAMES:
            raise ConfigError(f"{name!r} is {dtype}, which safetensors files cannot hold")
        stop = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: ``offset`` in bytes from the file's start."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SafetensorsSource(SafetensorsFolder):
    """A folder of safetensors files whose tensors are read in ranges: a file is never mapped, so that memory is that
    of the range.

    Raises ConfigError, starting with ``task`` ("import"), for a folder without such files or with broken ones.
    """

    def __init__(self, folder: Path, task: str) -> None:
        with _said_by(task):
            super().__init__(folder)
            self.entries: dict[str, Entry] = {}
            """By name, in the order of the files."""
            for path in dict.fromkeys(self._file_of.values()):
                held = dict(_entries(path))
                wanted = [name for name, file in self._file_of.items() if file == path]
                missing = next((name for name in wanted if name not in held), None)
                if missing is not None:
                    raise ConfigError(f"{path} has no tensor {missing!r}, against the folder's index")
                self.entries |= {name: held[name] for name in held if self._file_of.get(name) == path}
        self._task = task
        self._open: tuple[Path, io.BufferedReader] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the flattened tensor, 1-D, in its own dtype. Raises CheckpointError for a file
        that cannot be read or was cut meanwhile.
        """
        entry = self.entries[name]
        values = torch.empty(stop - start, dtype=entry.dtype, device="cpu")
        if not values.numel():
            return values
        offset = entry.offset + start * entry.dtype.itemsize
        try:
            file = self._file(entry.path)
            file.seek(offset)
            count = file.readinto(values.view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(f"{self._task}: {entry.path} cannot be read: {error}") from error
        if count != values.nbytes:
            raise CheckpointError(f"{self._task}: {entry.path} ends inside the tensor {name!r}")
        os.posix_fadvise(file.fileno(), offset, values.nbytes, os.POSIX_FADV_DONTNEED)
        return values

    def _file(self, path: Path) -> io.BufferedReader:
        if self._open is None or self._open[0] != path:
            self._close()
            self._open = (path, path.open("rb"))
        return self._open[1]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


@contextmanager
def _said_by(task: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{task}: {str(error).removeprefix('init: ')}") from None


def _entries(path: Path) -> Iterator[tuple[str, Entry]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):  # which checks that header and file fit each other
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a safetensors file: {error}") from None
    for name, record in found.items():
        if name == "__metadata__":
            continue
        if record["dtype"] not in _BY_NAME:
            raise ConfigError(f"{path}: tensor {name!r} has the dtype {record['dtype']}, which cannot be read")
        start = 8 + length + record["data_offsets"][0]
        yield name, Entry(path, _BY_NAME[record["dtype"]], tuple(record["shape"]), start)
