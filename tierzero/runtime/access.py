"""Reading and changing the sharded state of parameters, wherever it lives: what `gathered`, exports and tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from tierzero.optim.formats import load_master, store_master
from tierzero.runtime.state import GroupState, Piece, SlotState, Tile, piece_in
from tierzero.runtime.tile_io import OpenTile, Parts
from tierzero.tiers import Priority

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime

StateKind = Literal["weight", "master", "m", "v", "gradient"]
_PARTS = {"weight": Parts.WEIGHT, "gradient": Parts.GRADIENT}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_full(runtime: Runtime, slot: SlotState, kind: StateKind) -> torch.Tensor:
    """One kind of state of one parameter, whole, in host memory. On several ranks every rank must call it.

    "weight" and "gradient" have their stored dtype, "master", "m" and "v" fp32. Raises ValueError where the parameter
    has no such state.
    """
    group = slot.group
    if kind != "weight" and group.fmt is None:
        raise ValueError(f"parameter {slot.name!r} is frozen: it has no {kind}")
    dtype = {"weight": group.layout.dtype, "gradient": group.grad_dtype}.get(kind, torch.float32)
    full = torch.zeros(slot.slot.numel, dtype=dtype)

    def copy(opened: OpenTile, inside: slice, outside: slice) -> bool:
        full[outside] = _take(group, opened, kind, inside)
        return False

    _visit(runtime, slot, _PARTS.get(kind, Parts.STATE), copy)
    if runtime.collectives is not None and group.layout.parts > 1:
        # Every element is non-zero on one rank at most; summed as integers, no bit of it can change.
        bits = full.view(_BITS[dtype.itemsize])
        if runtime.world.replica:
            bits.zero_()
        wide = bits if dtype.itemsize >= 4 else bits.to(torch.int32)
        bits.copy_(runtime.collectives.small_sum(wide))
    return full.view(slot.slot.shape)


def write_changed(runtime: Runtime, slot: SlotState, values: torch.Tensor) -> bool:
    """Sets the elements of the weight that differ from ``values`` (host memory, the weight's dtype); the others keep
    their master to the last bit.

    Returns whether anything on this rank differed.
    """
    runtime.whole_state.before_edit()
    group = slot.group
    flat = values.reshape(-1)
    changed = False

    def change(opened: OpenTile, inside: slice, outside: slice) -> bool:
        nonlocal changed
        assert opened.weight is not None
        weight, wanted = opened.weight[inside], flat[outside]
        differs = weight.view(_BITS[weight.element_size()]) != wanted.contiguous().view(_BITS[weight.element_size()])
        if not bool(differs.any()):
            return False
        changed = True
        if group.fmt is None:
            weight.copy_(wanted)
        else:
            parts = {name: part[inside] for name, part in opened.optimizer.items()}
            master = load_master(group.fmt, weight, parts)
            store_master(group.fmt, torch.where(differs, wanted.float(), master), weight, parts)
        return True

    with runtime.engine.unbroken(f"while parameter {slot.name!r} was being changed"):
        _visit(runtime, slot, Parts.STATE if group.fmt else Parts.WEIGHT, change)
    return changed


def zero_moments(runtime: Runtime, slot: SlotState) -> None:
    """Sets this rank's part of the parameter's moments to zero; the master stays as it is."""
    runtime.whole_state.before_edit()

    def zero(opened: OpenTile, inside: slice, outside: slice) -> bool:
        for name in ("m", "v"):
            opened.optimizer[name][inside].zero_()
        return True

    with runtime.engine.unbroken(f"while the moments of parameter {slot.name!r} were being set to zero"):
        _visit(runtime, slot, Parts.STATE, zero)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _take(group: GroupState, opened: OpenTile, kind: StateKind, inside: slice) -> torch.Tensor:
    if kind == "weight":
        assert opened.weight is not None
        return opened.weight[inside]
    if kind == "gradient":
        assert opened.gradient is not None
        return opened.gradient[inside]
    if kind == "master":
        assert opened.weight is not None
        assert group.fmt is not None
        return load_master(
            group.fmt, opened.weight[inside], {name: part[inside] for name, part in opened.optimizer.items()}
        )
    return opened.optimizer[kind][inside]


def _visit(runtime: Runtime, slot: SlotState, parts: Parts, act: Callable[[OpenTile, slice, slice], bool]) -> None:
    """Opens each tile that holds a part of the parameter; ``act(opened, elements of the tile, elements of the
    parameter)`` says whether to write it back.
    """
    for tile in slot.group.tiles:
        piece = piece_in(slot, tile)
        if piece is not None:
            runtime.engine.run(_visit_tile(runtime, piece, tile, parts, act))


async def _visit_tile(
    runtime: Runtime, piece: Piece, tile: Tile, parts: Parts, act: Callable[[OpenTile, slice, slice], bool]
) -> None:
    opened = await runtime.tile_io.open(piece.slot.group, tile, parts, Priority.DEMAND)
    try:
        dirty = await runtime.engine.call(act, opened, piece.of_tile, piece.of_parameter)
    except BaseException:
        runtime.tile_io.close(opened)
        raise
    if dirty:
        await runtime.updater.whole_or_failed(runtime.tile_io.write_back(opened))
    else:
        runtime.tile_io.close(opened)
