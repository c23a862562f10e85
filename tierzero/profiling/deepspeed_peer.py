"""DeepSpeed ZeRO-3 on the CPU with everything on NVMe, for comparison; needs the ``deepspeed`` package."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tierzero.profiling.systems import Workload


def settings(model: nn.Module, work: Workload) -> dict[str, Any]:
    """DeepSpeed's configuration: its pipelines off and few buffers, which costs it no speed here and the least
    memory. Buffers hold the largest parameter.
    """
    largest = max(parameter.numel() for parameter in model.parameters())
    aligned = -(-largest // 1024) * 1024
    block = 12 * work.dim * work.dim
    folder = str(Path(work.nvme) / "deepspeed")
    return {
        "train_batch_size": work.batch,
        "train_micro_batch_size_per_gpu": work.batch,
        "bf16": {"enabled": work.precision == "bf16"},
        "gradient_clipping": work.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "sub_group_size": aligned,
            "reduce_bucket_size": aligned,
            "stage3_prefetch_bucket_size": 1,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_max_live_parameters": 3 * block + largest,
            "stage3_max_reuse_distance": 3 * block + largest,
            "offload_param": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_size": aligned,
                "buffer_count": 6,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 4,
                "pipeline_read": False,
                "pipeline_write": False,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


@contextlib.contextmanager
def running(model: nn.Module, work: Workload) -> Iterator[Callable[[torch.Tensor, torch.Tensor], float]]:
    """The step of a model under DeepSpeed, whose weights it takes over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = settings(model, work)
        if work.precision == "bf16":
            model.to(torch.bfloat16)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

        def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            return float(loss)

        try:
            yield step
        finally:
            torch.distributed.destroy_process_group()
            # DeepSpeed 0.19.8 leaves one shared-memory segment per rank and run behind; its name holds our port.
            for name in glob.glob(f"/dev/shm/deepspeed_*_{port}_0"):
                os.unlink(name)


def count(model: nn.Module) -> int:
    """Elements of all parameters, which are empty here while DeepSpeed holds them."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())
