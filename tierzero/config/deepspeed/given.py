"""What a DeepSpeed configuration says: reading it, and walking over its keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ...errors import ConfigError
from .rules import Path

_DEEPEST = 50
_LONGEST_NUMBER = 1024


@dataclass(frozen=True)
class Given:
    """A configuration as it was given. ``base`` is the folder that relative paths in it are relative to."""

    values: Mapping[str, Any]
    source: str
    base: FilePath


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> Given:
    """Reads a JSON file, or takes its content as a dict. Raises ConfigError."""
    if isinstance(config, Mapping):
        return Given(_checked(config, "deepspeed config"), "deepspeed config", FilePath.cwd())
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"a DeepSpeed configuration is a path or a dict, not {type(config).__name__}")
    file = FilePath(config)
    try:
        values = json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the configuration: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a JSON file is expected") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply for a configuration") from None
    except ValueError as error:  # of a path too, with a null character in it
        raise ConfigError(f"{file}: not valid JSON: {' '.join(str(error).split())}") from None
    return Given(_checked(values, str(file)), str(file), FilePath(os.path.abspath(file)).parent)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r} is given twice in one object")
    return found


def _checked(values: Any, source: str) -> Mapping[str, Any]:
    """Refuses what no configuration holds, so that nothing behind has to be wary of it."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: a DeepSpeed configuration is a JSON object, not {type(values).__name__}")
    pending: list[tuple[Path, Any]] = [((), values)]
    while pending:
        path, value = pending.pop()
        if len(path) > _DEEPEST:
            raise ConfigError(f"{source}: {path[0]}: nested too deeply for a configuration")
        if isinstance(value, Mapping):
            wrong = next((key for key in value if not isinstance(key, str)), None)
            if wrong is not None:
                raise ConfigError(f"{source}: {'.'.join(path) or 'top level'}: the key {wrong!r} is not text")
            pending.extend(((*path, key), below) for key, below in value.items())
        elif isinstance(value, (list, tuple)):
            pending.extend(((*path, "[]"), below) for below in value)
        elif isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
            raise ConfigError(f"{source}: {'.'.join(path)}: a number of {value.bit_length()} bits is none to work with")
        elif value is not None and not isinstance(value, (str, int, float, os.PathLike)):
            raise ConfigError(f"{source}: {'.'.join(path)}: {type(value).__name__} is nothing that JSON holds")
    return values


def keys_given(values: Mapping[str, Any], stops: frozenset[Path]) -> Iterator[tuple[Path, Any]]:
    """Every key with its value, in the order of the file. An object is walked into, unless it is empty or stands at one
    of ``stops``, keys whose values are no sections.
    """
    pending: list[tuple[Path, Any]] = [((key,), value) for key, value in reversed(list(values.items()))]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping) and value and path not in stops:
            pending.extend(((*path, key), below) for key, below in reversed(list(value.items())))
        else:
            yield path, value
