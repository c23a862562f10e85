"""From a module and a configuration to a running `Runtime`: everything is checked and planned before anything is
allocated."""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tierzero.activations.segments import Segments, segment_length
from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.optim.average import warm_up as warm_up_average
from tierzero.optim.gradient import warm_up as warm_up_gradients
from tierzero.optim.kernel import warm_up
from tierzero.planner.memory_plan import plan_memory
from tierzero.planner.overlap import check_both, may_be_tried
from tierzero.planner.shape import Budgets, MemoryPlan, TileHomes
from tierzero.runtime.budgets import Share, agreed, budgets_here
from tierzero.runtime.contents import parameters_in, state_in
from tierzero.runtime.device import Device, choose_device
from tierzero.runtime.draft import Draft, draft
from tierzero.runtime.fill import Init, check_fillable, fill, take_values
from tierzero.runtime.forward import Recompute, has_forward, install_entry, install_forward, recomputed_alone
from tierzero.runtime.machinery import Machinery
from tierzero.runtime.own_values import check_buffers
from tierzero.runtime.refusals import install_refusals
from tierzero.runtime.runtime import Runtime
from tierzero.runtime.same_config import check_same_config
from tierzero.runtime.sealing import LastingFiles
from tierzero.runtime.second_slots import open_tiers
from tierzero.runtime.shardable import check_model
from tierzero.runtime.state import GroupState, Home, SlotState, Tile, UnitState
from tierzero.runtime.zeroing import install_zero_grad
from tierzero.sharding.collectives import Collectives, World
from tierzero.sharding.units import UnitChoice, dotted_prefixes
from tierzero.tiers import IoEngine, MemoryPool, StoredObject, Tier, TieredStore

Compiler = Callable[..., Callable[..., Any]]
"""Makes a compiled forward of a forward and the ``title`` of its module."""


def build_runtime(
    model: nn.Module,
    config: Config,
    units: UnitChoice = None,
    mesh: DeviceMesh | None = None,
    init: Init = None,
    device: Device | None = None,
    poison: bool = False,
    share: float | None = None,
    backend: str | None = None,
) -> Runtime:
    """Shards ``model`` as ``config`` says. Raises ConfigError or BudgetError before anything is allocated.

    ``share``: the part of the budgets that this model may have. ``device``, ``poison`` (fill released memory with NaN)
    and ``backend`` (of torch.compile) are for tests.
    """
    check_model(model)
    check_fillable(model, init)
    shared = Share.taken_from(config, share)
    config = shared.of_config()
    world = _world(mesh)
    check_same_config(config, world)
    device = device or choose_device(world.local_rank)
    drafted = draft(model, config, units, world.shards)
    lasting = LastingFiles.of(config, drafted, world)
    config = lasting.with_layout(config) if lasting is not None else config
    budgets = agreed(shared.of_free(budgets_here(config, world.local_size, device)), world)
    plan = plan_memory(drafted.shape(), drafted.request(config, world.size), budgets)
    compiler = _compiler(drafted, world, device, backend) if config.train.compile else None
    if config.optimizer.overlap == "both":
        check_both(plan)
    machinery = _assemble(plan, config, budgets, world, device, drafted, poison, lasting)
    runtime: Runtime | None = None
    try:
        unit_states = _declare(drafted, plan, machinery.store, world, device)
        open_store = functools.partial(_open, machinery.store, lasting)
        overlap = open_tiers(open_store, machinery.store, config, plan, world)
        machinery = dataclasses.replace(machinery, overlap=overlap)
        runtime = Runtime(model, unit_states, machinery)
        shared.held_by(runtime)
        for unit in unit_states:
            unit.runtime = runtime
        _fill(runtime, model, init)
    except BaseException:
        if runtime is not None:
            runtime.close()
        machinery.engine.close()
        machinery.store.close()
        raise
    _install(runtime, model, config, drafted, compiler)
    return runtime


def _compiler(drafted: Draft, world: World, device: Device, backend: str | None) -> Compiler:
    """What ``train.compile`` compiles blocks with. Raises ConfigError where nothing can be compiled."""
    from tierzero.runtime import compiling  # which imports PyTorch's compiler

    if not drafted.blocks:
        raise ConfigError(
            "train.compile: the model has no blocks, that is units that consist of several layers; name some with "
            "units=, or set train.compile = false"
        )
    backend = backend or compiling.INDUCTOR
    compiling.check_compiler(world, device.torch_device, backend)
    return functools.partial(compiling.compiled, backend=backend)


