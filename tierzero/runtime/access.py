"""Reading and changing the sharded state of parameters, wherever it lives: what the public functions, exports and
tests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.optim.average import begin_average
from tierzero.optim.formats import load_master, store_master
from tierzero.optim.gradient import sum_of_squares
from tierzero.optim.moments import load_moments, store_moments
from tierzero.runtime.state import GroupState, Piece, SlotState, slot_of
from tierzero.runtime.tile_io import OpenTile, Parts
from tierzero.runtime.visits import visit

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime

StateKind = Literal["weight", "master", "m", "v", "ema", "gradient"]
_PARTS = {"weight": Parts.WEIGHT, "gradient": Parts.GRADIENT}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUM_ELEMENTS = 16 << 20
"""Elements that are summed over the ranks at a time, unless one parameter has more."""


def state_dtype(group: GroupState, kind: StateKind) -> torch.dtype:
    """Of what is read: weight and gradient as they are stored, all else fp32."""
    return {"weight": group.layout.dtype, "gradient": group.grad_dtype}.get(kind, torch.float32)


def local_range(slot: SlotState) -> range:
    """Elements of the flattened parameter that lie on this rank."""
    fragment = slot.fragment
    return range(0) if fragment is None else range(fragment.start, fragment.start + fragment.numel)


def read_states(runtime: Runtime, slots: Sequence[SlotState], kind: StateKind, local: bool) -> list[torch.Tensor]:
    """One kind of state of parameters, in host memory: whole, in their shapes, for which every rank must call it, or
    this rank's elements, 1-D.
    """
    offsets = {slot: local_range(slot).start if local else 0 for slot in slots}
    found = {
        slot: torch.zeros(
            len(local_range(slot)) if local else slot.slot.numel, dtype=state_dtype(slot.group, kind), device="cpu"
        )
        for slot in slots
    }

    def copy(opened: OpenTile, piece: Piece) -> bool:
        at, offset = piece.of_parameter, offsets[piece.slot]
        found[piece.slot][at.start - offset : at.stop - offset] = _take(opened, kind, piece.of_tile)
        return False

    visit(runtime, found, _PARTS.get(kind, Parts.STATE), copy)
    if kind == "gradient":
        for slot, gradient in found.items():
            if slot.clip_factor != 1.0:
                gradient.mul_(slot.clip_factor)
    if local:
        return [found[slot] for slot in slots]
    _join_ranks(runtime, found)
    return [found[slot].view(slot.slot.shape) for slot in slots]


def _join_ranks(runtime: Runtime, found: dict[SlotState, torch.Tensor]) -> None:
    """Every element is non-zero on one rank at most; summed as integers, no bit of it can change."""
    if runtime.collectives is None:
        return
    by_size: dict[int, list[torch.Tensor]] = {}
    for slot, full in found.items():
        if slot.group.layout.parts > 1 and full.numel():
            by_size.setdefault(full.element_size(), []).append(full.view(_BITS[full.element_size()]))
    for size, arrays in by_size.items():
        for batch in _batches(arrays):
            wide = torch.cat(batch).to(_BITS[max(size, 4)])
            if runtime.world.replica:
                wide.zero_()
            summed = runtime.collectives.small_sum(wide).split([bits.numel() for bits in batch])
            for bits, values in zip(batch, summed, strict=True):
                bits.copy_(values)


def _batches(arrays: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours, as many as are summed together."""
    batch: list[torch.Tensor] = []
    for array in arrays:
        if batch and sum(map(torch.numel, batch)) + array.numel() > _SUM_ELEMENTS:
            yield batch
            batch = []
        batch.append(array)
    if batch:
        yield batch


def write_states(
    runtime: Runtime, slots: Sequence[SlotState], kind: StateKind, values: Sequence[torch.Tensor], local: bool
) -> bool:
    """Sets one kind of state of parameters to ``values`` (host memory; whole, or with ``local`` 1-D, this rank's
    elements). Every rank must call it. Returns whether a weight may have changed on any rank; elements of weights that
    are what they were keep their master to the last bit.
    """
    wanted = {
        slot: given.reshape(-1).to(state_dtype(slot.group, kind)) for slot, given in zip(slots, values, strict=True)
    }
    offsets = {slot: local_range(slot).start if local else 0 for slot in slots}
    changed = [False]

    def change(opened: OpenTile, piece: Piece) -> bool:
        at, offset = piece.of_parameter, offsets[piece.slot]
        new = wanted[piece.slot][at.start - offset : at.stop - offset]
        dirty = _put(opened, kind, piece.of_tile, new)
        if dirty:
            changed[0] = True
            if kind in ("weight", "master") and piece.slot.step == 0:
                _begin_average(opened, piece.of_tile)
        return dirty

    if kind == "gradient":
        visit(runtime, wanted, Parts.GRADIENT, change)
        _note_gradients(wanted, offsets)
        return False
    runtime.whole_state.before_edit()
    parts = Parts.STATE if any(slot.group.fmt is not None for slot in slots) else Parts.WEIGHT
    with runtime.engine.unbroken(f"while the {kind} of parameter {slots[0].name!r} was being changed"):
        visit(runtime, wanted, parts, change)
    if runtime.collectives is not None and kind in ("weight", "master"):
        return bool(runtime.collectives.small_max(torch.tensor([int(changed[0])], device="cpu"))[0])
    return changed[0] and kind in ("weight", "master")


