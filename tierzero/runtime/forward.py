"""A unit in use: its parameters resident during the forward, its weights saved for backward as handles instead of
tensors.

A handle says where in the unit's gathered buffer a saved tensor lies (a linear layer saves a transposed *view* of its
weight, so a name would not do). It is resolved when the backward asks for it, by fetching the unit again; the
gathered buffer itself can be reused at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from tierzero.activations.segments import input_was_changed, version_of
from tierzero.errors import ConfigError, NotResidentError
from tierzero.graphs import OutOfGraphs, between_graphs, out_of_graphs
from tierzero.runtime.paged import PagedParameter
from tierzero.runtime.pager import Pager
from tierzero.runtime.refusals import refuse_tracing
from tierzero.runtime.state import Gathered, GroupState, SlotState, UnitState, slot_of
from tierzero.runtime.transforms import beneath_transforms, outside_transforms, require_hooks

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
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if self._is_ours(outer):
            outer = outer[0].args[0]
        pack = functools.partial(self._pack, outer)
        with saved_tensors_hooks(pack, self._unpack):
            yield

    @contextmanager
    def innermost(self) -> Iterator[None]:
        """As `active`, where other hooks have been set since."""
        if not torch.is_grad_enabled() or self._is_ours(torch._C._autograd._top_saved_tensors_default_hooks(False)):
            yield
            return
        with self.active():
            yield

    def _is_ours(self, hooks: Any) -> bool:
        return hooks is not None and isinstance(hooks[0], functools.partial) and bool(hooks[0].func == self._pack)

    @out_of_graphs
    def _pack(self, outer: tuple[Callable[..., Any], Callable[..., Any]] | None, tensor: torch.Tensor) -> Any:
        handle = self._handle(tensor)
        if handle is not None:
            return handle
        # Without its graph, which autograd gives back to what it unpacks: an operation that saves its own output would
        # else keep itself alive, in a cycle that Python's collector does not see.
        return tensor.detach() if outer is None else _Outer(outer[0](tensor), outer[1])

    def _handle(self, tensor: torch.Tensor) -> WeightHandle | ParameterHandle | None:
        if isinstance(tensor, PagedParameter):
            slot = slot_of(tensor)
            return None if slot is None else ParameterHandle(slot, slot.group.version)
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        if tensor.numel() == 0 or tensor._is_zerotensor():  # has no address, and no values to lose
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

    @out_of_graphs
    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, WeightHandle):
            with outside_transforms():
                return self._resolve(packed)
        if isinstance(packed, ParameterHandle):
            with outside_transforms():
                whole = self._whole(packed.slot.group, packed.version)
                # A copy: one function may have saved parameters of more units than stay gathered at once.
                return whole.parameter_values(packed.slot.slot).clone()
        if isinstance(packed, _Outer):
            result: torch.Tensor = packed.unpack(packed.packed)
            return result
        assert isinstance(packed, torch.Tensor)
        return packed

    def _resolve(self, handle: WeightHandle) -> torch.Tensor:
        whole = self._whole(handle.group, handle.version)
        # A backward that is itself recorded (create_graph) keeps what it used for as long as its own graph lives.
        recorded = torch.is_grad_enabled()
        flat = (whole.flat if recorded else whole.lend()).view(handle.dtype)
        start = flat.storage_offset() + handle.offset // handle.dtype.itemsize
        weight = flat.as_strided(handle.size, handle.stride, start)
        return weight.clone() if recorded else weight

    def _whole(self, group: GroupState, version: int) -> Gathered:
        if version != group.version:
            if group.unit.runtime.updates_in_backward:
                raise ConfigError(
                    f"a backward needs the weights of unit {group.unit.title!r} again after it has updated them; "
                    "optimizer.overlap = 'backward' updates a unit once its gradients are complete, which cannot be "
                    "taken back: use 'forward' for such a model, and go on from a checkpoint"
                )
            raise RuntimeError(
                f"the weights of unit {group.unit.title!r} were changed between this forward and its backward; "
                "call backward before optimizer.step(), an edit, tierzero.averaged or a load, or run the forward again"
            )
        if self._pager.timeline.on:
            self._pager.timeline.in_backward(group.unit.index)
        with group.unit.runtime.turn():
            return self._pager.demand(group.unit)[group.index]


@contextmanager
def unit_in_use(runtime: Runtime, unit: UnitState) -> Iterator[None]:
    """Keeps the unit gathered and its parameters resident; nested uses of one unit share the outermost.

    A recomputation finds in use what the forward had found so, the units around this one: checkpointing expects the
    same tensors to be saved, and a weight that is away would be paged in as one more.

    Raises NotResidentError at the end of the outermost where a parameter was changed in place: what is written into a
    gathered copy is lost with it.
    """
    with ExitStack() as around:
        if torch._C._current_graph_task_id() != -1:
            runtime.gradients.watch_backward_end()
            for index in reversed(unit.ancestors):
                if not runtime.units[index].active and runtime.units[index].groups:
                    around.enter_context(_in_use(runtime, runtime.units[index]))
        around.enter_context(_in_use(runtime, unit))
        yield


@contextmanager
def _in_use(runtime: Runtime, unit: UnitState) -> Iterator[None]:
    refuse_tracing()
    runtime.check_use()
    recorded = torch.is_grad_enabled()
    if recorded:
        require_hooks(unit.title)
    with outside_transforms():
        gathered = runtime.pager.demand(unit)
    lent: list[_Lent] = []
    around = unit.active
    timeline = runtime.timeline
    depth = timeline.enter_forward(unit.index) if timeline.on and around == 0 else 0
    try:
        unit.active = around + 1
        if around == 0:
            with outside_transforms():
                _make_resident(runtime, unit, gathered, lent)
        if recorded:
            with runtime.saved_weights.active():
                yield
        else:
            yield
        _refuse_changes(runtime, unit, lent)
    finally:
        unit.active = around
        if depth:
            timeline.leave(depth)
        if around == 0:
            _put_away(runtime, unit)


@dataclass(frozen=True)
class _Lent:
    """A parameter as it was made resident: the address of its values and PyTorch's count of its in-place changes."""

    slot: SlotState
    address: int
    version: int


