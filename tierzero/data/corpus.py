"""Which files are trained on and which validate."""

from __future__ import annotations

import glob
import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..errors import ConfigError
from .source import TokenSource
from .stream import TokenFile, TokenStream

_DEFAULT_BYTES = 48 * 10**6
_HELD_OUT_ONE_IN = 20
_MOST_HELD_OUT = 10**7
# Folders that are not the library itself: installed packages, its tests, generated tables.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class DataSplit:
    """Training data, validation data, one line about them, and whether the tokens are bytes of text."""

    train: TokenSource
    validation: TokenSource
    description: str
    is_text: bool


def open_data(config: Config) -> DataSplit:
    """Finds and checks the files of ``config.data``; nothing is read into memory. Raises ConfigError."""
    data, vocab = config.data, config.model.vocab
    if data.path is None:
        training, validation, name = *_standard_library(), "the Python standard library's sources"
    else:
        training = TokenStream(_files(data.path, "data.path", data.dtype, vocab), "data.path")
        validation, name = training, f"{len(training.files)} file{'s' if len(training.files) != 1 else ''}"
    if data.validation is not None:
        validation = TokenStream(_files(data.validation, "data.validation", data.dtype, vocab), "data.validation")
    elif data.path is not None:
        training, validation = _hold_out(training, config.train.seq_len)
    if len({stream.files[0].dtype.itemsize == 1 for stream in (training, validation) if stream.files}) > 1:
        raise ConfigError(
            "data.validation: one of data.path and data.validation is text, the other token ids; give one kind"
        )
    for stream in (training, validation):
        stream.check_vocabulary(vocab)

    def source(stream: TokenStream) -> TokenSource:
        train = config.train
        return TokenSource(stream, seq_len=train.seq_len, batch_size=train.batch_size, vocab=vocab, seed=train.seed)

    line = f"{name}: {len(training):,} tokens to train on, {len(validation):,} to validate"
    is_text = all(file.dtype.itemsize == 1 for file in (*training.files, *validation.files))
    return DataSplit(source(training), source(validation), line, is_text)


def _hold_out(stream: TokenStream, seq_len: int) -> tuple[TokenStream, TokenStream]:
    """Keeps the last twentieth (at least one sequence) apart for validation."""
    least = seq_len + 1
    if len(stream) < 2 * least:
        raise ConfigError(
            f"{stream.key}: {len(stream)} tokens are too few, training and validation take {least} each "
            "(train.seq_len + 1); add data, lower train.seq_len, or set data.validation"
        )
    kept = min(max(least, len(stream) // _HELD_OUT_ONE_IN), _MOST_HELD_OUT)
    cut = len(stream) - kept
    return stream.part(0, cut), stream.part(cut, len(stream))


def _standard_library() -> tuple[TokenStream, TokenStream]:
    """The running Python's own sources. A file's path decides by hash whether it trains or validates."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[int, str]] = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name not in _SKIPPED_FOLDERS)
        for name in names:
            if name.endswith(".py"):
                relative = os.path.relpath(os.path.join(folder, name), root)
                found.append((zlib.crc32(Path(relative).as_posix().encode()), relative))
    if not found:
        raise ConfigError(
            f"data.path: not set, and this Python has no sources in {root}; set data.path to text files of your own"
        )
    # In the order of the hash, so that the bound cuts no particular part of the library.
    training: list[TokenFile] = []
    held_out: list[TokenFile] = []
    room = _DEFAULT_BYTES
    for mark, relative in sorted(found):
        file = TokenFile.open(root / relative, np.dtype(np.uint8), "data.path")
        room -= file.tokens
        if room < 0:
            break
        (held_out if mark % _HELD_OUT_ONE_IN == 0 else training).append(file)
    by_path = [sorted(files, key=lambda file: file.path) for files in (training, held_out)]
    return TokenStream(by_path[0], "data.path"), TokenStream(by_path[1], "data.validation")


def _files(patterns: Sequence[str], key: str, dtype: str, vocab: int) -> list[TokenFile]:
    paths: dict[Path, None] = {}
    for pattern in patterns:
        paths.update(dict.fromkeys(_matches(pattern, key)))
    binary = [path for path in paths if path.suffix == ".bin"]
    if binary and len(binary) != len(paths):
        other = next(path for path in paths if path.suffix != ".bin")
        raise ConfigError(f"{key}: mixes token files ({binary[0]}) and text ({other}); give one kind")
    element: np.dtype[Any] = np.dtype(np.uint8)
    if binary:
        named = dtype if dtype != "auto" else ("uint16" if vocab <= 2**16 else "uint32")
        element = np.dtype(named).newbyteorder("<")
    files = [TokenFile.open(path, element, key) for path in paths]
    if dtype == "auto":
        _check_width(files, key)
    if not any(file.tokens for file in files):
        named = f"{files[0].path} is" if len(files) == 1 else f"all {len(files)} files are"
        raise ConfigError(f"{key}: {named} empty; add data")
    return files


def _check_width(files: Sequence[TokenFile], key: str) -> None:
    """Ids below 65,536 that were written as uint32 read as uint16 with a zero after each."""
    for file in files:
        if file.dtype.itemsize != 2:
            return
        head = np.fromfile(file.path, file.dtype, min(file.tokens, 4096))
        if len(head) >= 8 and not head[1::2].any() and head[::2].any():
            raise ConfigError(
                f"{key}: {file.path} looks like uint32 token ids (every second uint16 is 0); set data.dtype"
            )


def _matches(pattern: str, key: str) -> list[Path]:
    """The files that ``pattern`` names, sorted. A path that exists is taken as it is, whatever signs it contains."""
    if os.path.isdir(pattern):
        raise ConfigError(f"{key}: {pattern} is a folder; name the files in it, such as {pattern.rstrip('/')}/**/*.txt")
    if os.path.exists(pattern):
        return [Path(pattern)]
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    if not found:
        what = "no file matches" if glob.has_magic(pattern) else "no such file:"
        raise ConfigError(f"{key}: {what} {pattern}")
    return found
