"""One training system in one process: builds the bundled model, trains it on a fixed stream, and reports what each
step cost.

Run by `tierzero.profiling.compare` as ``python -m tierzero.profiling.systems '{"system": ...}'``; prints one JSON
object. Every system starts from the same weights (drawn per module, from its name) and sees the same batches.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierzero.models.gpt import GPT, Block
from tierzero.profiling.mover import Mover

SYSTEMS = ("plain", "fsdp2", "deepspeed", "tierzero")


@dataclass(frozen=True)
class Workload:
    """The model, the batch and how long to train; ``system`` is one of `SYSTEMS`."""

    system: str
    dim: int = 768
    layers: int = 12
    heads: int = 12
    vocab: int = 25600
    seq_len: int = 256
    batch: int = 4
    accumulate: int = 1
    """Backwards of a step, each of ``batch`` sequences."""
    steps: int = 6
    warmup: int = 2
    precision: str = "bf16"
    clip: float = 1.0
    recompute: bool = True
    threads: int = 0
    nvme: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """For tierzero: sections and keys over the defaults."""
    beside: int = 0
    """Bytes per step that a separate process moves meanwhile in the folder ``nvme``."""


@dataclass
class Outcome:
    """What the steps cost. Bytes and seconds, one entry per step; ``disk_*`` is what the kernel counted for the
    process, or for the one that moves bytes beside it.
    """

    parameters: int
    step_s: list[float]
    loss: list[float]
    disk_read: list[int]
    disk_write: list[int]
    peak_rss: int
    """The most during the steps after the warm-up."""
    build_peak_rss: int
    stall_s: list[dict[str, float]]


def backwards(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor, work: Workload) -> torch.Tensor:
    """Forward and backward of a step's micro-batches. Returns the mean loss."""
    total = torch.zeros(())
    for part, wanted in zip(ids.split(work.batch), targets.split(work.batch), strict=True):
        loss = model(part, wanted) / work.accumulate
        loss.backward()
        total += loss.detach()
    return total


Step = Callable[[torch.Tensor, torch.Tensor], float]


def seeded_reset(names: dict[nn.Module, str]) -> Callable[[nn.Module], None]:
    """Fills a module's parameters as its own ``reset_parameters`` does, from a generator state that follows from its
    name.
    """

    def reset(module: nn.Module) -> None:
        if next(module.parameters(recurse=False), None) is not None:
            torch.manual_seed(zlib.crc32(names[module].encode()))
            module.reset_parameters()  # type: ignore[operator]

    return reset


def batches(work: Workload) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids of a Zipf-like distribution whose second half repeats the first: something to learn."""
    generator = torch.Generator().manual_seed(1234)
    half = work.seq_len // 2 + 1
    while True:
        uniform = torch.rand(work.batch * work.accumulate, half, generator=generator, dtype=torch.float64)
        first = ((uniform * torch.log(torch.tensor(float(work.vocab)))).exp().long() - 1).clamp_(0, work.vocab - 1)
        tokens = torch.cat([first, first], dim=1)[:, : work.seq_len + 1]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _model(work: Workload) -> GPT:
    return GPT(work.dim, work.layers, work.heads, work.vocab, work.seq_len)


def _names(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def _recompute_blocks(model: GPT, reentrant: bool = False) -> None:
    for block in model.blocks:
        original = block.forward
        block.forward = lambda x, original=original: checkpoint(original, x, use_reentrant=reentrant)


@contextmanager
def plain(work: Workload) -> Iterator[tuple[int, Step]]:
    """PyTorch in memory: bf16 weights with fp32 masters and the fused AdamW (or all fp32)."""
    model = _model(work)
    model.apply(seeded_reset(_names(model)))
    if work.recompute:
        _recompute_blocks(model)
    bf16 = work.precision == "bf16"
    masters: list[torch.Tensor] = (
        [p.detach().clone().requires_grad_() for p in model.parameters()] if bf16 else list(model.parameters())
    )
    if bf16:
        model.to(torch.bfloat16)
    weights: list[torch.Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        loss = backwards(model, ids, targets, work)
        if bf16:
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        if work.clip:
            nn.utils.clip_grad_norm_(masters, work.clip)
        optimizer.step()
        optimizer.zero_grad()
        if bf16:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        return float(loss)

    yield sum(p.numel() for p in weights), step


@contextmanager
def fsdp2(work: Workload) -> Iterator[tuple[int, Step]]:
    """PyTorch's FSDP2 with parameters, gradients and optimizer states offloaded to the CPU, one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    model = _model(work)
    model.apply(seeded_reset(_names(model)))
    if work.recompute:
        _recompute_blocks(model)
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    options: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        loss = backwards(model, ids, targets, work)
        if work.clip:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    try:
        yield sum(p.numel() for p in model.parameters()), step
    finally:
        dist.destroy_process_group()


