"""The public functions that reach into the state of a sharded model, by parameter, wherever it lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn

from tierzero.errors import BudgetError, ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.runtime.access import StateKind, local_range, read_states, write_states
from tierzero.runtime.asked import Kind, agree, agreeing, as_array, checked_slots, given_values, slots_of
from tierzero.runtime.runtime import Runtime
from tierzero.runtime.state import SlotState, slot_required
from tierzero.tiers.free_memory import available_bytes

_WORTH_ASKING = 64 * 2**20


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
    slots = list(dict.fromkeys(slots_of(parameters)))
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
def read_state(parameters: Iterable[torch.Tensor], kind: Kind, local: bool = False) -> list[Any]: ...


@out_of_graphs
def read_state(
    parameters: torch.Tensor | Iterable[torch.Tensor], kind: Kind, local: bool = False
) -> torch.Tensor | list[Any]:
    """One kind of a parameter's state in host memory: "weight", "master", "m", "v", "ema", "gradient" or "step".
    Of several parameters, a list, for which every tile is read once. Every rank must call it with the same parameters.

    Whole arrays have the parameter's shape; with ``local`` they are 1-D, this rank's elements (`local_range`), and a
    rank may call it by itself. "weight" and "gradient" have the dtype they are stored in, "master", "m", "v" and "ema"
    (the average that ``optimizer.ema`` keeps) are fp32, "step", the number of the parameter's updates, is an int64
    scalar. A gradient is as ``.grad`` would be: clipped, once it was, and times the loss scale where there is one.

    Raises ConfigError for a tensor that is not a sharded parameter, for another ``kind``, for what a frozen parameter
    does not have, and for a gradient that is not there (none has come since it was last dropped); in a list it is None.
    Raises RankMismatchError where ranks ask for different things.
    """
    slots = checked_slots("read_state", parameters, kind)
    alone = isinstance(parameters, torch.Tensor)
    there = [slot for slot in slots if kind != "gradient" or slot.has_grad]
    if alone and not there:
        raise ConfigError(
            f"read_state: parameter {slots[0].name!r} has no gradient now; read it between backward and step"
        )
    found: dict[SlotState, torch.Tensor] = {}
    for runtime, own in _by_model(there).items():
        if not local:
            agree(runtime, "read_state", kind, own)
        if kind == "step":
            found.update((slot, torch.tensor(slot.step, device="cpu")) for slot in own)
            continue
        runtime.flush_to_read()
        found.update(zip(own, read_states(runtime, own, kind, local), strict=True))
    return found[slots[0]] if alone else [found.get(slot) for slot in slots]


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

    Raises as `read_state`, and ConfigError for values of another shape or that the kind cannot have, before anything is
    changed on any rank.
    """
    slots = checked_slots("write_state", parameters, kind)
    given = given_values(parameters, values, len(slots))
    if len(set(slots)) != len(slots):
        raise ConfigError("write_state: a parameter is given twice; tied parameters are one")
    value_of = dict(zip(slots, given, strict=True))
    arrays: dict[SlotState, torch.Tensor] = {}
    by_model = _by_model(slots)
    for runtime, own in by_model.items():
        with agreeing(runtime, "write_state", kind, own, local) as said:
            arrays.update((slot, as_array(slot, kind, value_of[slot], local)) for slot in own)
            said.extend(arrays[slot] for slot in own if not local)
    for runtime, own in by_model.items():
        runtime.flush_to_read()
        if kind == "step":
            for slot in own:
                slot.step = int(arrays[slot])
        else:
            _write(runtime, own, kind, [arrays[slot] for slot in own], local)


def local_elements(parameter: torch.Tensor) -> range:
    """The elements of the flattened parameter that lie on this rank, which is what ``local`` arrays of `read_state` and
    `write_state` are of. Empty where none does. Raises ConfigError for a tensor that is not a sharded parameter.
    """
    return local_range(slot_required(parameter))


def _by_model(slots: Sequence[SlotState]) -> dict[Runtime, list[SlotState]]:
    """Each once, in their order."""
    found: dict[Runtime, list[SlotState]] = {}
    for slot in dict.fromkeys(slots):
        found.setdefault(slot.owner, []).append(slot)
    return found
