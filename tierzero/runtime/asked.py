"""What is asked of the state by hand: checked before anything is touched, and the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import xxhash
from torch import nn

from tierzero.errors import ConfigError, RankMismatchError
from tierzero.runtime.access import StateKind, local_range, require_state, state_dtype
from tierzero.runtime.runtime import Runtime
from tierzero.runtime.state import SlotState, slot_required

Kind = StateKind | Literal["step"]
"""Arrays of the state, and the count of a parameter's updates."""
_MOST_STEPS = 2**53
"""What a checkpoint's JSON holds exactly everywhere."""
_FAILED = -1


def slots_of(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[SlotState]:
    """Raises ConfigError for what is no parameter of a sharded model."""
    if isinstance(parameters, torch.Tensor):
        return [slot_required(parameters)]
    if not isinstance(parameters, Iterable):
        raise ConfigError(f"a parameter or several are needed, not {type(parameters).__name__}")
    return [slot_required(parameter) for parameter in parameters]


def checked_slots(call: str, parameters: torch.Tensor | Iterable[torch.Tensor], kind: Kind) -> list[SlotState]:
    """The parameters, all of which have state of this kind that may be looked at now. Raises ConfigError."""
    kinds = (*get_args(StateKind), "step")
    if kind not in kinds:
        raise ConfigError(f"{call}: kind is {kind!r}; use one of {', '.join(map(repr, kinds))}")
    if isinstance(parameters, nn.Module):
        raise ConfigError(f"{call}: takes parameters, one or several, not a module; such as module.weight")
    slots = slots_of(parameters)
    for slot in slots:
        slot.owner.require_open()
        slot.owner.check_use()
        if call == "write_state" or kind in ("master", "ema"):
            slot.owner.whole_state.refuse_averages(f"{call}: {kind!r}")
        if slot in slot.owner.held_open and kind in ("weight", "master"):
            raise ConfigError(f"{call}: parameter {slot.name!r} is open in tierzero.gathered; read and change it there")
        if call == "write_state" and slot.owner.in_model_code:
            raise ConfigError(
                f"write_state: parameter {slot.name!r} is in a forward or backward now; write its state between them"
            )
    if kind != "step":
        require_state(slots, kind)
    elif call == "write_state":
        require_state(slots, "m", "step count")
    return slots


def given_values(parameters: object, values: Any, count: int) -> list[Any]:
    """One value for each parameter. Raises ConfigError."""
    if isinstance(parameters, torch.Tensor):
        return [values]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"write_state: {count} parameters take a list of as many values, not {type(values).__name__}")
    if len(values) != count:
        raise ConfigError(f"write_state: {count} parameters, but values for {len(values)}")
    return list(values)


def as_array(slot: SlotState, kind: Kind, value: Any, local: bool) -> torch.Tensor:
    """What is to be written, in host memory. Raises ConfigError for what cannot be."""
    if kind == "step":
        return torch.tensor(_step_count(slot, value), device="cpu")
    shape = torch.Size([len(local_range(slot))]) if local else slot.slot.shape
    dtype = state_dtype(slot.group, kind)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"write_state: {kind} of {slot.name!r} is set by a tensor or a number, not {value!r:.60}")
        value = torch.full(shape, float(value), dtype=torch.float64, device="cpu").to(dtype)
    if value.shape != shape:
        raise ConfigError(
            f"write_state: {kind} of {slot.name!r} is of shape {tuple(shape)}"
            f"{' (the elements on this rank)' if local else ''}, the values are of {tuple(value.shape)}"
        )
    if value.layout is not torch.strided or value.is_complex() or value.is_meta:
        raise ConfigError(
            f"write_state: {kind} of {slot.name!r} is set by dense real values, not {value.dtype} on {value.device}"
        )
    array: torch.Tensor = value.detach().cpu().to(dtype)
    if kind in ("m", "v") and not bool(array.isfinite().all() and (kind == "m" or (array >= 0).all())):
        wanted = "finite values" if kind == "m" else "finite values of 0 or more"
        raise ConfigError(f"write_state: {kind} of {slot.name!r} takes {wanted}")
    return array


def _step_count(slot: SlotState, value: Any) -> int:
    try:
        step = int(value)
        good = step == value and 0 <= step <= _MOST_STEPS
    except (TypeError, ValueError, OverflowError, RuntimeError):
        good = False
    if not good:
        raise ConfigError(f"write_state: step of {slot.name!r} is {value!r:.60}; use a count of updates, 0 or more")
    return step


@contextmanager
def agreeing(
    runtime: Runtime, call: str, kind: Kind, slots: Sequence[SlotState], local: bool
) -> Iterator[list[torch.Tensor]]:
    """Around the checks of what this rank is given, of which the block hands out what all ranks must be given alike.

    Where the block fails on any rank, or ranks are given different things, all raise at its end.
    """
    said: list[torch.Tensor] = []
    failure: Exception | None = None
    try:
        yield said
    except ConfigError as error:
        failure = error
    agree(runtime, call, f"{kind}{' local' if local else ''}", slots, said, failure)


def agree(
    runtime: Runtime,
    call: str,
    what: str,
    slots: Sequence[SlotState],
    values: Sequence[torch.Tensor] = (),
    failure: Exception | None = None,
) -> None:
    """Raises RankMismatchError on every rank where they do not ask for the same; ``failure`` on its rank."""
    if runtime.collectives is not None:
        asked = xxhash.xxh64("\0".join([call, what, *[slot.name for slot in slots]]).encode())
        for value in values:
            asked.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        mine = _FAILED if failure is not None else asked.intdigest() >> 2
        found = runtime.collectives.small_max(torch.tensor([mine, -mine], device="cpu"))
        if failure is None and int(found[0]) != -int(found[1]):
            raise RankMismatchError(
                f"{call}: ranks ask for different things; this one for {what!r} of {_named(slots)}. Every rank must "
                "call it with the same parameters, kind and values"
            )
    if failure is not None:
        raise failure


def _named(slots: Sequence[SlotState]) -> str:
    names = [repr(slot.name) for slot in slots[:3]]
    return ", ".join([*names, f"{len(slots) - 3} more"] if len(slots) > 3 else names)
