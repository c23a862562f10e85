"""The public functions on sharded models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.runtime.access import StateKind, persistent_buffers, read_full, write_changed
from tierzero.runtime.build import build_runtime
from tierzero.runtime.fill import Init
from tierzero.runtime.runtime import Runtime, runtime_of
from tierzero.runtime.state import SlotState, slot_of
from tierzero.sharding.units import UnitChoice

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    config: Config | None = None,
    units: UnitChoice = None,
    mesh: DeviceMesh | None = None,
    init: Init = None,
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

    Raises ConfigError or BudgetError before anything is allocated.
    """
    if config is not None and not isinstance(config, Config):
        how = "tz.Config.from_dict(...)" if isinstance(config, Mapping) else "tz.Config.load(path)"
        raise ConfigError(f"shard: config is a {type(config).__name__}; make a configuration of it with {how}")
    build_runtime(model, config if config is not None else Config.from_dict({}), units, mesh, init)
    return model


@contextmanager
def gathered(parameters: nn.Parameter | Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the parameters have their full values, to read or to change in place; changes are kept.

    On several ranks every rank must enter with the same parameters and make the same changes. The full values are
    copies in memory that no budget counts: enter with a few parameters at a time. Elements that are not changed keep
    their master weights to the last bit.

    This is the place to change weights by hand. A forward that changes its own is refused; what it writes through a
    parameter's ``.data`` goes unnoticed, and is lost unless the weights lie in memory.
    """
    if isinstance(parameters, nn.Module):
        raise ConfigError("gathered: takes parameters, a few at a time, not a module; such as module.weight")
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    slots = list(dict.fromkeys(_slot(parameter) for parameter in tensors))
    opened: list[SlotState] = []
    try:
        for slot in slots:
            runtime = slot.owner
            if slot in runtime.held_open:
                continue
            runtime.require_open()
            slot.make_resident(runtime.full_copy(slot))
            runtime.held_open.add(slot)
            opened.append(slot)
        yield
    finally:
        _write_back(opened)


def _write_back(slots: list[SlotState]) -> None:
    for slot in slots:
        runtime = slot.owner
        with torch.no_grad():
            values = slot.parameter.detach().cpu()
        runtime.held_open.discard(slot)
        if not slot.group.unit.active:
            slot.put_away()
        # What a pending update would still change must be in the tiers before the edit is laid on top of it.
        runtime.flush()
        changed = True
        try:
            changed = write_changed(runtime, slot, values)
            if runtime.collectives is not None:
                changed = bool(runtime.collectives.small_max(torch.tensor([int(changed)]))[0])
        finally:
            if changed:
                runtime.pager.forget(slot.group.unit)
                slot.group.version += 1


def full_state_dict(model: nn.Module, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, whole, in host memory, under the model's own names. Every rank must call
    it.

    Weights are gathered one unit at a time; the result as a whole must fit in memory (what `save_checkpoint`
    writes need not). With ``rank0_only`` the other ranks get an empty dict. Tied parameters share one
    tensor.
    """
    runtime = runtime_of(model)
    runtime.require_open()
    runtime.flush_to_read()
    if runtime.collectives is not None:
        runtime.collectives.barrier()  # the gathers that follow might fit those of a rank that trains on
    keep = not rank0_only or runtime.world.rank == 0
    by_slot: dict[SlotState, torch.Tensor] = {}
    for unit in runtime.units:
        for gathered_group in runtime.pager.demand(unit, in_order=False):
            for slot in gathered_group.group.slots if keep else ():
                by_slot[slot] = gathered_group.parameter_values(slot.slot).detach().clone().cpu()
    if not keep:
        return {}
    named = model.named_parameters(remove_duplicate=False)
    state = {name: by_slot[_slot(parameter)] for name, parameter in named}
    for name, buffer in persistent_buffers(model):
        state[name] = buffer.detach().cpu().clone()
    return state


def read_state(parameter: nn.Parameter, kind: StateKind) -> torch.Tensor:
    """One kind of a parameter's state, whole, in host memory: "weight", "master", "m", "v" or "gradient". Every rank
    must call it.

    "master", "m" and "v" are fp32; "gradient" is as accumulated, before clipping. Raises ConfigError for a tensor
    that is not a sharded parameter, for another ``kind``, and for a gradient that is not there (none has come since
    it was last dropped), ValueError for what a frozen parameter does not have.
    """
    kinds = get_args(StateKind)
    if kind not in kinds:
        raise ConfigError(f"read_state: kind is {kind!r}; use one of {', '.join(map(repr, kinds))}")
    slot = _slot(parameter)
    if kind == "gradient" and slot.group.fmt is not None and not slot.has_grad:
        raise ConfigError(f"read_state: parameter {slot.name!r} has no gradient now; read it between backward and step")
    runtime = slot.owner
    runtime.require_open()
    runtime.flush_to_read()
    return read_full(runtime, slot, kind)


def stats(model: nn.Module) -> dict[str, Any]:
    """Figures of a sharded model: bytes per tier now and at their peak, and traffic and stalls of the last step.

    Keys: ``parameters`` (elements), ``state_bytes``, ``tier_bytes`` and ``peak_tier_bytes`` {device, host, nvme},
    ``nvme_read_bytes``, ``nvme_write_bytes``, ``comm_bytes`` {all_gather, reduce_scatter, all_reduce}, ``stall_s``
    {nvme_read, nvme_write, gather, optimizer, host_budget}, ``step_s`` (from the step's first forward to the end of
    ``optimizer.step()``) and ``compute_s``, the part of it that is no stall, ``placement`` (bytes of each kind of state
    per tier) and ``prefetch``, ``tile`` (elements). All are this rank's.
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
        "state_bytes": sum(runtime.store.bytes_by_tier().values()),
        "tier_bytes": runtime.tier_bytes(),
        "peak_tier_bytes": runtime.peak_tier_bytes(),
        "placement": placement,
        "prefetch": runtime.plan.prefetch,
        "tile": runtime.plan.tile,
        **runtime.last_step.as_dict(),
        "compute_s": runtime.last_step.compute_s,
    }


def close(model: nn.Module) -> None:
    """Ends a sharded model: background work stops, memory and tier files are given back. It cannot be used
    afterwards.
    """
    runtime_of(model).close()


def _slot(parameter: torch.Tensor) -> SlotState:
    slot = slot_of(parameter) if isinstance(parameter, torch.Tensor) else None
    if slot is None:
        raise ConfigError("this tensor is not a parameter of a model sharded with tierzero.shard")
    return slot


def running(model: nn.Module) -> Runtime:
    """The runtime of a sharded model, for tools and tests."""
    return runtime_of(model)
