"""Reading a checkpoint: everything is checked first; then each rank reads what its shard needs, whatever
world size wrote them."""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.checkpoint.agree import together
from tierzero.checkpoint.manifest import read_manifest, standing_folder
from tierzero.checkpoint.reader import CheckpointReader
from tierzero.checkpoint.save import finish_checkpoint
from tierzero.checkpoint.streaming import ExtentStream
from tierzero.errors import CheckpointError
from tierzero.optim.average import begin_average
from tierzero.optim.formats import AVERAGE
from tierzero.runtime.access import persistent_buffers, sharded_model
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.state import GroupState, Tile, slot_of
from tierzero.runtime.tile_io import Parts, all_or_first_error

_TILES_AT_ONCE = 4


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | os.PathLike[str]) -> Any:
    """Takes weights, optimizer state, step counts, buffers and RNG state from the folder ``path``; returns what was
    saved as ``extra``. Every rank must call it.

    Works with another world size, placement or unit choice than the one saved. Every checksum is verified. Raises
    CheckpointError, naming file and parameter, before anything is changed if the checkpoint is incomplete or does not
    fit the model. Damage found while reading raises it as well, and so does then every use of the model, which holds
    half of it, until another checkpoint has been loaded.
    """
    runtime = runtime_of(model)
    runtime.require_open(whole=False)
    model = sharded_model(runtime, model)
    finish_checkpoint(model)
    folder = standing_folder(Path(path))
    sources: list[_Source] = []
    together(runtime, folder, "read it", lambda: sources.append(_open_and_check(runtime, optimizer, folder)))
    manifest, reader = sources[0].manifest, sources[0].reader
    try:
        _notice_averages(runtime, manifest, reader)
        with runtime.whole_state.replacing(folder):
            together(runtime, folder, "read it", lambda: _load_state(runtime, model, reader))
            restore_steps(runtime, manifest)
            restore_optimizer(optimizer, manifest)
            if runtime.world.rank < len(reader.ranks):  # a rank that did not exist keeps its present state
                restore_rng(runtime, reader.ranks[runtime.world.rank].index.rng)
    finally:
        reader.close()
    return manifest["extra"]


@dataclass(frozen=True)
class _Source:
    manifest: dict[str, Any]
    reader: CheckpointReader


def _open_and_check(runtime: Runtime, optimizer: torch.optim.Optimizer | None, folder: Path) -> _Source:
    manifest = read_manifest(folder)
    check_parameters(runtime, manifest, folder)
    check_optimizer(optimizer, manifest, folder)
    reader = CheckpointReader(folder, manifest)
    try:
        _check_extents(runtime, reader)
    except BaseException:
        reader.close()
        raise
    return _Source(manifest, reader)


def _check_extents(runtime: Runtime, reader: CheckpointReader) -> None:
    for slot in runtime.slots():
        reader.check_covers(slot.name, "weight", slot.slot.numel)
        if slot.group.fmt is None:
            continue
        for part in reader.format_of(slot.name).optimizer:
            reader.check_covers(slot.name, part.name, part.values(slot.slot.numel))
        if slot.group.fmt.is_averaged and reader.has_averages:
            reader.check_covers(slot.name, AVERAGE.name, slot.slot.numel)


def _notice_averages(runtime: Runtime, manifest: Mapping[str, Any], reader: CheckpointReader) -> None:
    """Warns, on rank 0, where only one of the checkpoint and the model has averages, unless no update was made yet."""
    wanted = any(group.fmt is not None and group.fmt.is_averaged for group in runtime.groups())
    updated = any(record["step"] for record in manifest["parameters"].values())
    if wanted == reader.has_averages or not updated or runtime.world.rank:
        return
    text = "has no averages of the weights: optimizer.ema begins with its weights"
    if not wanted:
        text = "has averages of the weights, which are left out as optimizer.ema is 0"
    warnings.warn(f"{reader.folder} {text}", stacklevel=3)


def _load_state(runtime: Runtime, model: nn.Module, reader: CheckpointReader) -> None:
    for group in runtime.groups():
        group.version += 1
    stream = ExtentStream(runtime.engine, reader)
    try:
        runtime.engine.run(_load_tiles(runtime, stream))
    finally:
        stream.close()
    _load_buffers(model, reader)


