"""Writing a checkpoint: every rank streams its shard through the I/O engine; one rename makes it all appear."""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import os
import shutil
import warnings
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.checked_json import CHECKSUM, read_json, write_json
from tierzero.checkpoint.agree import together
from tierzero.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    ParameterRecord,
    rank_stem,
    record_as_json,
    replaced_folder,
    standing_folder,
    written_version,
)
from tierzero.checkpoint.output import partial_of
from tierzero.checkpoint.removal import remove_behind
from tierzero.checkpoint.writer import RankWriter
from tierzero.errors import CheckpointError, ConfigError, TierZeroError
from tierzero.runtime.access import persistent_buffers, sharded_model
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.spans import Kind
from tierzero.runtime.state import GroupState, slot_of
from tierzero.tiers import PAGE, Priority
from tierzero.tiers.file import sync_path, write_json_flushed

_POLL_S = 0.05
_PATIENCE_S = 30.0
"""How long the end of a model waits for other ranks to have written their parts."""


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    extra: dict[str, Any] | None = None,
    *,
    background: bool = False,
) -> None:
    """Writes weights, optimizer state, buffers, RNG state and ``extra`` (anything JSON can hold) to the folder
    ``path``; every rank must call it.

    The folder appears whole or not at all: data goes to a temporary neighbour, is flushed to the drive, and is
    renamed. An existing checkpoint at ``path`` is replaced at that moment. Memory needed is a few tiles. Raises
    CheckpointError, on every rank, when any rank fails; what stood at ``path`` is then untouched.

    With ``background`` it returns at once and writes the state as of this call while the training goes on; the folder
    appears when all of it is written. `finish_checkpoint`, or the next save or load, waits for that and raises what
    failed; `close` waits too.
    """
    runtime = runtime_of(model)
    runtime.require_open()
    runtime.refuse_inside_gathered("save_checkpoint")
    runtime.whole_state.refuse_averages("save_checkpoint")
    model = sharded_model(runtime, model)
    with runtime.timeline.phase(Kind.CHECKPOINT):
        _save(runtime, model, optimizer, path, extra, background)


def _save(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    extra: dict[str, Any] | None,
    background: bool,
) -> None:
    finish_checkpoint(model)
    target = Path(os.path.realpath(path))  # a link to a checkpoint stays one
    together(runtime, target, "write it", lambda: check_saved(runtime, optimizer, extra))
    runtime.flush_to_read()
    save = _Save(runtime, target, _Content.now(runtime, model, optimizer, extra), background)
    try:
        together(runtime, target, "write it", save.prepare)
        together(runtime, target, "write it", save.begin)
        if not background:
            save.finish()
    except BaseException:
        save.abandon()
        raise


def finish_checkpoint(model: nn.Module) -> None:
    """Waits until a checkpoint that is written in the background is complete; does nothing without one. Every rank must
    call it. Raises CheckpointError, on every rank, when it failed on any.
    """
    runtime = runtime_of(model)
    save = runtime.saving
    if isinstance(save, _Save):
        try:
            with runtime.timeline.phase(Kind.CHECKPOINT):
                save.finish()
        except BaseException:
            save.abandon()
            raise


def check_saved(runtime: Runtime, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None) -> None:
    """Raises ConfigError for an ``extra`` or an optimizer that cannot be saved with the model."""
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"save_checkpoint: extra cannot be written as JSON: {error}") from None
    for group in optimizer.param_groups if optimizer is not None else ():
        slots = [slot_of(parameter) for parameter in group["params"]]
        if any(slot is None or slot.owner is not runtime for slot in slots):
            raise ConfigError(
                "save_checkpoint: the optimizer has parameters that are not this model's; give the one that was made "
                "from its parameters"
            )


@dataclass(frozen=True)
class _Content:
    """All that is saved beside the tiles, as of one moment."""

    manifest: dict[str, Any]
    buffers: list[tuple[str, torch.Tensor]]
    """Flattened copies in host memory."""
    rng: dict[str, str]

    @classmethod
    def now(
        cls, runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
    ) -> _Content:
        buffers = [
            (name, buffer.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1))
            for name, buffer in persistent_buffers(model)
        ]
        manifest = manifest_of(runtime, model, optimizer, extra)
        return cls(manifest, buffers if runtime.world.rank == 0 else [], rng_state(runtime))