def _world(mesh: DeviceMesh | None) -> World:
    replica_ranks: tuple[tuple[int, ...], ...] = ()
    if mesh is not None:
        if mesh.ndim not in (1, 2):
            raise ConfigError(
                f"shard: mesh has {mesh.ndim} dimensions; pass a mesh of one dimension, the ranks to shard over, or of "
                "two: to replicate over, and to shard over"
            )
        if mesh.ndim == 2:
            replica_ranks = tuple(tuple(row) for row in mesh.mesh.tolist())
        group = mesh.get_group() if mesh.ndim == 1 else _all_ranks(mesh)
    elif dist.is_available() and dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
    else:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ConfigError(
                f"shard: this is one of {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE), but there is no process group "
                "to shard over; call torch.distributed.init_process_group() first"
            )
        return World()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(rank, size, local_rank, local_size, dist.get_rank(), group, replica_ranks)


def _all_ranks(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh of several dimensions."""
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return dist.distributed_c10d._get_default_group()
    found = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(found, dist.ProcessGroup)
    return found


def _assemble(
    plan: MemoryPlan,
    config: Config,
    budgets: Budgets,
    world: World,
    device: Device,
    drafted: Draft,
    poison: bool,
    lasting: LastingFiles | None,
) -> Machinery:
    engine = IoEngine(config.io.queue_depth, compute_threads=_cores(world))
    pools = {
        "device": MemoryPool(Tier.DEVICE, plan.device_state, device.device_allocator(), poison=poison),
        "arena": MemoryPool(Tier.DEVICE, plan.arena, device.device_allocator(), poison=poison),
        "buckets": MemoryPool(Tier.DEVICE, plan.bucket_limit, device.device_allocator(), poison=poison),
        "host": MemoryPool(Tier.HOST, plan.host, device.host_allocator(), poison=poison),
    }
    store = TieredStore(
        engine,
        pools={Tier.DEVICE: pools["device"], Tier.HOST: pools["host"]},
        nvme_paths=[Path(path) for path in config.tiers.nvme],
        rank=world.global_rank,
        block_size=config.io.block_size,
        direct=config.io.direct,
        nvme_limit=config.tiers.nvme_limit,
        verify=config.io.verify,
        nvme_shares=config.tiers.nvme_shares,
        lasting=lasting.name if lasting is not None else None,
        twofold=config.optimizer.overlap == "both",
    )
    collectives = (
        Collectives(world, [spec.title for spec in drafted.specs], device.is_host, device.lane)
        if world.size > 1
        else None
    )
    input_dtype = drafted.convert if drafted.convert is not torch.float32 else None
    return Machinery(
        world,
        device,
        plan,
        engine,
        store,
        pools,
        collectives,
        overlap if (overlap := config.optimizer.overlap) != "auto" else "forward",  # until the tiers are open
        input_dtype,
        drafted.kept,
        lasting,
        budgets.host,
        config.optimizer.ema,
    )


def _cores(world: World) -> int:
    """Cores for this rank's update threads: those it is bound to, or its share of the node's."""
    if not hasattr(os, "sched_getaffinity"):
        return 1
    allowed, share = len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // world.local_size
    return max(1, min(allowed, share))


def _declare(drafted: Draft, plan: MemoryPlan, store: TieredStore, world: World, device: Device) -> list[UnitState]:
    units = [
        UnitState(None, index, spec.title, spec.modules, spec.ancestors)  # type: ignore[arg-type]
        for index, spec in enumerate(drafted.specs)
    ]
    part = world.shard if drafted.stage.parts(world.shards) > 1 else 0
    for each, homes, in_place in zip(drafted.groups, plan.homes, plan.in_place, strict=True):
        unit = units[each.unit]
        group = GroupState(unit, len(unit.groups), each.layout, each.fmt, part, each.grad_dtype, device.torch_device)
        group.in_place = in_place
        group.whole = drafted.stage.whole
        group.tiles = _declare_tiles(f"{unit.title}/{group.index}", group, homes, plan, store)
        fragments = {fragment.slot.index: fragment for fragment in each.layout.fragments(part)}
        for slot, parameter in zip(each.layout.slots, each.parameters, strict=True):
            group.slots.append(SlotState(group, slot, parameter, fragments.get(slot.index)))
        unit.groups.append(group)
    return units


def _open(store: TieredStore, lasting: LastingFiles | None) -> None:
    if lasting is not None:
        lasting.check_layout(store)
    store.open(existing=lasting is not None and lasting.found is not None)


def _declare_tiles(
    name: str, group: GroupState, homes: Sequence[TileHomes], plan: MemoryPlan, store: TieredStore
) -> tuple[Tile, ...]:
    """Weights or gradients that lie in one tier of memory are one object, so that the shard is one tensor; all else
    is an object per tile.

    The objects of a tile are added together, weights first: on NVMe a tile's state is then one extent.
    """
    sizes = {"weight": group.layout.dtype.itemsize, "gradient": group.grad_dtype.itemsize}
    whole: dict[str, StoredObject] = {}
    starts: dict[str, int] = {}
    for kind in ("weight", "gradient"):
        tiers = {getattr(home, kind) for home in homes}
        if len(tiers) == 1 and (tier := tiers.pop()) in (Tier.DEVICE, Tier.HOST):
            kept = group.keeps_whole(kind)
            starts[kind] = group.shard_start if kept else 0
            elements = group.layout.numel if kept else group.layout.shard_numel
            whole[kind] = store.add(f"{name}/{kind}", elements * sizes[kind], tier)

    def home_of(kind: str, start: int, numel: int, index: int, tier: Tier | None, tried: bool = False) -> Home | None:
        if tier is None:
            return None
        if kind in whole:
            return Home(whole[kind], (starts[kind] + start) * sizes[kind], numel * sizes[kind])
        nbytes = numel * sizes[kind] if kind in sizes else group.fmt.optimizer_bytes(numel) if group.fmt else 0
        about = functools.partial(parameters_in if kind == "gradient" else state_in, group, start, start + numel)
        stored = store.add(f"{name}/{kind}/{index}", nbytes, tier, lasting=kind != "gradient", about=about, tried=tried)
        return Home(stored, 0, nbytes)

    tiles = []
    for span, home in zip(group.layout.tiles(plan.tile), homes, strict=True):
        tried = may_be_tried(home, plan)
        weight = home_of("weight", span.start, span.numel, span.index, home.weight, tried)
        assert weight is not None
        optimizer = home_of("optimizer", span.start, span.numel, span.index, home.optimizer, tried)
        gradient = home_of("gradient", span.start, span.numel, span.index, home.gradient)
        tiles.append(Tile(span, weight, optimizer, gradient))
    return tuple(tiles)


def _fill(runtime: Runtime, model: nn.Module, init: Init) -> None:
    for group in runtime.groups():
        if group.fmt is not None:
            warm_up(group.fmt, group.grad_dtype)
            if group.fmt.is_averaged:
                warm_up_average(group.fmt)
            warm_up_gradients(group.grad_dtype, group.layout.dtype)
    sealer = runtime.sealer
    if sealer is not None and sealer.found is not None:
        check_buffers(model)
        sealer.begin()
        take_values(runtime)
        return
    fill(runtime, model, init)
    if sealer is not None:
        sealer.begin()


@out_of_graphs
def _arrived(slot: weakref.ref[SlotState], _: torch.Tensor) -> None:
    """A parameter's hook. It must not own what owns the parameter: Python's collector does not see hooks."""
    found = slot()
    if found is not None:
        found.owner.gradients.arrive(found)


def _install(runtime: Runtime, model: nn.Module, config: Config, drafted: Draft, compiler: Compiler | None) -> None:
    for slot in runtime.slots():
        if slot.group.layout.trainable:
            with torch._C.DisableTorchFunctionSubclass():
                slot.parameter.register_post_accumulate_grad_hook(functools.partial(_arrived, weakref.ref(slot)))
    install_zero_grad(runtime, model)
    install_refusals(model)
    if not runtime.device.is_host:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(runtime.device.torch_device))
    blocks = drafted.blocks
    length = segment_length(config.activations.recompute, len(blocks))
    outermost = [name for name in blocks if not set(dotted_prefixes(name)) & set(blocks)]
    segments = Segments(length) if length > 1 else None
    for unit in runtime.units:
        for name, module in unit.modules.items():
            recompute: Recompute = None
            if segments is not None and name in outermost:
                recompute = functools.partial(segments.run, outermost.index(name))
            elif length == 1 and name in blocks:
                recompute = recomputed_alone
            compile_block = functools.partial(compiler, title=name) if compiler and name in blocks else None
            install_forward(runtime, unit, module, recompute, compile_block)
    _install_entries(runtime, model)


def _install_entries(runtime: Runtime, model: nn.Module) -> None:
    """For the modules that stand between units. What is inside the innermost ones is their own affair."""
    unit_of = {name: unit for unit in runtime.units for name in unit.modules}
    outer = {0, *[index for unit in runtime.units for index in unit.ancestors]}
    for name, module in model.named_modules():
        if name in unit_of or not has_forward(module) or next(module.parameters(), None) is None:
            continue
        unit = next(unit_of[above] for above in dotted_prefixes(name) if above in unit_of)
        if unit.index in outer and unit.groups:
            install_entry(runtime, unit, module)
