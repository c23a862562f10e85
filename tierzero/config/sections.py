"""The sections of a configuration: every key with its rule, its default and its description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .rules import (
    choice,
    either,
    flag,
    listed_names,
    names,
    or_auto,
    order_of,
    path,
    paths,
    placement,
    real,
    real_pair,
    size,
    whole,
    wholes,
)

MIB = 2**20
Placement = Literal["auto"] | dict[str, float]
Precision = Literal["bf16", "fp32", "fp16"]


def key(default: Any, description: str, **more: Any) -> Any:
    """A field with its one description."""
    return Field(default, description=description, **more)


class Section(BaseModel):
    """Base of the sections: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class ModelSection(Section):
    """The bundled model. It is used by ``tierzero train`` only; ``tz.shard`` takes any module."""

    kind: Annotated[Literal["gpt"], choice("gpt")] = key(
        "gpt", "A decoder-only transformer, pre-norm, GELU MLP of 4 dim."
    )
    dim: Annotated[int, whole(1, 10**6)] = key(384, "Width of the residual stream.")
    layers: Annotated[int, whole(1, 10**4)] = key(6, "Number of blocks.")
    heads: Annotated[int, whole(1, 10**5)] = key(
        6, "Attention heads; they must divide dim.", json_schema_extra={"shown": "one per 64 of `dim`"}
    )
    vocab: Annotated[int, whole(2, 2**31 - 1)] = key(256, "Number of token ids. 256 is enough for text (its bytes).")
    tied: Annotated[bool, flag()] = key(False, "Use the token embedding as the output layer as well.")
    dropout: Annotated[float, real(0, 1, below=True)] = key(0.0, "Dropout probability in attention, MLP and embedding.")

    @model_validator(mode="before")
    @classmethod
    def _derive_heads(cls, given: Any) -> Any:
        dim = given.get("dim") if isinstance(given, Mapping) else None
        if not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= 10**6 or "heads" in given:
            return given
        heads = max(1, dim // 64)
        while dim % heads:
            heads -= 1
        return {**given, "heads": heads}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSection:
        # A lone `heads` with the default dim is left to Config.check: dim may follow by an override.
        if {"dim", "heads"} <= self.model_fields_set and self.dim % self.heads:
            raise ValueError(f"heads = {self.heads}: does not divide model.dim = {self.dim}; choose one that does")
        return self


class DataSection(Section):
    """What to train on. Text is read as bytes (one token each); ``.bin`` files are flat token ids, memory-mapped."""

    path: Annotated[list[str] | None, paths(as_text=True, what="path or pattern (*, ?, **)")] = key(
        None, "Text files or .bin token files. Left out: the sources of the running Python's standard library."
    )
    validation: Annotated[list[str] | None, paths(as_text=True, what="path or pattern (*, ?, **)")] = key(
        None, "Files to validate on. Left out: the last twentieth of path, or a twentieth of the library's files."
    )
    dtype: Annotated[Literal["auto", "uint16", "uint32"], choice("auto", "uint16", "uint32")] = key(
        "auto", 'Token type of .bin files; "auto" is uint16 up to a vocabulary of 65536, else uint32.'
    )


class TrainSection(Section):
    """The training run."""

    steps: Annotated[int, whole(0, 10**9)] = key(
        200, "Optimizer steps in all; a resumed run goes on to the same number."
    )
    batch_size: Annotated[int, whole(1, 10**7)] = key(8, "Sequences per step, over all ranks.")
    micro_batch: Annotated[int | None, or_auto(whole(1, 10**7))] = key(
        None, 'Sequences per rank and forward; gradients accumulate over the rest. "auto": the rank\'s whole share.'
    )
    seq_len: Annotated[int, whole(1, 10**7)] = key(256, "Tokens per sequence.")
    precision: Annotated[Precision, choice("bf16", "fp32", "fp16")] = key(
        "bf16", "Type of weights and activations in forward and backward. fp16 scales the loss dynamically."
    )
    grad_dtype: Annotated[Literal["auto", "bf16", "fp32", "fp16"], choice("auto", "bf16", "fp32", "fp16")] = key(
        "auto", 'Type in which gradients are kept and accumulated. "auto": as precision.'
    )
    grad_clip: Annotated[float, real(0, 1e9)] = key(1.0, "Largest global gradient norm; 0 turns clipping off.")
    seed: Annotated[int, whole(0, 2**63 - 1)] = key(0, "Seed of weights, data order, dropout and sampling.")
    compile: Annotated[bool, flag()] = key(
        False,
        "Compile the model's blocks with torch.compile. It needs a C++ compiler, on a GPU Triton too. Changes results "
        "by rounding, and the first step takes the time of compiling.",
    )
    validation_every: Annotated[int, whole(0, 10**9)] = key(
        0, "Steps between validations; 0 validates at the end only."
    )
    validation_batches: Annotated[int, whole(0, 10**6)] = key(
        8, "Batches of batch_size sequences per validation; 0 turns validation off."
    )
    sample_tokens: Annotated[int, whole(0, 10**5)] = key(
        200, "Length of the sample that the model writes at the end; 0 writes none."
    )
    threads: Annotated[int | None, or_auto(whole(1, 4096))] = key(
        None, 'PyTorch threads per rank. "auto": OMP_NUM_THREADS, or the machine\'s cores divided among its ranks.'
    )


class TiersSection(Section):
    """Where training state may live and how much of it."""

    device: Annotated[int | None, or_auto(size())] = key(
        None, 'Device memory budget per rank, in bytes. "auto": what is free when the run starts.'
    )
    host: Annotated[int | None, or_auto(size())] = key(
        None, 'Host memory budget of the node, in bytes, divided among its ranks. "auto": from the memory that is free.'
    )
    nvme: Annotated[list[Path], paths()] = key([], "Folders for tier files, striped over all of them. One per drive.")
    nvme_shares: Annotated[list[int] | None, or_auto(wholes(1, 100))] = key(
        None, 'How many blocks each of the nvme folders gets in turn, as [3, 1]. "auto": as fast as each is.'
    )
    nvme_limit: Annotated[int | None, or_auto(size())] = key(
        None, 'Largest size of the tier files, in bytes, per rank. "auto": the free space.'
    )
    tile: Annotated[int | None, or_auto(whole(4096, 2**30))] = key(
        None, 'Parameters that move as one between tiers. "auto": from the budget and the largest shard.'
    )
    prefetch: Annotated[int | None, or_auto(whole(0, 1000))] = key(
        None, 'Units paged in ahead of their use. "auto": as many as the budget holds.'
    )


class PlacementSection(Section):
    """Home tier of each kind of state."""

    params: Annotated[Placement, placement()] = key("auto", "Weights that forward and backward read.")
    frozen: Annotated[Placement | Literal["params"], either(choice("params"), placement())] = key(
        "params", 'Of these the ones that are not trained, which are only read. "params": as `params` says.'
    )
    optimizer: Annotated[Placement, placement()] = key(
        "auto", "Master weights (or their remainder), moments and averages."
    )
    gradients: Annotated[Placement, placement()] = key("auto", "Gradient shards between backward and update.")
    activations: Annotated[Placement, placement(("device",))] = key("auto", "Tensors saved for the backward.")
    order: Annotated[list[str], order_of(("params", "gradients", "optimizer"))] = key(
        ["params", "gradients", "optimizer"],
        'Kinds that are on "auto" take the fastest memory that has room in this order. `tierzero plan` finds the best.',
    )


class ShardingSection(Section):
    """How state is divided among ranks."""

    stage: Annotated[int, choice(0, 1, 2, 3)] = key(
        3,
        "What is divided among the ranks. 0: nothing, plain data parallel. 1: optimizer state. 2: gradients too. 3: "
        "parameters too.",
    )
    units: Annotated[list[str] | None, names()] = key(
        None, 'Modules gathered together, by class name or by pattern of module names. "auto": the repeated blocks.'
    )
    min_unit: Annotated[int | None, or_auto(whole(0, 2**40))] = key(
        None,
        "Units with fewer parameters than this are gathered together with the units beside them; one that has none "
        "beside it with the unit that contains it, in the end the whole model's own. "
        '"auto": 1,000,000 with units = "auto", 0 for units that you name.',
    )
    reshard_after_forward: Annotated[bool | list[str], either(flag(), listed_names())] = key(
        True,
        "true: free a unit's gathered weights after its forward and gather them again for its backward. false: keep "
        "all units gathered until the update. A list: keep the units that it names.",
    )


class OptimizerSection(Section):
    """The optimizer and its schedule."""

    name: Annotated[Literal["adamw", "adam"], choice("adamw", "adam")] = key(
        "adamw", "adamw: decoupled weight decay. adam: weight decay added to the gradient."
    )
    lr: Annotated[float, real(0, 1000)] = key(3e-4, "Peak learning rate.")
    betas: Annotated[tuple[float, float], real_pair(0, 1)] = key((0.9, 0.95), "Decay rates of the two moments.")
    eps: Annotated[float, real(0, 1, above=True)] = key(1e-8, "Added to the root of the second moment.")
    weight_decay: Annotated[float, real(0, 1000)] = key(0.1, "Weight decay of matrices; vectors are not decayed.")
    schedule: Annotated[Literal["constant", "cosine", "linear"], choice("constant", "cosine", "linear")] = key(
        "constant", "Learning rate after the warm-up, over train.steps."
    )
    warmup: Annotated[int, whole(0, 10**9)] = key(0, "Steps of linear warm-up.")
    min_lr_ratio: Annotated[float, real(0, 1)] = key(0.1, "Where cosine and linear end, as a fraction of lr.")
    overlap: Annotated[
        Literal["auto", "forward", "both", "backward", "none"], choice("auto", "forward", "both", "backward", "none")
    ] = key(
        "auto",
        "What the update runs beside: the next forward; both halves of the step (takes twice the space for states on "
        'nvme); the backward alone (needs train.grad_clip = 0); or nothing. "auto": both halves where that is possible '
        "and takes at most half of what the drives have free, within tiers.nvme_limit; else the next forward.",
    )
    ema: Annotated[float, real(0, 1, below=True)] = key(
        0.0,
        "Decay of an exponential moving average of the weights that is kept beside them, 4 bytes per parameter: after "
        "each update ema = ema + (1 - decay) * (weight - ema). 0: none.",
    )
    state_dtype: Annotated[Literal["fp32", "bf16", "int8"], choice("fp32", "bf16", "int8")] = key(
        "fp32", "Type in which the two moments are kept, in memory and on the drive; the master weights stay fp32."
    )


class ActivationsSection(Section):
    """How activations are kept for the backward."""

    recompute: Annotated[
        Literal["none", "unit", "sqrt"] | int, either(choice("none", "unit", "sqrt"), whole(1, 10**6))
    ] = key(
        "none",
        "none: keep everything. unit: keep each unit's input and run its forward again in the backward. A number k: do "
        "so with k units in a row, of which only the first one's input is kept. sqrt: the root of the number of units "
        "as k, which keeps least.",
    )


class IoSection(Section):
    """How tier files are read and written."""

    block_size: Annotated[int, size(4096, 2**30, multiple=4096)] = key(
        8 * MIB, "Largest request, and the stripe over several paths, in bytes."
    )
    queue_depth: Annotated[int, whole(1, 256)] = key(8, "Requests in flight per path.")
    direct: Annotated[Literal["auto"] | bool, choice("auto", True, False)] = key(
        "auto", 'Bypass the page cache (O_DIRECT). "auto": where the file system can; true: refuse to run where not.'
    )
    verify: Annotated[bool, flag()] = key(False, "Check a checksum on everything that is read back.")


class CheckpointSection(Section):
    """Checkpoints of a ``tierzero train`` run."""

    dir: Annotated[Path | None, path()] = key(
        None,
        "Folder of the checkpoints (step-00000100 and so on), the last one from the end of the run. Left out: none.",
    )
    every: Annotated[int, whole(0, 10**9)] = key(
        0, "Steps between checkpoints; 0 writes one at the end of the run only."
    )
    keep: Annotated[int, whole(1, 10**6)] = key(2, "Newest checkpoints to keep.")
    async_: Annotated[bool, flag()] = key(
        False,
        "Write checkpoints beside the training, which goes on at once. The last one is waited for.",
        alias="async",
    )
    durable: Annotated[bool, flag()] = key(
        False,
        "Seal every step in the tier files: after a crash, --resume auto goes on from the last one. Needs "
        'placement.params and placement.optimizer = "nvme", checkpoint.dir, and twice the space for them.',
    )


class LogSection(Section):
    """What a run records."""

    metrics: Annotated[Path | None, path()] = key(
        None,
        "File that gets one JSON object per step. A resumed run appends, a new one starts over. Left out: none.",
    )
    dir: Annotated[Path | None, path()] = key(
        None,
        "Folder of the run's record, for tierzero report. A resumed run goes on in it, a new one starts over. Left "
        "out: none.",
    )
    timeline: Annotated[bool, flag()] = key(
        False,
        "Record in log.dir where each step's time went, and the timelines of the first steps, the newest and each "
        "hundredth.",
    )
    every: Annotated[int, whole(1, 10**9)] = key(1, "Steps between progress lines where there is no terminal.")
