"""Writing a checkpoint: every rank streams its shard, tile by tile; one rename makes it all appear."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import nn

from tierzero.checkpoint.agree import together
from tierzero.checkpoint.manifest import (
    CHECKSUM,
    FORMAT,
    MANIFEST,
    VERSION,
    Extent,
    ParameterRecord,
    rank_stem,
    read_json,
    record_as_json,
    replaced_folder,
    standing_folder,
    write_json,
)
from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.access import persistent_buffers
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.state import GroupState, Tile, slot_of, tile_pieces
from tierzero.runtime.tile_io import OpenTile, Parts
from tierzero.tiers import PAGE, Priority, page_round


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes weights, optimizer state, buffers, RNG state and ``extra`` (anything JSON can hold) to the folder
    ``path``; every rank must call it.

    The folder appears whole or not at all: data goes to a temporary neighbour, is flushed to the drive, and is
    renamed. An existing checkpoint at ``path`` is replaced at that moment. Memory needed is a few tiles. Raises
    CheckpointError, on every rank, when any rank fails; what stood at ``path`` is then untouched.
    """
    runtime = runtime_of(model)
    runtime.require_open()
    target = Path(os.path.realpath(path))  # a link to a checkpoint stays one
    staging = target.with_name(f".{target.name}.partial")
    together(runtime, target, "write it", lambda: _check(runtime, optimizer, extra))
    runtime.flush_to_read()
    try:
        together(runtime, target, "write it", lambda: _prepare(runtime, target, staging))
        together(runtime, target, "write it", lambda: _write_rank(runtime, model, staging))
        together(runtime, target, "write it", lambda: _seal(runtime, model, optimizer, target, staging, extra))
    except BaseException:
        if runtime.world.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _check(runtime: Runtime, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None) -> None:
    _check_extra(extra)
    _check_owner(runtime, optimizer)


def _check_extra(extra: dict[str, Any] | None) -> None:
    import json

    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"save_checkpoint: extra cannot be written as JSON: {error}") from None


def _check_owner(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> None:
    for group in optimizer.param_groups if optimizer is not None else ():
        slots = [slot_of(parameter) for parameter in group["params"]]
        if any(slot is None or slot.owner is not runtime for slot in slots):
            raise ConfigError(
                "save_checkpoint: the optimizer has parameters that are not this model's; give the one that was made "
                "from its parameters"
            )


def _prepare(runtime: Runtime, target: Path, staging: Path) -> None:
    if runtime.world.rank == 0:
        if standing_folder(target) != target:
            replaced_folder(target).rename(target)
        if target.exists() and not (target / MANIFEST).exists():
            raise CheckpointError(f"checkpoint {target}: something else stands there; choose another path")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)


def _write_rank(runtime: Runtime, model: nn.Module, staging: Path) -> None:
    stem = rank_stem(runtime.world.rank)
    data = staging / f"{stem}.bin"
    with data.open("wb") as file:
        writer = _Writer(file)
        divided = runtime.groups()[0].layout.parts > 1 and runtime.world.replica == 0
        if runtime.world.rank == 0 or divided:
            for group in runtime.groups():
                for tile in group.tiles:
                    runtime.engine.run(_write_tile(runtime, group, tile, writer))
        if runtime.world.rank == 0:
            for name, buffer in persistent_buffers(model):
                writer.add(name, "buffer", 0, buffer.detach().cpu().contiguous().reshape(-1))
        writer.finish()
    index = {
        "extents": [record_as_json(extent) for extent in writer.extents],
        "rng": _rng_state(runtime),
        "nbytes": writer.position,
    }
    write_json(staging / f"{stem}.json", index)
    _sync(staging / f"{stem}.json")


class _Writer:
    """Appends extents to a data file, each at a page boundary, and lets go of page cache and dirty pages as it goes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0
        self._synced = 0
        self.extents: list[Extent] = []

    def add(self, parameter: str, segment: str, start: int, values: torch.Tensor) -> None:
        raw: memoryview = values.view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
        self._file.write(raw)
        self._file.write(bytes(page_round(raw.nbytes) - raw.nbytes))
        digest = xxhash.xxh3_64_hexdigest(raw)
        self.extents.append(
            Extent(parameter, segment, start, start + values.numel(), self.position, raw.nbytes, digest)
        )
        self.position += page_round(raw.nbytes)
        if self.position - self._synced >= 64 << 20:
            self._let_go()

    def finish(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, self.position, os.POSIX_FADV_DONTNEED)
        self._synced = self.position


async def _write_tile(runtime: Runtime, group: GroupState, tile: Tile, writer: _Writer) -> None:
    opened = await runtime.tile_io.open(group, tile, Parts.STATE if group.fmt else Parts.WEIGHT, Priority.DEMAND)
    try:
        await runtime.engine.call(_write_open, group, opened, writer)
    finally:
        runtime.tile_io.close(opened)


def _write_open(group: GroupState, opened: OpenTile, writer: _Writer) -> None:
    for piece in tile_pieces(group, opened.tile):
        for segment, values in segments_of(opened):
            writer.add(piece.slot.name, segment, piece.of_parameter.start, values[piece.of_tile])


def segments_of(opened: OpenTile) -> list[tuple[str, torch.Tensor]]:
    """The state segments of an open tile by name, the weight first."""
    assert opened.weight is not None
    return [("weight", opened.weight), *opened.optimizer.items()]


def _rng_state(runtime: Runtime) -> dict[str, str]:
    state = {"cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    if runtime.device.torch_device.type == "cuda":
        cuda = torch.cuda.get_rng_state(runtime.device.torch_device)
        state["cuda"] = base64.b64encode(cuda.numpy().tobytes()).decode()
    return state


def _seal(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    target: Path,
    staging: Path,
    extra: dict[str, Any] | None,
) -> None:
    if runtime.world.rank != 0:
        return
    indexes = [read_json(staging / f"{rank_stem(rank)}.json", "an index") for rank in range(runtime.world.size)]
    manifest = _manifest(runtime, model, optimizer, extra) | {"indexes": [index[CHECKSUM] for index in indexes]}
    write_json(staging / MANIFEST, manifest)
    _sync(staging / MANIFEST)
    _sync(staging)
    replaced = replaced_folder(target)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    try:
        staging.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _manifest(
    runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
) -> dict[str, Any]:
    records = {
        slot.name: record_as_json(
            ParameterRecord(
                list(slot.slot.names),
                list(slot.slot.shape),
                str(slot.group.layout.dtype).removeprefix("torch."),
                slot.group.layout.trainable,
                slot.step,
            )
        )
        for slot in runtime.slots()
    }
    buffers = {
        name: {"shape": list(b.shape), "dtype": str(b.dtype).removeprefix("torch.")}
        for name, b in persistent_buffers(model)
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": runtime.world.size,
        "page": PAGE,
        "parameters": records,
        "buffers": buffers,
        "optimizer": _optimizer_groups(optimizer),
        "extra": extra,
    }


def _optimizer_groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    """Each param group's hyperparameters, and its parameters by name."""
    if optimizer is None:
        return None
    groups = []
    for group in optimizer.param_groups:
        values = {
            key: float(value) if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        names = [slot.name for slot in map(slot_of, group["params"]) if slot is not None]
        groups.append({"hyperparameters": values, "parameters": names})
    return groups


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