def _note_gradients(wanted: dict[SlotState, torch.Tensor], offsets: dict[SlotState, int]) -> None:
    """They count as come, and in the norm, from now on."""
    for slot, gradient in wanted.items():
        held = local_range(slot)
        offset = offsets[slot]
        slot.drop_gradient()
        slot.sum_of_squares = sum_of_squares(gradient[held.start - offset : held.stop - offset].contiguous())
        slot.has_grad = True


def zero_moments(runtime: Runtime, slots: Sequence[SlotState]) -> None:
    """Sets this rank's part of the parameters' moments to zero; the masters stay as they are."""
    runtime.whole_state.before_edit()

    def zero(opened: OpenTile, piece: Piece) -> bool:
        assert opened.group.fmt is not None
        parts = opened.cut(piece.of_tile)
        for segment in opened.group.fmt.moment_segments:
            parts[segment.name].zero_()
        return True

    if slots:
        with runtime.engine.unbroken(f"while the moments of parameter {slots[0].name!r} were being set to zero"):
            visit(runtime, slots, Parts.STATE, zero)


def sharded_model(runtime: Runtime, given: nn.Module) -> nn.Module:
    """The model as it was sharded, whose names those in a checkpoint are, for one that a library has wrapped.

    Raises ConfigError where ``given`` has parameters that are not the runtime's: nothing would be saved of them.
    """
    for name, parameter in given.named_parameters():
        slot = slot_of(parameter)
        if slot is None or slot.owner is not runtime:
            raise ConfigError(
                f"parameter {name!r} is not one of the sharded model that a checkpoint is of; pass that model, and "
                "keep what is around it in a file of your own"
            )
    return runtime.model


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def require_state(slots: Sequence[SlotState], kind: StateKind, called: str = "") -> None:
    """Raises ConfigError where a parameter has no state of this kind."""
    for slot in slots:
        if slot.group.fmt is None and kind != "weight":
            raise ConfigError(f"parameter {slot.name!r} is frozen: it has no {called or kind}")
        if kind == "ema" and slot.group.fmt is not None and not slot.group.fmt.is_averaged:
            raise ConfigError(f"parameter {slot.name!r} has no average: set optimizer.ema before the model is sharded")


def _take(opened: OpenTile, kind: StateKind, inside: slice) -> torch.Tensor:
    if kind == "gradient":
        assert opened.gradient is not None
        return opened.gradient[inside]
    assert opened.weight is not None
    if kind == "weight":
        return opened.weight[inside]
    fmt = opened.group.fmt
    assert fmt is not None
    if kind == "master":
        return load_master(fmt, opened.weight[inside], opened.cut(inside))
    parts = opened.cut(inside)
    if kind == "ema":
        return parts[kind]
    m, v = load_moments(fmt, parts, inside.stop - inside.start)
    return m if kind == "m" else v


def _put(opened: OpenTile, kind: StateKind, inside: slice, values: torch.Tensor) -> bool:
    """Sets elements of an open tile; False when they are so already."""
    if kind == "gradient":
        assert opened.gradient is not None
        opened.gradient[inside] = values
        return True
    assert opened.weight is not None
    if kind == "weight":
        return _put_weight(opened, inside, values)
    fmt = opened.group.fmt
    assert fmt is not None
    parts = opened.cut(inside)
    if kind == "master":
        store_master(fmt, values.contiguous(), opened.weight[inside], parts)
    elif kind == "ema":
        parts[kind].copy_(values)
    else:
        # They share bytes as int8: one that is no number would keep the other from ever being one again.
        m, v = (moment.nan_to_num(0.0, 0.0, 0.0) for moment in load_moments(fmt, parts, values.numel()))
        store_moments(fmt, values if kind == "m" else m, values if kind == "v" else v, parts)
    return True


def _begin_average(opened: OpenTile, inside: slice) -> None:
    """Until its first update the average of a parameter is the weight, however that gets its values."""
    if opened.group.fmt is not None:
        assert opened.weight is not None
        begin_average(opened.group.fmt, opened.weight[inside], opened.cut(inside))


def _put_weight(opened: OpenTile, inside: slice, wanted: torch.Tensor) -> bool:
    assert opened.weight is not None
    weight, fmt = opened.weight[inside], opened.group.fmt
    bits = _BITS[weight.element_size()]
    differs = weight.view(bits) != wanted.contiguous().view(bits)
    if not bool(differs.any()):
        return False
    if fmt is None:
        weight.copy_(wanted)
    else:
        parts = opened.cut(inside)
        master = load_master(fmt, weight, parts)
        store_master(fmt, torch.where(differs, wanted.float(), master), weight, parts)
    return True
