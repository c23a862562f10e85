"""Every step a checkpoint, without writing one: the tier files themselves, sealed (`tierzero.runtime.sealing`)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.checkpoint.agree import together
from tierzero.checkpoint.load import check_optimizer, check_parameters, restore_optimizer, restore_rng, restore_steps
from tierzero.checkpoint.save import check_saved, manifest_of, rng_state
from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.access import persistent_buffers, sharded_model
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.sealing import Sealer
from tierzero.runtime.spans import Kind


def seal(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any]) -> None:
    """Makes the state as of now the one that a run goes on from after a crash (`resume`), with ``extra``: what the loop
    counts, such as {"step": step}, anything JSON can hold. Every rank must call it, at best after every step. Needs
    ``checkpoint.durable``.

    It takes effect when all of the state is on the drive: with ``optimizer.overlap = "forward"`` or ``"both"`` beside
    the next backward.
    Nothing is written for it but a record. Raises ConfigError where the model's tiers are not durable, and between a
    backward that has updated weights already and its step.
    """
    runtime = runtime_of(model)
    runtime.require_open()
    runtime.whole_state.refuse_averages("seal")
    sealer = _sealer_of(runtime, "seal")
    if not isinstance(extra, dict):
        raise ConfigError('seal: extra is no dict; give what your loop counts, such as {"step": step}')
    runtime.check_use()
    model = sharded_model(runtime, model)
    together(runtime, sealer.folder, "seal it", lambda: check_saved(runtime, optimizer, extra))
    content = {
        "manifest": manifest_of(runtime, model, optimizer, extra),
        "rng": rng_state(runtime),
        "buffers": {name: _as_text(buffer) for name, buffer in persistent_buffers(model)},
    }
    with runtime.timeline.phase(Kind.SEAL):
        sealer.mark(content)
        if not runtime.updates_in_forward:
            sealer.complete()


def resume(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """Takes up the last sealed step that an earlier run has left in the tier files: weights and optimizer state are in
    the tiers already; step counts, hyperparameters, buffers and RNG state follow. Every rank must call it.

    Returns what was sealed as ``extra``, or None where there is nothing to go on from. Raises CheckpointError where the
    state does not fit the model, ConfigError where the model's tiers are not durable.
    """
    runtime = runtime_of(model)
    runtime.require_open(whole=False)
    sealer = _sealer_of(runtime, "resume")
    record = sealer.found
    if record is None:
        return None
    manifest = record.content["manifest"]
    model = sharded_model(runtime, model)

    def check() -> None:
        check_parameters(runtime, manifest, sealer.folder)
        check_optimizer(optimizer, manifest, sealer.folder)
        _check_buffers(model, manifest["buffers"], sealer.folder)

    together(runtime, sealer.folder, "resume from it", check)
    restore_steps(runtime, manifest)
    with torch.no_grad():
        for name, buffer in persistent_buffers(model):
            buffer.copy_(_as_tensor(record.content["buffers"][name], buffer))
    restore_optimizer(optimizer, manifest)
    restore_rng(runtime, record.content["rng"])
    sealer.found = None
    return manifest["extra"]


def sealed_step(model: nn.Module) -> int | None:
    """``extra["step"]`` of the state that `resume` would take up; None where there is none."""
    sealer = runtime_of(model).sealer
    return None if sealer is None or sealer.found is None else int(sealer.found.content["manifest"]["extra"]["step"])


def sealed_folder(model: nn.Module) -> Path:
    """Where this rank's records of sealed steps are."""
    return _sealer_of(runtime_of(model), "sealed_folder").folder


def discard_sealed(model: nn.Module) -> None:
    """Gives up what is sealed: the tier files of a durable model go when it is closed, like those of others. For the
    end of a run, when its last checkpoint is written. Every rank must call it.
    """
    _sealer_of(runtime_of(model), "discard_sealed").discard()


def _sealer_of(runtime: Runtime, what: str) -> Sealer:
    if runtime.sealer is None:
        raise ConfigError(f"{what}: the model's tiers do not outlive the process; set checkpoint.durable = true")
    return runtime.sealer


def _check_buffers(model: nn.Module, saved: Mapping[str, Any], folder: Path) -> None:
    own = {name: list(buffer.shape) for name, buffer in persistent_buffers(model)}
    for name in sorted(own.keys() | saved.keys()):
        if name not in own or name not in saved or saved[name]["shape"] != own[name]:
            raise CheckpointError(f"{folder}: buffer {name!r} is not as in the model; it is of another one")


def _as_text(buffer: torch.Tensor) -> str:
    raw = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return base64.b64encode(raw.numpy().tobytes()).decode()


def _as_tensor(text: str, like: torch.Tensor) -> torch.Tensor:
    raw = bytearray(base64.b64decode(text))
    if not raw:
        return torch.empty_like(like)
    return torch.frombuffer(raw, dtype=like.dtype).view(like.shape)