def check_parameters(runtime: Runtime, manifest: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError unless the manifest is of a model with the same parameters."""
    saved = manifest["parameters"]
    slots = {slot.name: slot for slot in runtime.slots()}
    missing, extra = sorted(slots.keys() - saved.keys()), sorted(saved.keys() - slots.keys())
    if missing or extra:
        what = f"lacks parameter {missing[0]!r}" if missing else f"has parameter {extra[0]!r}, which the model lacks"
        raise CheckpointError(
            f"{folder}: {what} ({len(missing)} missing, {len(extra)} unknown); it is of another model"
        )
    for name, slot in slots.items():
        record = saved[name]
        dtype = str(slot.group.layout.dtype).removeprefix("torch.")
        if list(slot.slot.shape) != record["shape"]:
            raise CheckpointError(
                f"{folder}: parameter {name!r} has shape {record['shape']}, the model's has {list(slot.slot.shape)}"
            )
        if dtype != record["dtype"]:
            raise CheckpointError(
                f"{folder}: parameter {name!r} is {record['dtype']}, the model's is {dtype}; set train.precision alike"
            )
        if slot.group.layout.trainable and not record["trainable"]:
            raise CheckpointError(
                f"{folder}: parameter {name!r} was frozen when it was saved, and has no optimizer state there; freeze "
                "it, or begin from the weights alone: tierzero.export_safetensors, then init=<its folder>"
            )


def check_optimizer(optimizer: torch.optim.Optimizer | None, manifest: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError unless the optimizer has the param groups of the manifest's."""
    groups = manifest["optimizer"]
    if optimizer is None or groups is None:
        return
    names = _group_names(optimizer)
    saved = [group["parameters"] for group in groups]
    if names != saved:
        sizes = ([len(group) for group in saved], [len(group) for group in names])
        others = sorted(set().union(*names) ^ set().union(*saved))
        raise CheckpointError(
            f"{folder}: its optimizer has param groups of {sizes[0]} parameters, this one of {sizes[1]}"
            + (f"; {others[0]!r} is in one of them only" if others else ", of other members")
            + "; group them alike, or give no optimizer, whose hyperparameters then stay as they are"
        )


def _group_names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [
        [slot.name for slot in map(slot_of, group["params"]) if slot is not None] for group in optimizer.param_groups
    ]


def restore_steps(runtime: Runtime, manifest: Mapping[str, Any]) -> None:
    """Sets the step counts; the moments are those of the next optimizer that steps."""
    for slot in runtime.slots():
        slot.step = int(manifest["parameters"][slot.name]["step"])
        slot.state_of = None


def restore_optimizer(optimizer: torch.optim.Optimizer | None, manifest: Mapping[str, Any]) -> None:
    """Sets the hyperparameters of its param groups."""
    if optimizer is None or manifest["optimizer"] is None:
        return
    for group, saved in zip(optimizer.param_groups, manifest["optimizer"], strict=True):
        for key, value in saved["hyperparameters"].items():
            group[key] = tuple(value) if isinstance(value, list) else value


async def _load_tiles(runtime: Runtime, stream: ExtentStream) -> None:
    tiles = iter([(group, tile) for group in runtime.groups() for tile in group.tiles])
    await all_or_first_error([_load_next(runtime, stream, tiles) for _ in range(_TILES_AT_ONCE)])


async def _load_next(runtime: Runtime, stream: ExtentStream, tiles: Iterator[tuple[GroupState, Tile]]) -> None:
    for group, tile in tiles:
        async with runtime.tile_io.fresh(group, tile, Parts.STATE if group.fmt else Parts.WEIGHT) as opened:
            for _, values in opened.segments():
                values.zero_()
            await stream.fill(opened)
            if group.fmt is not None and not stream.has_averages:
                await runtime.engine.call(begin_average, group.fmt, opened.weight, opened.optimizer)


def _load_buffers(model: nn.Module, reader: CheckpointReader) -> None:
    for name, buffer in persistent_buffers(model):
        if (name, "buffer") in reader.by_segment:
            flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device="cpu")
            reader.read(name, "buffer", 0, flat)
            with torch.no_grad():
                buffer.copy_(flat.view(buffer.shape))


def restore_rng(runtime: Runtime, state: Mapping[str, str]) -> None:
    """Sets PyTorch's generators to what `rng_state` gave."""
    if "cpu" in state:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["cpu"])), dtype=torch.uint8))
    if "cuda" in state and runtime.device.torch_device.type == "cuda":
        cuda = torch.frombuffer(bytearray(base64.b64decode(state["cuda"])), dtype=torch.uint8)
        torch.cuda.set_rng_state(cuda, runtime.device.torch_device)
