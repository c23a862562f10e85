"""Weights from a folder of safetensors files into the tiers of a sharded model, tile by tile."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from tierzero.checkpoint.agree import together
from tierzero.checkpoint.safetensors_files import SafetensorsSource
from tierzero.checkpoint.save import finish_checkpoint
from tierzero.errors import ConfigError
from tierzero.optim.average import begin_average
from tierzero.optim.formats import store_master
from tierzero.runtime.access import persistent_buffers, sharded_model
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.state import GroupState, Piece, SlotState, Tile, tile_pieces
from tierzero.runtime.stored_names import Origins
from tierzero.runtime.tile_io import OpenTile, Parts

_PIECE = 1 << 20
"""Elements that are converted at a time."""
_TASK = "load_safetensors"


def load_safetensors(model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Takes the weights of a sharded model, and those persistent buffers that are there, from the safetensors files in
    ``folder``; optimizer moments and step counts become zero. Every rank must call it, and reads its part.

    Names are those of ``model.state_dict()``, for a tied parameter any of its names; of models of the transformers
    library as `tierzero.shard` takes them. Values take the model's dtypes,
    the master the value in the file. Memory beside the tiers' own is a piece of a tensor. With ``strict`` a tensor that
    the model lacks is an error.

    Raises ConfigError, before anything is changed, for a folder that does not fit the model. A failure while reading
    raises CheckpointError, and so does then every use of the model until something has been loaded whole.
    """
    runtime = runtime_of(model)
    runtime.require_open(whole=False)
    model = sharded_model(runtime, model)
    finish_checkpoint(model)
    path = Path(folder)
    sources: list[_Fitting] = []
    together(runtime, path, "read it", lambda: sources.append(_Fitting(runtime, model, path, strict)))
    with sources[0].source, runtime.whole_state.replacing(path):
        together(runtime, path, "read it", lambda: _load(runtime, model, sources[0]))
        for slot in runtime.slots():
            slot.step = 0
            slot.state_of = None


class _Fitting:
    """A folder that was checked against the model. Raises ConfigError where it does not fit."""

    def __init__(self, runtime: Runtime, model: nn.Module, folder: Path, strict: bool) -> None:
        self.source = SafetensorsSource(folder, _TASK)
        self._folder = folder
        self._origins = Origins(model, self.source.entries, lambda name: self.source.entries[name].shape)
        self.name_of: dict[SlotState, str] = {slot: self._check_parameter(slot) for slot in runtime.slots()}
        self.buffers: list[tuple[str, torch.Tensor]] = []
        for name, buffer in persistent_buffers(model):
            found = self._name((name,))
            if found is not None:
                self.buffers.append((found, buffer))
                self._check(found, tuple(buffer.shape), buffer.dtype)
        if strict:
            self._check_unknown(model)

    def _name(self, names: tuple[str, ...]) -> str | None:
        origin = self._origins.of(names)
        if origin is not None and origin.join is not None:
            raise ConfigError(
                f"{_TASK}: {self._folder} has {names[0]!r} in another form, as {origin.names[0]!r} and alike; give the "
                "folder as init to tierzero.shard, which converts them"
            )
        return None if origin is None else origin.names[0]

    def _check_parameter(self, slot: SlotState) -> str:
        name = self._name(slot.slot.names)
        if name is None:
            raise ConfigError(f"{_TASK}: {self._folder} has no tensor {slot.name!r}; it must hold every parameter")
        self._check(name, tuple(slot.slot.shape), slot.group.layout.dtype)
        return name

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        entry = self.source.entries[name]
        if entry.shape != shape:
            raise ConfigError(f"{_TASK}: {name!r} in {entry.path} has shape {entry.shape}, the model's has {shape}")
        if (entry.dtype.is_floating_point and entry.dtype.itemsize > 1) != dtype.is_floating_point:
            raise ConfigError(
                f"{_TASK}: {name!r} in {entry.path} is {entry.dtype}, the model's is {dtype}; weights in a quantized "
                "form are not unpacked, store them as bf16, fp16 or fp32"
            )

    def _check_unknown(self, model: nn.Module) -> None:
        """Beside the tensors in use, the other names of tied ones and buffers that are not loaded may be there."""
        known = {*self.name_of.values(), *[name for name, _ in self.buffers]}
        known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        unknown = [name for name in self.source.entries if name not in known]
        if unknown:
            raise ConfigError(
                f"{_TASK}: {self._folder} has tensor {unknown[0]!r}, which the model lacks ({len(unknown)} in all); it "
                "is of another model, or pass strict=False"
            )


def _load(runtime: Runtime, model: nn.Module, fitting: _Fitting) -> None:
    for group in runtime.groups():
        group.version += 1
        for tile in group.tiles:
            runtime.engine.run(_load_tile(runtime, group, tile, fitting))
    with torch.no_grad():
        for name, buffer in fitting.buffers:
            buffer.copy_(fitting.source.read(name, 0, buffer.numel()).view(buffer.shape))


async def _load_tile(runtime: Runtime, group: GroupState, tile: Tile, fitting: _Fitting) -> None:
    parts = Parts.STATE if group.fmt else Parts.WEIGHT
    async with runtime.tile_io.fresh(group, tile, parts) as opened:
        await runtime.engine.call(_fill, group, opened, fitting)


def _fill(group: GroupState, opened: OpenTile, fitting: _Fitting) -> None:
    assert opened.weight is not None
    for values in (opened.weight, *opened.optimizer.values()):
        values.zero_()
    for piece in tile_pieces(group, opened.tile):
        _fill_piece(group, opened, piece, fitting)


def _fill_piece(group: GroupState, opened: OpenTile, piece: Piece, fitting: _Fitting) -> None:
    assert opened.weight is not None
    name = fitting.name_of[piece.slot]
    for first in range(piece.of_tile.start, piece.of_tile.stop, _PIECE):
        inside = slice(first, min(first + _PIECE, piece.of_tile.stop))
        start = piece.of_parameter.start + first - piece.of_tile.start
        given = fitting.source.read(name, start, start + inside.stop - inside.start)
        if group.fmt is None:
            opened.weight[inside].copy_(given)
        else:
            parts = opened.cut(inside)
            store_master(group.fmt, given.float(), opened.weight[inside], parts)
            begin_average(group.fmt, opened.weight[inside], parts)
