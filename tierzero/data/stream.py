"""Files seen as one long stream of token ids, without reading them into memory."""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

# A corpus may have more files than a process may have open.
_OPEN_FILES = 64
_SCAN_BYTES = 256 * 2**20
_SCAN_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class TokenFile:
    """A file of flat token ids: ``tokens`` elements of ``dtype``. A text file is uint8."""

    path: Path
    dtype: np.dtype[Any]
    tokens: int

    @classmethod
    def open(cls, path: Path, dtype: np.dtype[Any], key: str) -> TokenFile:
        """Checks that ``path`` can be read and holds whole tokens. Raises ConfigError naming the config ``key``."""
        try:
            with open(path, "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"{key}: cannot read {path}: {error.strerror or error}") from None
        if nbytes % dtype.itemsize:
            raise ConfigError(
                f"{key}: {path} has {nbytes} bytes, which is no whole number of {dtype} token ids; "
                "set data.dtype to the type that the file was written with"
            )
        return cls(path, dtype, nbytes // dtype.itemsize)


class TokenStream:
    """The tokens of ``files`` one after another, memory-mapped a few files at a time.

    ``start`` and ``stop`` select a part of it (in tokens); ``key`` is the config key to name in errors.
    """

    def __init__(self, files: Sequence[TokenFile], key: str, start: int = 0, stop: int | None = None) -> None:
        self.files = tuple(files)
        self.key = key
        self._ends: list[int] = []
        total = 0
        for file in self.files:
            total += file.tokens
            self._ends.append(total)
        self.start = start
        self.stop = total if stop is None else stop
        if not 0 <= self.start <= self.stop <= total:
            raise ValueError(f"part {start}..{stop} of a stream of {total} tokens")
        self._maps: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> TokenStream:
        """The tokens ``start`` to ``stop`` of this stream."""
        return TokenStream(self.files, self.key, self.start + start, self.start + stop)

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """``count`` token ids from position ``start``, int64. Raises ConfigError when a file has changed."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start}..{start + count} of a stream of {len(self)}")
        found = np.empty(count, dtype=np.int64)
        done = 0
        at = self.start + start
        number = bisect.bisect_right(self._ends, at)
        while done < count:
            first = self._ends[number] - self.files[number].tokens
            piece = self._map(number)[at - first : at - first + count - done]
            found[done : done + len(piece)] = piece
            done += len(piece)
            at += len(piece)
            number += 1
        return found

    def _map(self, number: int) -> npt.NDArray[Any]:
        mapped = self._maps.get(number)
        if mapped is None:
            file = self.files[number]
            if file.tokens == 0:
                return np.empty(0, dtype=file.dtype)
            try:
                mapped = np.memmap(file.path, dtype=file.dtype, mode="r", shape=(file.tokens,))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.key}: {file.path} changed while in use: {error}") from None
            self._maps[number] = mapped
            if len(self._maps) > _OPEN_FILES:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(number)
        return mapped

    def check_vocabulary(self, vocab: int) -> None:
        """Raises ConfigError when a token id does not fit ``vocab``.

        Large corpora are sampled evenly (256 MiB); batches are checked again when they are read.
        """
        suspects = [file for file in self.files if np.iinfo(file.dtype).max >= vocab]
        total = sum(file.tokens * file.dtype.itemsize for file in suspects)
        skip = max(1, -(-total // _SCAN_BYTES))
        for file in suspects:
            # Read, not mapped: a scan through a mapping would leave the whole file in the resident set.
            with open(file.path, "rb") as handle:
                for offset in range(0, file.tokens * file.dtype.itemsize, _SCAN_BLOCK * skip):
                    handle.seek(offset)
                    block = np.frombuffer(handle.read(_SCAN_BLOCK), dtype=file.dtype)
                    largest = int(block.max()) if block.size else 0
                    if largest >= vocab:
                        position = offset // file.dtype.itemsize + int(np.argmax(block))
                        raise unfit_token(self.key, largest, vocab, f"{file.path}, token {position}")


def unfit_token(key: str, token: int, vocab: int, where: str) -> ConfigError:
    """The error for a token id outside the vocabulary."""
    other = ", or data.dtype if the file has another type" if token > 255 else ""
    return ConfigError(
        f"{key}: token id {token} ({where}) does not fit model.vocab = {vocab}; "
        f"set model.vocab to at least {token + 1}{other}"
    )
