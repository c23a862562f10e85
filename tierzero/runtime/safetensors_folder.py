"""A model's first values from a folder of safetensors files, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.runtime.access import persistent_buffers
from tierzero.runtime.own_values import check_buffers
from tierzero.runtime.stored_names import Origins

_PLAIN_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))


def _opened(path: Path) -> Any:
    """The safetensors file, open. Raises ConfigError for what is none, or was cut short."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"init: {path} cannot be read as a safetensors file: {error}") from None


class SafetensorsFolder:
    """Tensors by name in a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"init: {folder} is not a folder; name one that holds *.safetensors files")
        self._folder = folder
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            return self._from_index(index)
        found: dict[str, Path] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            with _opened(path) as tensors:
                found.update(dict.fromkeys(tensors.keys(), path))
        if not found:
            raise ConfigError(f"init: {self._folder} holds no *.safetensors file")
        return found

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            found = {name: self._folder / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"init: {index} is no index of safetensors files: {error!r}") from None
        missing = [path for path in set(found.values()) if not path.is_file()]
        if missing:
            raise ConfigError(f"init: {missing[0]} is missing; {index.name} names it")
        return found

    def holds(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._described(name)[0]

    def kind(self, name: str) -> str:
        """The element type as the format calls it, such as "BF16"."""
        return self._described(name)[1]

    def _described(self, name: str) -> tuple[tuple[int, ...], str]:
        with _opened(self._file_of[name]) as tensors:
            if name not in tensors.keys():  # noqa: SIM118 (no mapping)
                raise ConfigError(f"init: {self._file_of[name]} has no tensor {name!r}, against the folder's index")
            found = tensors.get_slice(name)
            return tuple(found.get_shape()), str(found.get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        with _opened(self._file_of[name]) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
            return tensor


class ModelValues:
    """The folder's tensors by the names that a model has for them."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._folder = folder
        self._source = SafetensorsFolder(folder)
        self._origins = Origins(model, self._source._file_of, self._source.shape)

    def check(self, model: nn.Module) -> None:
        """Raises ConfigError for a parameter whose tensor is missing, for one and for a buffer of another shape, and
        for a buffer that has no values here either.
        """
        for names, parameter in _named_parameters(model):
            if not self._fits(names, parameter):
                raise ConfigError(
                    f"init: {self._folder} has no tensor {names[0]!r}; it must hold every parameter of the model"
                )
        check_buffers(model, [name for name, buffer in persistent_buffers(model) if self._fits((name,), buffer)])

    def _fits(self, names: tuple[str, ...], tensor: torch.Tensor) -> bool:
        """False where the folder does not have it. Raises ConfigError where it has something else."""
        origin = self._origins.of(names)
        if origin is not None and origin.shape != tuple(tensor.shape):
            raise ConfigError(
                f"init: {origin.names[0]!r} in {self._folder} has shape {origin.shape}, the model's {names[0]!r} has "
                f"{tuple(tensor.shape)}"
            )
        for name in origin.names if origin is not None else ():
            kind = self._source.kind(name)
            if (kind in _PLAIN_FLOATS) != tensor.is_floating_point():
                raise ConfigError(
                    f"init: {name!r} in {self._folder} is {kind}, the model's {names[0]!r} is {tensor.dtype}; weights "
                    "in a quantized form are not unpacked, store them as BF16, F16 or F32"
                )
        return origin is not None

    def load(self, names: tuple[str, ...]) -> torch.Tensor:
        origin = self._origins.of(names)
        assert origin is not None
        return origin.make([self._source.tensor(name) for name in origin.names])

    def load_buffers(self, model: nn.Module) -> None:
        """Persistent buffers that the folder has values for."""
        for name, buffer in persistent_buffers(model):
            if self._origins.of((name,)) is not None:
                buffer.copy_(self.load((name,)))


def _named_parameters(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for parameter, names in names_of.items():
        yield tuple(names), parameter
