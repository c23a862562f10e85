"""What an optimizer's step fixes: whose moments are in the tiers, and each group's update as ranges of its shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from tierzero.errors import ConfigError
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.owner import HyperOf
from tierzero.runtime.state import GroupState, SlotState, UpdateSegment, UpdateSpec

Stepped = Sequence[tuple[SlotState, HyperOf]]
"""Parameters to update, each with the hyperparameters of the optimizer that updates it."""


class MomentOwners:
    """Which optimizer the moments of a parameter belong to: the tiers hold one set."""

    def __init__(self, start_afresh: Callable[[list[SlotState]], None]) -> None:
        self._start_afresh = start_afresh
        self._had: dict[weakref.WeakMethod[HyperOf], set[SlotState]] = {}
        """For every optimizer, the parameters whose moments were its own at some time."""

    def take_over(self, stepped: Stepped) -> None:
        """Gives parameters that another optimizer has updated fresh moments, as a new optimizer begins with.

        Raises ConfigError for an optimizer that has lost its own in this way.
        """
        changed = [(slot, hyper_of) for slot, hyper_of in stepped if slot.state_of != hyper_of]
        if not changed:
            return
        taken = [(slot, hyper_of) for slot, hyper_of in changed if slot.step and slot.state_of is not None]
        for slot, hyper_of in taken:
            if slot in self._had.get(weakref.WeakMethod(hyper_of), ()):
                raise ConfigError(
                    f"optimizer.step: another optimizer has updated parameter {slot.name!r} since, and the tiers "
                    "hold one set of moments; go on with that one, or make a new one"
                )
        if taken:
            self._start_afresh([slot for slot, _ in taken])
        self._had = {method: slots for method, slots in self._had.items() if method() is not None}
        for slot, hyper_of in changed:
            slot.state_of = hyper_of
            self._had.setdefault(weakref.WeakMethod(hyper_of), set()).add(slot)


def fixed_updates(stepped: Stepped, loss_scale: float) -> list[tuple[GroupState, UpdateSpec | None]]:
    """`next_updates`, and the parameters' step counts moved on."""
    specs = next_updates(stepped, loss_scale)
    for slot, hyper_of in stepped:
        if hyper_of(slot) is not None:
            slot.step += 1
    return specs


def next_updates(stepped: Stepped, loss_scale: float) -> list[tuple[GroupState, UpdateSpec | None]]:
    """The update of every group that has one of the parameters. None: nothing of the group lies on this rank. Raises
    ConfigError; changes nothing.
    """
    by_group: dict[int, list[tuple[SlotState, AdamHyper]]] = {}
    groups: dict[int, GroupState] = {}
    for slot, hyper_of in stepped:
        hyper = hyper_of(slot)
        if hyper is not None:
            groups[id(slot.group)] = slot.group
            by_group.setdefault(id(slot.group), []).append((slot, hyper.at(slot.step + 1)))
    specs = []
    for key, group in groups.items():
        segments = _segments(by_group[key], loss_scale)
        specs.append((group, UpdateSpec(segments) if segments else None))
    return specs


def _segments(updates: list[tuple[SlotState, AdamHyper]], loss_scale: float) -> tuple[UpdateSegment, ...]:
    """This rank's part of the updates as ranges of the shard; neighbours that are updated alike become one."""
    segments: list[UpdateSegment] = []
    for slot, hyper in sorted(updates, key=lambda update: update[0].slot.offset):
        fragment = slot.fragment
        if fragment is None:
            continue
        start, stop = fragment.shard_offset, fragment.shard_offset + fragment.numel
        scale = slot.clip_factor / loss_scale
        last = segments[-1] if segments else None
        if last is not None and last.stop == start and (last.hyper, last.grad_scale) == (hyper, scale):
            segments[-1] = UpdateSegment(last.start, stop, hyper, scale)
        else:
            segments.append(UpdateSegment(start, stop, hyper, scale))
    return tuple(segments)