@torch.inference_mode(False)
def _make_resident(runtime: Runtime, unit: UnitState, gathered: list[Gathered], lent: list[_Lent]) -> None:
    for group, whole in zip(unit.groups, gathered, strict=True):
        flat = whole.lend()
        for slot in group.slots:
            if slot not in runtime.held_open:
                values = whole.parameter_values(slot.slot, flat)
                slot.make_resident(values)
                lent.append(_Lent(slot, values.data_ptr(), slot.parameter._version))


def _put_away(runtime: Runtime, unit: UnitState) -> None:
    slots = [slot for slot in unit.all_slots() if slot not in runtime.held_open]
    with outside_transforms():
        try:
            for slot in slots:
                slot.put_away()
        except BaseException:  # an interrupt: none may be left over memory that is used again
            for slot in slots:
                slot.put_away()
            raise


def _refuse_changes(runtime: Runtime, unit: UnitState, lent: list[_Lent]) -> None:
    for loan in lent:
        parameter = loan.slot.parameter
        loan.slot.check_frozen()
        if not loan.slot.is_away and (parameter._version != loan.version or parameter.data_ptr() != loan.address):
            runtime.pager.forget(unit)
            raise NotResidentError(
                f"parameter {loan.slot.name!r} was changed inside the forward of unit {unit.title!r}, where its values "
                "are a copy; change it between steps with `with tierzero.gathered(parameter):`, or make it a buffer"
            )


@out_of_graphs
def _own_outputs(pager: Pager, unit: UnitState, output: Any) -> Any:
    """Copies of outputs that are views of the unit's weights: its gathered memory is used again after the forward."""

    def own(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.numel() == 0:
            return value
        memory = beneath_transforms(value)
        gathered = None if memory._is_zerotensor() else pager.find(memory.untyped_storage().data_ptr())
        return value if gathered is None or gathered.group.unit is not unit else value.clone()

    return own(output) if isinstance(output, torch.Tensor) else tree_map(own, output)


Recompute = Callable[..., Any] | None
"""Runs a unit, given as a function and its arguments, so that little of it is kept for the backward."""


@out_of_graphs
def recomputed_alone(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keeps only the arguments. Raises RuntimeError where the unit changes one of them."""
    leaves = tree_flatten((args, kwargs))[0]
    before = [version_of(leaf) for leaf in leaves]
    values = [*args, *kwargs.values()]
    distinct = list({id(value): value for value in values}.values())

    def again(*given: Any) -> Any:
        # Checkpointing hands each argument back as an object of its own.
        found = {id(value): it for value, it in zip(distinct, given, strict=True)}
        found_args, named = [found[id(v)] for v in args], {name: found[id(v)] for name, v in kwargs.items()}
        return run(*found_args, **named)

    output = checkpoint(again, *distinct, use_reentrant=False)
    if [version_of(leaf) for leaf in leaves] != before:
        raise input_was_changed()
    return output


Compile = Callable[[Callable[..., Any]], Callable[..., Any]] | None
"""Makes a compiled forward of a forward."""


def install_forward(
    runtime: Runtime, unit: UnitState, module: nn.Module, recompute: Recompute, compile_inner: Compile = None
) -> None:
    """Replaces the forward of one of the unit's modules by one that pages the unit in. A compiler that the user runs
    over the model sees `forward` and `run` as the ends of its graphs, and what is between them as one of its own.
    """
    original: Callable[..., Any] = module.forward
    inner = original if compile_inner is None else compile_inner(original)
    is_root = module is runtime.model

    @out_of_graphs
    def enter_root(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        runtime.enter_root()
        return runtime.cast_inputs(args, kwargs)

    @between_graphs
    def run(*args: Any, **kwargs: Any) -> Any:
        with OutOfGraphs(runtime.turn()):
            if is_root:
                args, kwargs = enter_root(args, kwargs)
            with OutOfGraphs(unit_in_use(runtime, unit)):
                return _own_outputs(runtime.pager, unit, inner(*args, **kwargs))

    @between_graphs
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if recompute is not None and torch.is_grad_enabled():
            return recompute(run, *args, **kwargs)
        return run(*args, **kwargs)

    module.forward = forward


def has_forward(module: nn.Module) -> bool:
    """No container, and nothing compiled."""
    plain = getattr(type(module), "forward", None)
    return plain is not None and plain is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def install_entry(runtime: Runtime, unit: UnitState, module: nn.Module) -> None:
    """Lets a module be called by itself, without the unit around it that its parameters belong to: the encoder of an
    encoder-decoder, say. It is in use then as in a forward of the whole model, on all ranks.

    A checkpoint inside the unit around it calls the module alone when it recomputes, and expects to see the same
    tensors saved as in the forward.
    """
    original: Callable[..., Any] = module.forward

    @out_of_graphs
    def enter_root() -> None:
        runtime.enter_root()

    @between_graphs
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if unit.active:
            with OutOfGraphs(runtime.saved_weights.innermost()):
                return original(*args, **kwargs)
        enter_root()
        with OutOfGraphs(unit_in_use(runtime, unit)):
            return _own_outputs(runtime.pager, unit, original(*args, **kwargs))

    module.forward = forward