@contextmanager
def tierzero(work: Workload) -> Iterator[tuple[int, Step]]:
    """TierZero with the placement that ``work.config`` says."""
    import tierzero as tz

    sections: dict[str, Any] = {
        "train": {"precision": work.precision, "grad_clip": work.clip},
        "tiers": {"nvme": [work.nvme]} if work.nvme else {},
        "activations": {"recompute": "unit" if work.recompute else "none"},
    }
    for section, keys in work.config.items():
        sections[section] = {**sections.get(section, {}), **keys}
    with tz.empty_init():
        model = _model(work)
    tz.shard(model, tz.Config.from_dict(sections), units=(Block,), init=seeded_reset(_names(model)))
    optimizer = tz.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        loss = backwards(model, ids, targets, work)
        if work.clip:
            tz.clip_grad_norm_(model, work.clip)
        optimizer.step()
        optimizer.zero_grad()
        step.stalls.append(tz.stats(model)["stall_s"])  # type: ignore[attr-defined]
        return float(loss)

    step.stalls = []  # type: ignore[attr-defined]
    try:
        yield tz.stats(model)["parameters"], step
    finally:
        tz.close(model)


@contextmanager
def deepspeed(work: Workload) -> Iterator[tuple[int, Step]]:
    """DeepSpeed ZeRO-3 with parameters and optimizer states on NVMe, one rank."""
    from tierzero.profiling import deepspeed_peer

    model = _model(work)
    model.apply(seeded_reset(_names(model)))
    if work.recompute:
        _recompute_blocks(model, reentrant=True)  # the other kind trains wrongly with parameters on NVMe (0.19.8)
    with deepspeed_peer.running(model, work) as step:
        yield deepspeed_peer.count(model), step


def measure(work: Workload) -> Outcome:
    """Trains ``work.steps`` steps in this process. Memory is counted from the end of the warm-up."""
    if work.threads:
        torch.set_num_threads(work.threads)
    stream = batches(work)
    systems = {"plain": plain, "fsdp2": fsdp2, "deepspeed": deepspeed, "tierzero": tierzero}
    with moving_beside(work) as mover, systems[work.system](work) as (parameters, step):
        moving = "self" if mover is None else str(mover.pid)
        outcome = Outcome(parameters, [], [], [], [], 0, peak_rss(), [])
        for index in range(work.steps):
            if index == work.warmup:
                reset_peak_rss()
            ids, targets = next(stream)
            before = disk_bytes(moving)
            started = time.perf_counter()
            outcome.loss.append(step(ids, targets))
            outcome.step_s.append(time.perf_counter() - started)
            after = disk_bytes(moving)
            outcome.disk_read.append(after[0] - before[0])
            outcome.disk_write.append(after[1] - before[1])
            if mover is not None:
                mover.pace(work.beside / outcome.step_s[-1])
        outcome.peak_rss = peak_rss()
        outcome.stall_s = getattr(step, "stalls", [])
    return outcome


@contextmanager
def moving_beside(work: Workload) -> Iterator[Mover | None]:
    """The process that moves ``work.beside`` bytes per step, if any; it rests during the first step, whose duration
    says how fast it has to be in the second, and so on.
    """
    if not work.beside:
        yield None
        return
    with Mover(work.nvme, work.beside) as mover:
        yield mover


def disk_bytes(pid: str = "self") -> tuple[int, int]:
    """Bytes that a process has caused to be read from and written to storage."""
    values = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])


def peak_rss() -> int:
    """Bytes: the largest resident set since the start or the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    outcome = measure(Workload(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
