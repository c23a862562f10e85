"""A unit in use: its parameters resident during the forward, its weights saved for backward as handles instead of
tensors.

A handle says where in the unit's gathered buffer a saved tensor lies (a linear layer saves a transposed *view* of its
weight, so a name would not do). It is resolved when the backward asks for it, by fetching the unit again; the
gathered buffer itself can be reused at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tierzero.runtime.paged import PagedParameter
from tierzero.runtime.pager import Pager
from tierzero.runtime.state import Gathered, GroupState, SlotState, UnitState, slot_of

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


@dataclass(frozen=True)
class WeightHandle:
    """A saved weight: ``offset`` is in bytes from the start of the group's gathered buffer."""

    group: GroupState
    version: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ParameterHandle:
    """A parameter that was saved while it was away: a custom ``autograd.Function`` is handed the parameter itself."""

    slot: SlotState
    version: int


@dataclass(frozen=True)
class _Outer:
    """A tensor packed by the hooks that were in force around the unit (activation checkpointing, offloading)."""

    packed: Any
    unpack: Callable[[Any], Any]


class SavedWeights:
    """The pack and unpack hooks under which units run."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._away: dict[int, SlotState] = {}

    def know(self, slots: Iterable[SlotState]) -> None:
        """Learns by which memory the parameters are to be recognised while they are away."""
        self._away = {slot.away.untyped_storage().data_ptr(): slot for slot in slots if slot.slot.numel}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Only the innermost hooks are called by autograd, so tensors that are not weights are passed on to the hooks
        around.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and isinstance(outer[0], functools.partial) and outer[0].func == self._pack:
            outer = outer[0].args[0]
        pack = functools.partial(self._pack, outer)
        with saved_tensors_hooks(pack, self._unpack):
            yield

    def _pack(self, outer: tuple[Callable[..., Any], Callable[..., Any]] | None, tensor: torch.Tensor) -> Any:
        handle = self._handle(tensor)
        if handle is not None:
            return handle
        return tensor if outer is None else _Outer(outer[0](tensor), outer[1])

    def _handle(self, tensor: torch.Tensor) -> WeightHandle | ParameterHandle | None:
        if isinstance(tensor, PagedParameter):
            slot = slot_of(tensor)
            return None if slot is None else ParameterHandle(slot, slot.group.version)
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        if tensor.numel() == 0:  # has no address, and no values to lose
            return None
        storage = tensor.untyped_storage().data_ptr()
        gathered = self._pager.find(storage)
        if gathered is None:
            slot = self._away.get(storage)
            return None if slot is None else ParameterHandle(slot, slot.group.version)
        offset = tensor.data_ptr() - gathered.flat.data_ptr()
        return WeightHandle(
            gathered.group, gathered.group.version, tensor.dtype, offset, tensor.size(), tensor.stride()
        )

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, WeightHandle):
            return self._resolve(packed)
        if isinstance(packed, ParameterHandle):
            whole = self._whole(packed.slot.group, packed.version)
            # A copy: one function may have saved parameters of more units than stay gathered at once.
            return whole.parameter_values(packed.slot.slot).clone()
        if isinstance(packed, _Outer):
            result: torch.Tensor = packed.unpack(packed.packed)
            return result
        assert isinstance(packed, torch.Tensor)
        return packed

    def _resolve(self, handle: WeightHandle) -> torch.Tensor:
        flat = self._whole(handle.group, handle.version).flat.view(handle.dtype)
        start = flat.storage_offset() + handle.offset // handle.dtype.itemsize
        weight = flat.as_strided(handle.size, handle.stride, start)
        # A backward that is itself recorded (create_graph) keeps what it used for as long as its own graph lives.
        return weight.clone() if torch.is_grad_enabled() else weight

    def _whole(self, group: GroupState, version: int) -> Gathered:
        if version != group.version:
            raise RuntimeError(
                f"the weights of unit {group.unit.title!r} were updated between this forward and its backward; "
                "call backward before optimizer.step(), or run the forward again"
            )
        return self._pager.demand(group.unit)[group.index]


@contextmanager
def unit_in_use(runtime: Runtime, unit: UnitState) -> Iterator[None]:
    """Keeps the unit gathered and its parameters resident; nested uses of one unit share the outermost."""
    gathered = runtime.pager.demand(unit)
    unit.active += 1
    try:
        if unit.active == 1:
            _make_resident(unit, gathered)
        if torch.is_grad_enabled():
            with runtime.saved_weights.active():
                yield
        else:
            yield
    finally:
        unit.active -= 1
        if unit.active == 0:
            for slot in unit.all_slots():
                if slot not in runtime.held_open:
                    slot.put_away()


@torch.inference_mode(False)
def _make_resident(unit: UnitState, gathered: list[Gathered]) -> None:
    for group, whole in zip(unit.groups, gathered, strict=True):
        for slot in group.slots:
            if slot.is_away:  # not one that tierzero.gathered holds open
                slot.make_resident(whole.parameter_values(slot.slot))


def install_forward(runtime: Runtime, unit: UnitState, recompute: bool, compile_inner: bool) -> None:
    """Replaces the module's forward by one that pages the unit in; ``recompute`` keeps only the unit's inputs for the
    backward.
    """
    original: Callable[..., Any] = unit.module.forward
    inner = torch.compile(original) if compile_inner else original
    is_root = unit.index == 0

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_root:
            runtime.enter_root()
            args, kwargs = runtime.cast_inputs(args, kwargs)
        with unit_in_use(runtime, unit):
            return inner(*args, **kwargs)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if recompute and torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        return run(*args, **kwargs)

    unit.module.forward = forward
