"""What is in a tile and of which step, for messages."""

from __future__ import annotations

from tierzero.runtime.state import GroupState, SlotState

_NAMED = 3
"""Parameters that are named where there are many more."""


def parameters_in(group: GroupState, start: int, stop: int) -> str:
    """Names of the parameters that elements ``[start, stop)`` of this rank's shard are of."""
    names = [slot.name for slot in _slots_in(group, start, stop)]
    return ", ".join([*names[:_NAMED], f"{len(names) - _NAMED} more"] if len(names) > _NAMED + 1 else names)


def state_in(group: GroupState, start: int, stop: int) -> str:
    """The same, and the steps of their weights and optimizer state as these are in the tiers: an update that has been
    fixed counts once it was applied.
    """
    names = parameters_in(group, start, stop)
    steps = sorted({_step_in_tiers(slot) for slot in _slots_in(group, start, stop)})
    if group.fmt is None or not steps:
        return names
    return f"{names}; of step {steps[0]}" if len(steps) == 1 else f"{names}; of steps {steps[0]} to {steps[-1]}"


def _slots_in(group: GroupState, start: int, stop: int) -> list[SlotState]:
    return [
        slot
        for slot in group.slots
        if (part := slot.fragment) is not None and part.shard_offset < stop and start < part.shard_offset + part.numel
    ]


def _step_in_tiers(slot: SlotState) -> int:
    group, fragment = slot.group, slot.fragment
    assert fragment is not None
    ahead = [
        segment
        for spec in (group.pending, group.applying)
        for segment in (spec.segments if spec is not None else ())
        if segment.start <= fragment.shard_offset < segment.stop
    ]
    return slot.step - len(ahead)
