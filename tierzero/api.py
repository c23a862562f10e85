"""The public functions on sharded models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.runtime.access import persistent_buffers
from tierzero.runtime.accounts import peak_tier_bytes, tier_bytes
from tierzero.runtime.averaging import averages_in_use
from tierzero.runtime.build import build_runtime
from tierzero.runtime.fill import Init
from tierzero.runtime.parked import To
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.state import SlotState, slot_required
from tierzero.sharding.units import UnitChoice

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    config: Config | None = None,
    units: UnitChoice = None,
    mesh: DeviceMesh | None = None,
    init: Init = None,
    share: float | None = None,
) -> M:
    """Moves the model's parameters into the tiers, sharded over the ranks, and returns the same module.

    ``units``: classes, class names or name patterns of the modules that are gathered together; None takes
    ``sharding.units``, and else the repeated blocks. ``mesh``: a device mesh of one dimension, the ranks to shard
    over, or of two (hybrid sharding): to replicate over, such as nodes, and to shard over, such as the ranks of one.
    None is the default process group if there is one, else this process alone.

    An empty model (`empty_init`) is filled unit by unit: ``init=None`` calls each module's own ``reset_parameters()``,
    ``init=fn`` calls ``fn(module)`` as ``nn.Module.apply`` would, a path streams a folder of safetensors files.
    Parameters become ``train.precision``, unless the model mixes dtypes: then each keeps its own. Buffers keep theirs,
    and so do weights beside running statistics (batch norm). On several ranks, rank 0's values count.

    ``share``: models of one process that share budgets, such as a teacher and its student, each take a fraction of
    those in ``config`` (``tiers.device``, ``tiers.host`` and ``tiers.nvme_limit``, or the memory that is free where
    none is stated); together at most 1, until they are closed. None: the budgets are this model's own.

    Raises ConfigError or BudgetError before anything is allocated.
    """
    if config is not None and not isinstance(config, Config):
        how = "tz.Config.from_dict(...)" if isinstance(config, Mapping) else "tz.Config.load(path)"
        raise ConfigError(f"shard: config is a {type(config).__name__}; make a configuration of it with {how}")
    build_runtime(model, config if config is not None else Config.from_dict({}), units, mesh, init, share=share)
    return model


@contextmanager
def averaged(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with the averages of its weights (``optimizer.ema``), rounded to their dtype: for
    evaluation, generation, `full_state_dict`. Afterwards every bit of the state is as before.

    Every rank must enter it. At each end all of the state is read and written once, a tile at a time. A backward,
    ``optimizer.step``, saving, sealing, loading and changes of state are refused inside. Raises ConfigError where the
    model keeps no averages, and inside another one, `gathered`, a forward or a backward.
    """
    with averages_in_use(runtime_of(model)):
        yield


