"""First contents of the tiers, unit by unit: from a built model, from modules that initialise themselves, or from
safetensors files.

Never more than one unit's full weights exist at a time, and each rank keeps only its shard of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.optim.average import begin_average
from tierzero.optim.formats import store_master
from tierzero.runtime.own_values import EmptyBuffers, Filler, check_resets, empty_again, fill_empty, warn_of_lost_values
from tierzero.runtime.safetensors_folder import ModelValues
from tierzero.runtime.state import GroupState, SlotState, Tile, UnitState, attach, piece_in
from tierzero.runtime.tile_io import OpenTile, Parts

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime

Init = Callable[[nn.Module], object] | str | Path | None


def check_fillable(model: nn.Module, init: Init) -> None:
    """Raises ConfigError, before anything is allocated, when a parameter or buffer on the meta device has no source of
    values.
    """
    if isinstance(init, str | Path):
        ModelValues(Path(init), model).check(model)
        return
    if init is None:
        check_resets(model)
        warn_of_lost_values(model)
        return
    if not callable(init):
        raise ConfigError(f"init: {init!r} is a {type(init).__name__}; give a function of a module, or a folder")
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "init: the model has its values already, and a function is for an empty model; build it under "
            "tierzero.empty_init(), or leave init out"
        )


def fill(runtime: Runtime, model: nn.Module, init: Init) -> None:
    """Gives the tiers their first contents and takes the values from the model's parameters."""
    buffers = EmptyBuffers(model)
    folder = ModelValues(Path(init), model) if isinstance(init, str | Path) else None
    init = init if callable(init) else None
    for unit in runtime.units:
        _fill_unit(runtime, model, unit, init, folder)
    if folder is not None:
        folder.load_buffers(model)
    else:
        buffers.fill_rest(init)
    buffers.check()
    take_values(runtime)


@torch.no_grad()
def _fill_unit(
    runtime: Runtime, model: nn.Module, unit: UnitState, init: Filler | None, folder: ModelValues | None
) -> None:
    if folder is None:
        fill_empty(model, unit, init)
    for group in unit.groups:
        sources = _sources(runtime, group, folder)
        for tile in group.tiles:
            runtime.engine.run(_fill_tile(runtime, group, tile, sources))
    if init is not None:
        empty_again(unit.all_slots())
    else:
        _take_unit(unit)


def take_values(runtime: Runtime) -> None:
    """From now on the tiers have the values of all parameters."""
    for unit in runtime.units:
        _take_unit(unit)


def _take_unit(unit: UnitState) -> None:
    for slot in unit.all_slots():
        if not slot.is_away:
            slot.put_away()
            attach(slot)


def _sources(runtime: Runtime, group: GroupState, folder: ModelValues | None) -> list[tuple[SlotState, torch.Tensor]]:
    """Each parameter that this rank holds a part of, with its full values in host memory, flattened."""
    sources = []
    for slot in group.slots:
        values = folder.load(slot.slot.names) if folder is not None else slot.parameter.detach()
        flat = values.reshape(-1).cpu()
        if runtime.collectives is not None and folder is None:
            # Whatever each rank's generator gave, rank 0's weights count. A copy, in case the caller's tensor is
            # shared.
            flat = flat.contiguous()
            runtime.collectives.broadcast(flat)
        sources.append((slot, flat))
    return sources


async def _fill_tile(
    runtime: Runtime, group: GroupState, tile: Tile, sources: list[tuple[SlotState, torch.Tensor]]
) -> None:
    parts = Parts.STATE if group.fmt is not None else Parts.WEIGHT
    async with runtime.tile_io.fresh(group, tile, parts) as opened:
        await runtime.engine.call(_write_values, group, tile, opened, sources)


def _write_values(
    group: GroupState, tile: Tile, opened: OpenTile, sources: list[tuple[SlotState, torch.Tensor]]
) -> None:
    assert opened.weight is not None
    opened.weight.zero_()
    for part in opened.optimizer.values():
        part.zero_()
    for slot, values in sources:
        piece = piece_in(slot, tile)
        if piece is None:
            continue
        given, inside = values[piece.of_parameter], piece.of_tile
        if group.fmt is None:
            opened.weight[inside].copy_(given)
        else:
            parts = opened.cut(inside)
            store_master(group.fmt, given.float().contiguous(), opened.weight[inside], parts)
            begin_average(group.fmt, opened.weight[inside], parts)
