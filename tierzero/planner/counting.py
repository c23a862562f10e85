"""Counts what a model computes and keeps by running its forward and backward on tensors without memory."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tierzero.planner.work import ModelWork, OperationCounts, Visit

_OUTSIDE = 0
"""The unit that runs where no other does: the root."""


def count_work(
    build: Callable[[], nn.Module], units: Mapping[str, int], run: Callable[[nn.Module], torch.Tensor]
) -> ModelWork:
    """``build`` makes the model and ``run`` its loss, both without memory for any tensor. ``units`` says which unit
    each module belongs to, by its name; 0 is the root.
    """
    with FakeTensorMode():
        model = build()
        counter = _Counter(model)
        for name, module in model.named_modules():
            if units.get(name, _OUTSIDE) != _OUTSIDE:
                counter.watch(module, units[name])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        with counter:
            loss = run(model)
            forward = counter.take()
            loss.backward()
            backward = counter.take()
        return ModelWork(forward, backward, counter.peak)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _Counter(TorchDispatchMode):
    """Attributes every operation to the innermost unit that runs, in the forward and in the backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = [_OUTSIDE]
        self._visits: list[Visit] = []
        self._counts = OperationCounts()
        self._live = self._begin = self._most = self._entered = self.peak = 0
        self._uses = False
        self._weights = {_address(parameter) for parameter in model.parameters()}
        self._alive: set[int] = set()

    def watch(self, module: nn.Module, unit: int) -> None:
        """``module`` is (part of) unit ``unit``."""
        module.register_forward_pre_hook(functools.partial(self._enter_forward, unit), with_kwargs=True)
        module.register_forward_hook(functools.partial(self._leave_forward, unit))

    def take(self) -> tuple[Visit, ...]:
        """What was counted since the last call."""
        self._end_visit()
        taken, self._visits, self._running = tuple(self._visits), [], [_OUTSIDE]
        return taken

    # Which unit runs.

    def _enter_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._leave, unit))
        self._enter(unit)
        self._entered += sum(t.nbytes for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))

    def _leave_forward(self, unit: int, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._enter, unit))
        self._leave(unit)

    def _enter(self, unit: int, _: Any = None) -> None:
        self._run([*self._running, unit])

    def _leave(self, unit: int, _: Any = None) -> None:
        """A backward enters the unit before by the same tensor by which it leaves this one, and enters it first."""
        if unit in self._running[1:]:
            last = len(self._running) - 1 - self._running[::-1].index(unit)
            self._run(self._running[:last] + self._running[last + 1 :])

    def _run(self, running: list[int]) -> None:
        """From now on; one unit may be entered several times before it is left."""
        if running[-1] != self._running[-1]:
            self._end_visit()
        self._running = running

    def _end_visit(self) -> None:
        if self._counts.operations:
            transient, kept = self._most - self._begin, self._live - self._begin
            visit = Visit(self._running[-1], self._counts, transient, kept, self._entered, self._uses)
            if self._visits and self._visits[-1].unit == visit.unit:
                visit = self._visits.pop().followed_by(visit)
            self._visits.append(visit)
        self._uses, self._entered, self._counts, self._begin, self._most = (
            False,
            0,
            OperationCounts(),
            self._live,
            self._live,
        )

    # What it does.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._note_memory(tensor)
        counts = _counts(func, given, made, self._weights)
        if counts is not None:
            self._counts += counts
            self._uses |= any(_address(tensor) in self._weights for tensor in given)
        return output

    def _note_memory(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self._weights or address in self._alive:
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        self._alive.add(address)
        weakref.finalize(storage, self._gone, address, nbytes)
        self._live += nbytes
        self._most, self.peak = max(self._most, self._live), max(self.peak, self._live)

    def _gone(self, address: int, nbytes: int) -> None:
        self._alive.discard(address)
        self._live -= nbytes


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _counts(
    func: Any, given: list[torch.Tensor], made: list[torch.Tensor], weights: Container[int]
) -> OperationCounts | None:
    """None for what moves nothing: views, and the questions that only look at a tensor."""
    name = func._schema.name.removeprefix("aten::")
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = given[1:3] if name.startswith(("add", "badd")) else given[:2]
        return _product(left, right, any(_address(tensor) in weights for tensor in given))
    if name.startswith("_scaled_dot_product"):
        return _attention(given, backward=name.endswith("backward"))
    memories = {_address(tensor) for tensor in given}
    new = [tensor for tensor in made if _address(tensor) not in memories]
    written = func._schema.is_mutable and bool(given)
    if (not new and not written) or name.startswith(("empty", "new_empty")):
        return None
    return OperationCounts(pointwise=float(_moved(name, given, new)), operations=1)


def _product(left: torch.Tensor, right: torch.Tensor, of_weight: bool) -> OperationCounts:
    """Of rows with a weight, or else that of two activations which gives the weight's gradient."""
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    rows, sides = (m, (k, n)) if of_weight else (k, (m, n))
    flops = 2 * m * k * n * (left.shape[0] if left.ndim == 3 else 1)
    return OperationCounts(Counter({(rows, math.sqrt(sides[0] * sides[1])): flops}), operations=1)


def _attention(given: list[torch.Tensor], backward: bool) -> OperationCounts:
    query, key = (given[1], given[2]) if backward else (given[0], given[1])
    flops = 4 * query.numel() * key.shape[-2]
    # A backward does two and a half times the products of its forward: it makes the scores again.
    return OperationCounts(attention=Counter({key.shape[-2]: flops * 5 // 2 if backward else flops}), operations=1)


def _moved(name: str, given: list[torch.Tensor], new: list[torch.Tensor]) -> int:
    """Bytes read and written. What is looked up or put in is as much as comes out of it or goes into it."""
    if name in ("embedding", "index_select", "gather", "index"):
        return 2 * sum(tensor.nbytes for tensor in new)
    if name in ("scatter_add_", "index_put_", "scatter_"):
        return 2 * min(tensor.nbytes for tensor in given)
    return sum(tensor.nbytes for tensor in (*given, *new))