class _Save:
    """One checkpoint on its way: this rank's part, and on rank 0 the seal."""

    def __init__(self, runtime: Runtime, target: Path, content: _Content, background: bool) -> None:
        self._runtime, self._target, self._content, self._background = runtime, target, content, background
        self._staging = partial_of(target)
        self._writer: RankWriter | None = None
        self._written: Future[None] | None = None
        self._sealed: Future[None] | None = None

    def prepare(self) -> None:
        """On rank 0: the empty temporary folder."""
        if self._runtime.world.rank == 0:
            target = self._target
            if standing_folder(target) != target:
                replaced_folder(target).rename(target)
            if target.exists() and not (target / MANIFEST).exists():
                raise CheckpointError(f"checkpoint {target}: something else stands there; choose another path")
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(parents=True)

    def begin(self) -> None:
        """Starts writing this rank's part."""
        runtime = self._runtime
        groups = _groups_to_write(runtime)
        path = self._staging / f"{rank_stem(runtime.world.rank)}.bin"
        writer = self._writer = RankWriter(runtime.engine, runtime.store, path, groups, self._content.buffers)
        priority = Priority.WRITE_BACK if self._background else Priority.DEMAND
        runtime.saving = self
        copied = runtime.whole_state.begin_snapshot(groups, writer, priority)
        self._written = runtime.engine.submit(self._write(copied, writer, priority))
        if self._background:
            atexit.register(self.end)
        if self._background and runtime.world.rank == 0:
            self._sealed = runtime.engine.submit(self._seal_when_whole(self._written))

    async def _write(self, copied: Future[None], writer: RankWriter, priority: Priority) -> None:
        try:
            await asyncio.wrap_future(copied)
            await writer.write_buffers(priority)
            await self._runtime.engine.call(self._write_index, writer)
        finally:
            writer.close()

    def _write_index(self, writer: RankWriter) -> None:
        """Under its name only when the data it speaks of is on the drive."""
        writer.sync()
        path = self._staging / f"{rank_stem(self._runtime.world.rank)}.json"
        write_json_flushed(path, writer.index(self._content.rng))

    async def _seal_when_whole(self, written: Future[None]) -> None:
        await asyncio.shield(asyncio.wrap_future(written))
        ranks = range(self._runtime.world.size)
        while not all((self._staging / f"{rank_stem(rank)}.json").exists() for rank in ranks):
            if not self._staging.is_dir():
                raise CheckpointError(f"checkpoint {self._target}: {self._staging} was removed while it was written")
            await asyncio.sleep(_POLL_S)
        await self._runtime.engine.call(self._seal)

    def finish(self) -> None:
        """The checkpoint is complete when this returns; every rank must call it."""
        together(self._runtime, self._target, "write it", self._wait_written)
        together(self._runtime, self._target, "write it", self._wait_sealed)
        self._over()

    def _wait_written(self) -> None:
        assert self._written is not None
        self._written.result()

    def _wait_sealed(self) -> None:
        if self._sealed is not None:
            self._sealed.result()
        elif self._runtime.world.rank == 0:
            self._seal()

    def end(self) -> None:
        """At the end of the model or the process, when other ranks may be gone."""
        try:
            self._wait_written()
            if self._sealed is not None:
                self._sealed.result(_PATIENCE_S)
        except (Exception, CancelledError) as error:
            why = error if isinstance(error, TierZeroError | OSError) else f"{type(error).__name__} {error}"
            warnings.warn(f"checkpoint {self._target} was not completed: {why}", RuntimeWarning, stacklevel=3)
            self.abandon()
        else:
            self._over()

    def abandon(self) -> None:
        """Ends the work and removes what it has left; nothing touches the state any more when this returns."""
        begun = [future for future in (self._sealed, self._written) if future is not None]
        for future in begun:
            future.cancel()
        if self._runtime.saving is self:
            self._runtime.whole_state.abandon_snapshot()
        wait(begun)
        if self._writer is not None:
            self._writer.close()
        self._over()
        if self._runtime.world.rank == 0:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _over(self) -> None:
        atexit.unregister(self.end)
        if self._runtime.saving is self:
            self._runtime.saving = None

    def _seal(self) -> None:
        staging, target = self._staging, self._target
        ranks = range(self._runtime.world.size)
        indexes = [read_json(staging / f"{rank_stem(rank)}.json", "an index") for rank in ranks]
        manifest = self._content.manifest | {"indexes": [index[CHECKSUM] for index in indexes]}
        write_json(staging / MANIFEST, manifest)
        sync_path(staging / MANIFEST)
        sync_path(staging)
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
        sync_path(target.parent)
        remove_behind(replaced)


def _groups_to_write(runtime: Runtime) -> list[GroupState]:
    """What only this rank has, or rank 0 has as well as others."""
    groups = runtime.groups()
    divided = groups[0].layout.parts > 1 and runtime.world.replica == 0
    return groups if runtime.world.rank == 0 or divided else []


def rng_state(runtime: Runtime) -> dict[str, str]:
    """Of PyTorch's generators on this rank, as base64."""
    state = {"cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    if runtime.device.torch_device.type == "cuda":
        cuda = torch.cuda.get_rng_state(runtime.device.torch_device)
        state["cuda"] = base64.b64encode(cuda.numpy().tobytes()).decode()
    return state


def manifest_of(
    runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
) -> dict[str, Any]:
    """All of a manifest but the checksums of the indexes, as of now."""
    records = {
        slot.name: record_as_json(
            ParameterRecord(
                list(slot.slot.names),
                list(slot.slot.shape),
                str(slot.group.layout.dtype).removeprefix("torch."),
                slot.group.layout.trainable,
                slot.step,
                slot.group.fmt.moments if slot.group.fmt is not None else "fp32",
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
        "version": written_version(records),
        "world_size": runtime.world.size,
        "page": PAGE,
        "parameters": records,
        "buffers": buffers,
        "optimizer": _optimizer_groups(optimizer),
        "extra": json.loads(json.dumps(extra)),
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
