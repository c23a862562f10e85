"""The public functions that reach into the state of a sharded model, by parameter, wherever it lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import nn

from tierzero.errors import BudgetError, ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.runtime.access import StateKind, local_range, read_states, state_dtype, write_states
from tierzero.runtime.runtime import Runtime
from tierzero.runtime.state import SlotState, slot_required
from tierzero.tiers.free_memory import available_bytes

_WORTH_ASKING = 64 * 2**20
Kind = StateKind | Literal["step"]
"""What the functions here name: arrays of the state, and the count of a parameter's updates."""


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
    slots = list(dict.fromkeys(_slots(parameters)))
    _check_room(slots)
    opened: list[SlotState] = []
    try:
        _open(slots, opened)
        yield
    finally:
        _write_back(opened)


@out_of_graphs
def _check_room(slots: list[SlotState]) -> None:
    """Raises BudgetError where the copies would be more than what is free. Of little memory the system is not asked."""
    nbytes = sum(slot.slot.numel * slot.group.layout.dtype.itemsize for slot in slots if slot.is_away)
    free = available_bytes() if nbytes > _WORTH_ASKING else nbytes
    if nbytes > free:
        raise BudgetError(
            f"gathered: the full values take {nbytes:,} bytes, more than the {free:,} of host memory that are free; "
            "enter with fewer parameters at a time",
            nbytes - free,
        )


@out_of_graphs
def _open(slots: list[SlotState], opened: list[SlotState]) -> None:
    for slot in slots:
        runtime = slot.owner
        if slot in runtime.held_open:
            continue
        runtime.require_open()
        slot.make_resident(runtime.full_copy(slot), between_steps=True)
        runtime.held_open.add(slot)
        opened.append(slot)


@out_of_graphs
def _write_back(slots: list[SlotState]) -> None:
    values: dict[SlotState, torch.Tensor] = {}
    for slot in slots:
        with torch.no_grad():
            values[slot] = slot.parameter.detach().cpu()
        slot.owner.held_open.discard(slot)
        if not slot.group.unit.active:
            slot.put_away()
    for slot, edited in values.items():
        slot.check_frozen()
        if (edited.shape, edited.dtype) != (slot.slot.shape, slot.group.layout.dtype):
            raise ConfigError(
                f"gathered: parameter {slot.name!r} was replaced by {edited.dtype} of shape {tuple(edited.shape)}; a "
                "sharded parameter keeps type and shape: build the model with others before tierzero.shard"
            )
    for runtime, own in _by_model(slots).items():
        # What a pending update would still change must be in the tiers before the edit is laid on top of it.
        runtime.flush()
        if runtime.whole_state.averaged:
            _refuse_edits(runtime, values, own)
            continue
        _write(runtime, own, "weight", [values[slot] for slot in own], local=False)


def _refuse_edits(runtime: Runtime, values: dict[SlotState, torch.Tensor], slots: list[SlotState]) -> None:
    for slot, stored in zip(slots, read_states(runtime, slots, "weight", local=False), strict=True):
        found = values[slot].contiguous()
        if not torch.equal(found.reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8)):
            runtime.whole_state.refuse_averages(f"gathered: a change of {slot.name!r}")


def _write(runtime: Runtime, slots: list[SlotState], kind: StateKind, values: list[torch.Tensor], local: bool) -> None:
    changed = True
    try:
        changed = write_states(runtime, slots, kind, values, local)
    finally:
        if changed:
            for unit in {slot.group.unit.index: slot.group.unit for slot in slots}.values():
                runtime.pager.forget(unit)
            for group in {id(slot.group): slot.group for slot in slots}.values():
                group.version += 1


@overload
def read_state(parameters: torch.Tensor, kind: Kind, local: bool = False) -> torch.Tensor: ...


@overload
def read_state(parameters: Iterable[torch.Tensor], kind: Kind, local: bool = False) -> list[torch.Tensor]: ...


@out_of_graphs
def read_state(
    parameters: torch.Tensor | Iterable[torch.Tensor], kind: Kind, local: bool = False
) -> torch.Tensor | list[torch.Tensor]:
    """One kind of a parameter's state in host memory: "weight", "master", "m", "v", "ema", "gradient" or "step".
    Of several parameters, a list, for which every tile is read once. Every rank must call it with the same parameters.

    Whole arrays have the parameter's shape; with ``local`` they are 1-D, this rank's elements (`local_range`), and a
    rank may call it by itself. "weight" and "gradient" have the dtype they are stored in, "master", "m", "v" and "ema"
    (the average that ``optimizer.ema`` keeps) are fp32, "step", the number of the parameter's updates, is an int64
    scalar. A gradient is as ``.grad`` would be: clipped, once it was, and times the loss scale where there is one.

    Raises ConfigError for a tensor that is not a sharded parameter, for another ``kind``, and for a gradient that is
    not there (none has come since it was last dropped), ValueError for what a frozen parameter does not have.
    """
    slots = _checked("read_state", parameters, kind)
    if kind == "step":
        found = {slot: torch.tensor(slot.step, device="cpu") for slot in slots}
    else:
        found = {}
        for runtime, own in _by_model(slots).items():
            runtime.flush_to_read()
            found.update(zip(own, read_states(runtime, own, kind, local), strict=True))
    return found[slots[0]] if isinstance(parameters, torch.Tensor) else [found[slot] for slot in slots]


