"""Configurations of DeepSpeed as people have them."""

from __future__ import annotations

from typing import Any


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}; a key that would lie inside of another's value is left out."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        table = found
        for section in sections:
            below = table.setdefault(section, {})
            if not isinstance(below, dict):
                break
            table = below
        else:
            table.setdefault(last, value)
    return found


_STAGE_3 = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}

ZERO_2_OFFLOAD: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "wall_clock_breakdown": False,
}

ZERO_3_CPU: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        **_STAGE_3,
    },
    "zero_allow_untested_optimizer": True,
}

INFINITY: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "nvme",
            "buffer_count": 5,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "nvme",
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        **_STAGE_3,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 16,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
    },
}

TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": True,
        # A widespread example has the section here, where DeepSpeed does not look for it.
        "aio": {"block_size": 262144, "queue_depth": 32},
        **_STAGE_3,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
