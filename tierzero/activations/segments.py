"""Recomputation of several units as one: of a whole segment of units only the first one's inputs are kept.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. L units in segments of k keep L/k inputs
through the forward and the activations of k units in the backward, for one extra forward; k = sqrt(L) keeps least.

Units are called by the user's own loop, one at a time, so a segment is recognised rather than called: a unit goes on
with the segment of the unit before it where it is the next one and takes that one's output as it is. Where it does not
(something was added in between, another unit was called), a new segment begins: the result is the same, with more kept.

In the forward a tensor that autograd saves is replaced by a `_Saved`, its number within the segment. The first of them
that a backward asks for runs the segment again, from the kept inputs and with the random numbers of the first run, and
collects what is saved this time, in the same order. As PyTorch's non-reentrant checkpoint does it for one function.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from tierzero.graphs import out_of_graphs

Run = Callable[..., Any]


def segment_length(recompute: str | int, units: int) -> int:
    """Units of a segment for ``activations.recompute``; 0: nothing is recomputed."""
    if recompute == "sqrt":
        return max(1, math.isqrt(max(0, units - 1)) + 1)
    return {"none": 0, "unit": 1}[recompute] if isinstance(recompute, str) else recompute


class Segments:
    """Runs the units of one model in segments of at most ``length``.

    ``position`` in `run` counts units in the order of the model; segment n holds positions n * length and up.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._tail: _Tail | None = None

    @out_of_graphs
    def run(self, position: int, unit: Run, *args: Any, **kwargs: Any) -> Any:
        """``unit(*args, **kwargs)``, with what autograd saves in it replaced."""
        leaves, spec = tree_flatten((args, kwargs))
        tail, self._tail = self._tail, None
        segment, links = _Segment(), {}
        if tail is not None and position == tail.position + 1 and position % self._length:
            begun, found = tail.segment(), tail.links(leaves)
            if begun is not None and found:
                segment, links = begun, found
        kept = [None if index in links else leaf for index, leaf in enumerate(once_each(_without_graph, leaves))]
        call = _Call(unit, kept, spec, links, [version_of(leaf) for leaf in kept], _Surroundings.now(leaves))
        output = segment.run(call, args, kwargs)
        self._tail = _Tail(position, weakref.ref(segment), [_Output.of(leaf) for leaf in tree_flatten(output)[0]])
        return output


@dataclass(frozen=True)
class _Output:
    """A tensor that a unit returned, and how often it had been changed in place then."""

    tensor: weakref.ref[torch.Tensor] | None
    version: int

    @classmethod
    def of(cls, leaf: Any) -> _Output:
        return cls(weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else None, version_of(leaf))


@dataclass(frozen=True)
class _Tail:
    """The end of the segment that a next unit may go on with."""

    position: int
    segment: weakref.ref[_Segment]
    """Gone when autograd keeps nothing of it any more."""
    outputs: Sequence[_Output]

    def links(self, leaves: Sequence[Any]) -> dict[int, int]:
        """Which of the arguments are outputs of this unit, unchanged: index of the argument to index of the output."""
        known = {
            id(tensor): (index, output.version)
            for index, output in enumerate(self.outputs)
            if output.tensor is not None and (tensor := output.tensor()) is not None
        }
        found: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) in known:
                output, version = known[id(leaf)]
                if version_of(leaf) == version:
                    found[index] = output
        return found


@dataclass(frozen=True)
class _Surroundings:
    """What a unit's result depends on beside its arguments: random number generators and autocast."""

    device_type: str
    generator: torch.Tensor
    devices: list[int]
    states: list[torch.Tensor]
    autocast: dict[str, tuple[bool, torch.dtype]]

    @classmethod
    def now(cls, leaves: Sequence[Any]) -> _Surroundings:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
        device_type = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        devices, states = get_device_states(*tensors) if device_type != "cpu" else ([], [])
        autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device_type}
        }
        return cls(device_type, torch.get_rng_state(), devices, states, autocast)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As they were, until the end of the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type=_accelerator(self.device_type)))
            torch.set_rng_state(self.generator)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=self.device_type)
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _accelerator(device_type: str) -> str:
    """`fork_rng` wants the name of an accelerator also where it is given no device of it."""
    return device_type if device_type != "cpu" else "cuda"


@dataclass(frozen=True)
class _Call:
    """One unit's run: its arguments as leaves (None where ``links`` says which output of the unit before it is)."""

    unit: Run
    leaves: Sequence[Any]
    spec: TreeSpec
    links: dict[int, int]
    versions: list[int]
    surroundings: _Surroundings


