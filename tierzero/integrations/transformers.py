"""Hugging Face Transformers: its ``Trainer`` for sharded models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import tierzero as tz
from tierzero.errors import CheckpointError, ConfigError
from tierzero.integrations.accelerate import TierZeroAccelerator
from tierzero.integrations.sharded import is_sharded, refuse_other_optimizer
from tierzero.runtime.runtime import runtime_of

_STATE = "tierzero"
"""The checkpoint's name in a ``checkpoint-N`` folder."""

_REFUSED = {
    "fsdp": "the model is sharded already",
    "deepspeed": "the model is sharded already; tierzero.Config.from_deepspeed translates its configuration",
    "parallelism_config": "the model is sharded already",
    "torch_compile": "compile the units with train.compile = true",
    "fp16_full_eval": "train.precision decides",
    "bf16_full_eval": "train.precision decides",
    "auto_find_batch_size": "tiers.device is the budget; set per_device_train_batch_size",
    "use_liger_kernel": "apply it before tierzero.shard",
}
"""Training arguments that cannot be had, and why, or what to do instead."""


class TierZeroTrainer(Trainer):
    """`transformers.Trainer` for a model that `tierzero.shard` has sharded; call it with the same arguments.

    Clipping, accumulation, schedules, evaluation, logging and resuming are the Trainer's own. The optimizer is
    `tierzero.AdamW` with the arguments' hyperparameters. A ``checkpoint-N`` folder holds a checkpoint of TierZero under
    ``tierzero``, whence ``resume_from_checkpoint`` goes on bit for bit, and of a model with adapters the adapters;
    ``save_model`` and ``save_only_model`` write the whole model as `save_pretrained` does.

    Raises ConfigError, before anything is begun, for arguments that a sharded model cannot follow.
    """

    def create_accelerator_and_postprocess(self) -> None:
        _check(self.model, self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = TierZeroAccelerator  # the Trainer makes it, with what it alone knows
        self.accelerator.check(self.model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is where its tiers are."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        found, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if found is not torch.optim.AdamW:
            raise ConfigError(
                f'optim is "{getattr(args.optim, "value", args.optim)}"; a sharded model is trained with '
                'optim="adamw_torch"; or give a '
                "tierzero.AdamW or tierzero.Adam in optimizers=(optimizer, scheduler)"
            )
        return tz.AdamW, {name: value for name, value in options.items() if name != "fused"}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        refuse_other_optimizer(optimizer)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return tz.clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor | None:
        if grad_norm is not None or runtime_of(model).updates_in_backward:
            return grad_norm  # beside the backward nobody knows it
        return tz.clip_grad_norm_(model, float("inf"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as `save_pretrained` does, or its adapters; every rank must call it. The weights are whole
        in rank 0's memory meanwhile: for larger models export a checkpoint (`tierzero.export_safetensors`)."""
        if not _internal_call or self.args.save_only_model or _has_adapters(self.model):
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save and hasattr(self.model, "config"):
            self.model.config.save_pretrained(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is None and _has_adapters(self.model):
            from tierzero.integrations.peft import adapter_state

            state_dict = adapter_state(self.model)
        elif state_dict is None:
            state_dict = tz.full_state_dict(self.model, rank0_only=True)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        tz.save_checkpoint(self.model, self.optimizer, Path(output_dir) / _STATE)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Checks only: the weights come with the optimizer's state, when there is an optimizer."""
        _state_in(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            tz.load_checkpoint(self.model, self.optimizer, _state_in(checkpoint))
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        tz.load_checkpoint(self.model, self.optimizer, _state_in(self.state.best_model_checkpoint))


def _state_in(folder: str) -> Path:
    path = Path(folder) / _STATE
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} has no folder {_STATE!r}: it was not completed, or written with save_only_model or another "
            "Trainer; resume from another one"
        )
    return path


def _check(model: nn.Module | None, args: TrainingArguments) -> None:
    if model is None or not is_sharded(model):
        raise ConfigError(
            "TierZeroTrainer: give it a model that was sharded with tierzero.shard, as model=; model_init makes others"
        )
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"TierZeroTrainer: {name} cannot be used with a sharded model: {instead}")
    runtime = runtime_of(model)
    if args.n_gpu > 1:
        raise ConfigError(f"TierZeroTrainer: one process for {args.n_gpu} GPUs; start one for each with torchrun")
    if args.world_size != runtime.world.size:
        raise ConfigError(
            f"TierZeroTrainer: {args.world_size} ranks, but the model is sharded over {runtime.world.size}; call "
            "torch.distributed.init_process_group() before tierzero.shard"
        )
    if args.device.type != runtime.device.torch_device.type:
        raise ConfigError(
            f"TierZeroTrainer: its device is {args.device}, the model's {runtime.device.torch_device}; set use_cpu"
        )
    if runtime.updates_in_backward and (args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1):
        raise ConfigError(
            'TierZeroTrainer: optimizer.overlap = "backward" updates in every backward, before the norm is known; set '
            'max_grad_norm=0 and gradient_accumulation_steps=1, or use "forward"'
        )
    if args.load_best_model_at_end and args.save_only_model:
        raise ConfigError("TierZeroTrainer: load_best_model_at_end needs whole checkpoints; leave out save_only_model")


def _has_adapters(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