@out_of_graphs
def full_state_dict(model: nn.Module, rank0_only: bool = False, only: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, whole, in host memory, under the model's own names. Every rank must call
    it.

    Weights are gathered one unit at a time; the result as a whole must fit in memory (what `save_checkpoint`
    writes need not). With ``rank0_only`` the other ranks get an empty dict. Tied parameters share one
    tensor. ``only``: patterns of the names to give, such as ``["*.lora_*"]``, for which no other unit is gathered;
    empty for all.
    """
    runtime = runtime_of(model)
    runtime.require_open()
    runtime.refuse_inside_gathered("full_state_dict")
    named = [(name, slot_required(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    if any(module is runtime.model for module in model.modules()) and all(slot.owner is runtime for _, slot in named):
        model = runtime.model  # a library has wrapped it
        named = [(name, slot_required(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    named = [(name, slot) for name, slot in named if _wanted(name, only)]
    others = [name for name, slot in named if slot.owner is not runtime]
    if others:
        raise ConfigError(
            f"full_state_dict: parameter {others[0]!r} is another sharded model's; ask for each by itself"
        )
    runtime.flush_to_read()
    if runtime.collectives is not None:
        runtime.collectives.barrier()  # the gathers that follow might fit those of a rank that trains on
    keep = not rank0_only or runtime.world.rank == 0
    by_slot: dict[SlotState, torch.Tensor] = {}
    wanted = {slot for _, slot in named}
    for unit in runtime.units:
        if wanted.isdisjoint(unit.all_slots()):
            continue
        for gathered_group in runtime.pager.demand(unit, in_order=False):
            for slot in wanted.intersection(gathered_group.group.slots) if keep else ():
                by_slot[slot] = gathered_group.parameter_values(slot.slot).detach().clone().cpu()
    if not keep:
        return {}
    state = {name: by_slot[slot] for name, slot in named}
    for name, buffer in persistent_buffers(model):
        if _wanted(name, only):
            state[name] = buffer.detach().cpu().clone()
    return state


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatchcase(name, pattern) for pattern in only)


def stats(model: nn.Module) -> dict[str, Any]:
    """Figures of a sharded model: bytes per tier now and at their peak, and traffic and stalls of the last step.

    Keys: ``parameters`` (elements), ``overlap`` (what ``"auto"`` came to), ``state_bytes``, ``second_slot_bytes``
    (which the tier files have beside the state, for ``overlap = "both"`` or durable tiers), ``tier_bytes`` and
    ``peak_tier_bytes`` {device, host, nvme},
    ``nvme_read_bytes``, ``nvme_write_bytes``, ``comm_bytes`` {all_gather, reduce_scatter, all_reduce}, ``stall_s``
    {nvme_read, nvme_write, gather, optimizer, host_budget}, ``step_s`` (from the step's first forward to the end of
    ``optimizer.step()``) and ``compute_s``, the part of it that is no stall, ``cold_start_s``, the part of ``stall_s``
    before the forward's first unit (without others inside it) had its weights, ``placement`` (bytes of each kind of
    state per tier) and ``prefetch``, ``tile`` (elements). ``read_ahead_bytes`` are of state that the backward began to
    read for the next forward.

    Of updates ahead of the step (``optimizer.overlap = "both"``): ``tried_bytes``, ``kept_bytes`` and ``redone_bytes``
    (bytes of state written ahead, made current, and written in vain; what becomes of a step's tries counts in the next
    one), ``tries`` ("kept", "lost", "left out" after earlier losses, or None) and ``clip_factor``, the smallest factor
    that clipping gave a gradient. All are this rank's.
    """
    runtime = runtime_of(model)
    placement: dict[str, dict[str, int]] = {}
    for group in runtime.groups():
        for kind, home in (("params", "weight"), ("optimizer", "optimizer"), ("gradients", "gradient")):
            for tier, nbytes in group.home_bytes(home).items():
                row = placement.setdefault(kind, {"device": 0, "host": 0, "nvme": 0})
                row[tier.value] += nbytes
    return {
        "parameters": sum(slot.slot.numel for slot in runtime.slots()),
        "overlap": runtime.overlap,
        "state_bytes": sum(runtime.store.bytes_by_tier().values()) - runtime.store.spare_bytes,
        "second_slot_bytes": runtime.store.spare_bytes,
        "tier_bytes": tier_bytes(runtime),
        "peak_tier_bytes": peak_tier_bytes(runtime),
        "placement": placement,
        "prefetch": runtime.plan.prefetch,
        "tile": runtime.plan.tile,
        **runtime.last_step.as_dict(),
        **asdict(runtime.updates.outcome),
        "compute_s": runtime.last_step.compute_s,
    }


@out_of_graphs
def offload(model: nn.Module, to: To = "nvme") -> None:
    """Gives the device and host memory of a sharded model back until `reload`: between the phases of a loop, for
    generation by another program, say. Its state goes to files of its own in ``tiers.nvme``, of which as many bytes
    must be free as lie in memory; ``to="host"`` takes only device memory and copies it to the host.

    Training then goes on bit for bit, gradients that wait for a step included. Until `reload` every use of the model is
    refused with a ConfigError. Call it between steps, on every rank. Of a model that is offloaded already it does
    nothing.

    Raises ConfigError or BudgetError where there is no room for the copies, TierError where they cannot be written; the
    model is then as it was, on every rank.
    """
    runtime = runtime_of(model)
    runtime.whole_state.refuse_averages("offload")
    runtime.offloading.offload(runtime, to)


@out_of_graphs
def reload(model: nn.Module) -> None:
    """Brings an offloaded model back, on every rank. Of one that is not offloaded it does nothing.

    Raises BudgetError where its device memory has been taken meanwhile, TierError where a copy cannot be read or is
    damaged; the model then stays offloaded, on every rank, and may be tried again.
    """
    runtime = runtime_of(model)
    runtime.require_open(whole=False, present=False)
    runtime.offloading.reload(runtime)


def close(model: nn.Module) -> None:
    """Ends a sharded model: background work stops, memory and tier files are given back. It cannot be used
    afterwards.
    """
    runtime_of(model).close()


def running(model: nn.Module) -> Runtime:
    """The runtime of a sharded model, for tools and tests."""
    return runtime_of(model)