def version_of(leaf: Any) -> int:
    """How often a tensor was changed in place; the same number always for what does not count."""
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else -1


def once_each(make: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """``make`` of each value, and the same of one that is there several times: self-attention, for one, looks whether
    its query is its key.
    """
    made = {key: make(value) for key, value in {id(value): value for value in values}.items()}
    return [made[id(value)] for value in values]


def _without_graph(leaf: Any) -> Any:
    """The same values and count of changes. What a segment keeps must not lead, by its graph, back to the segment."""
    if type(leaf) is not torch.Tensor or leaf.grad_fn is None:
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


class _AsComputed(torch.autograd.Function):
    """The same memory as something that was computed: a unit may change it in place, unlike a leaf or a view of one."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _as_computed(leaf: Any) -> Any:
    if type(leaf) is not torch.Tensor or not (leaf.is_leaf and leaf.requires_grad):
        return leaf
    return _AsComputed.apply(leaf)  # type: ignore[no-untyped-call]


def input_was_changed() -> RuntimeError:
    return RuntimeError(
        "activations.recompute: an input of a unit was changed in place, by the unit or before its backward, and it is "
        "all that recomputation has; change a copy (inplace=False)"
    )


class _Saved:
    """Stands for the ``number``th tensor that autograd saved in a segment."""

    __slots__ = ("__weakref__", "number", "segment")

    def __init__(self, segment: _Segment, number: int) -> None:
        self.segment, self.number = segment, number


class _Complete(Exception):  # noqa: N818 (a signal)
    """Everything that was saved has been computed again."""


@dataclass(eq=False)
class _Segment:
    """Runs of consecutive units; alive for as long as autograd keeps one of its saved tensors."""

    _calls: list[_Call] = field(default_factory=list)
    _saved: list[tuple[weakref.ref[_Saved], torch.Size, torch.dtype]] = field(default_factory=list)
    _values: dict[int, torch.Tensor] = field(default_factory=dict)
    """By number: of the unit that runs for the first time, or computed again and not asked for yet."""
    _running: bool = False

    def run(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """The first run of ``call``; one that fails leaves the segment as it was."""
        before = len(self._saved)
        self._running = True
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                output = call.unit(*args, **kwargs)
            if [version_of(leaf) for leaf in call.leaves] != call.versions:
                raise input_was_changed()
        except BaseException:
            del self._saved[before:]
            raise
        finally:
            self._running = False
            self._values.clear()
        self._calls.append(call)
        return output

    @out_of_graphs
    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(self, len(self._saved))
        self._saved.append((weakref.ref(saved), tensor.shape, tensor.dtype))
        self._values[saved.number] = tensor.detach()  # a unit may run a backward of its own before it returns
        return saved

    @out_of_graphs
    def unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.number not in self._values:
            self._recompute()
        return self._values[saved.number] if self._running else self._values.pop(saved.number)

    def _recompute(self) -> None:
        """Fills ``_values``. It runs in a backward: gradients are enabled only so that autograd saves what it saved."""
        self._values.clear()
        count = 0

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            if count >= len(self._saved):
                raise self._differs(f"more than the {count} tensors")
            holder, shape, dtype = self._saved[count]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise self._differs(f"{tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of {tuple(shape)}")
            value = tensor.detach()
            if holder() is not None:
                self._values[count] = value
            count += 1
            if count == len(self._saved):
                raise _Complete
            return value

        outputs: list[Any] = []
        with contextlib.suppress(_Complete), torch.enable_grad(), saved_tensors_hooks(collect, lambda value: value):
            for call in self._calls:
                outputs = _run_again(call, outputs)
        if count < len(self._saved):
            raise self._differs(f"only {count} of the {len(self._saved)} tensors")

    @staticmethod
    def _differs(what: str) -> RuntimeError:
        return RuntimeError(
            f"activations.recompute: a unit's second forward saved {what} that its first one had saved; its forward "
            "must do the same each time (no counters, no state that changes)"
        )


def _run_again(call: _Call, outputs: Sequence[Any]) -> list[Any]:
    if [version_of(leaf) for leaf in call.leaves] != call.versions:
        raise input_was_changed()
    leaves = once_each(_as_computed, call.leaves)
    linked = {output: _as_computed(_without_graph(outputs[output])) for output in set(call.links.values())}
    for index, output in call.links.items():
        leaves[index] = linked[output]
    args, kwargs = tree_unflatten(leaves, call.spec)
    with call.surroundings.again():
        return tree_flatten(call.unit(*args, **kwargs))[0]