@out_of_graphs
def write_state(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    kind: Kind,
    values: torch.Tensor | float | Sequence[torch.Tensor | float],
    local: bool = False,
) -> None:
    """Sets what `read_state` reads; of several parameters ``values`` is a sequence, one for each. Every rank must call
    it, between steps, with the same parameters and, unless ``local``, the same values.

    Values are converted to the dtype they are stored in. "master" sets the weight too, and "weight" the master, but
    where an element is what it was: that one's master stays. A gradient takes the place of what was accumulated, counts
    in the norm, and is there for the next step also where none had come. Moments and averages do not change what the
    weights are; before a parameter's first update its average follows what is written to weight or master.

    Raises as `read_state`, and ConfigError for values of another shape, before anything is changed.
    """
    slots = _checked("write_state", parameters, kind)
    given = [values] if isinstance(parameters, torch.Tensor) else list(cast("Sequence[Any]", values))
    if len(given) != len(slots):
        raise ConfigError(f"write_state: {len(slots)} parameters, but values for {len(given)}")
    if len(set(slots)) != len(slots):
        raise ConfigError("write_state: a parameter is given twice; tied parameters are one")
    for slot in slots:
        _check_writable(slot)
    if kind == "step":
        for slot, step in [(slot, _step_count(slot, value)) for slot, value in zip(slots, given, strict=True)]:
            slot.step = step
        return
    arrays = {slot: _array(slot, kind, value, local) for slot, value in zip(slots, given, strict=True)}
    for runtime, own in _by_model(slots).items():
        runtime.flush_to_read()
        _write(runtime, own, kind, [arrays[slot] for slot in own], local)


def local_elements(parameter: torch.Tensor) -> range:
    """The elements of the flattened parameter that lie on this rank, which is what ``local`` arrays of `read_state` and
    `write_state` are of. Empty where none does. Raises ConfigError for a tensor that is not a sharded parameter.
    """
    return local_range(slot_required(parameter))


def _checked(call: str, parameters: torch.Tensor | Iterable[torch.Tensor], kind: Kind) -> list[SlotState]:
    kinds = (*get_args(StateKind), "step")
    if kind not in kinds:
        raise ConfigError(f"{call}: kind is {kind!r}; use one of {', '.join(map(repr, kinds))}")
    if isinstance(parameters, nn.Module):
        raise ConfigError(f"{call}: takes parameters, one or several, not a module; such as module.weight")
    slots = _slots(parameters)
    for slot in slots:
        slot.owner.require_open()
        if call == "write_state" or kind in ("master", "ema"):
            slot.owner.whole_state.refuse_averages(f"{call}: {kind!r}")
        if slot in slot.owner.held_open and kind in ("weight", "master"):
            raise ConfigError(f"{call}: parameter {slot.name!r} is open in tierzero.gathered; read and change it there")
        if kind == "gradient" and call == "read_state" and slot.group.fmt is not None and not slot.has_grad:
            raise ConfigError(f"{call}: parameter {slot.name!r} has no gradient now; read it between backward and step")
    return slots


def _check_writable(slot: SlotState) -> None:
    if slot.owner.in_model_code:
        raise ConfigError(
            f"write_state: parameter {slot.name!r} is in a forward or backward now; write its state between them"
        )


def _step_count(slot: SlotState, value: Any) -> int:
    step = int(value)
    if step != value or step < 0:
        raise ConfigError(f"write_state: step of {slot.name!r} is {value}; use a count of updates, 0 or more")
    return step


def _array(slot: SlotState, kind: StateKind, value: Any, local: bool) -> torch.Tensor:
    shape = torch.Size([len(local_range(slot))]) if local else slot.slot.shape
    if not isinstance(value, torch.Tensor):
        return torch.full(shape, value, dtype=state_dtype(slot.group, kind), device="cpu")
    if value.shape != shape:
        raise ConfigError(
            f"write_state: {kind} of {slot.name!r} is of shape {tuple(shape)}"
            f"{' (the elements on this rank)' if local else ''}, the values are of {tuple(value.shape)}"
        )
    return value.detach().cpu()


def _by_model(slots: Sequence[SlotState]) -> dict[Runtime, list[SlotState]]:
    """Each once, in their order."""
    found: dict[Runtime, list[SlotState]] = {}
    for slot in dict.fromkeys(slots):
        found.setdefault(slot.owner, []).append(slot)
    return found


def _slots(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[SlotState]:
    return [slot_required(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)]
