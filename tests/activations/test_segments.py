"""Units recomputed in segments: the gradients of the plain model to the bit, and the memory that the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tierzero.activations.segments import Segments, segment_length

from ..support.live import Live

DIM = 16
ROWS = 8
Loop = Callable[["Stack", torch.Tensor], torch.Tensor]


class Heavy(nn.Module):
    """A unit with activations four times its input's size, dropout, and a count of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.forwards = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.forwards += 1
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.3)
        y = x + self.down(hidden)
        return y if mask is None else y * mask


class Stack(nn.Module):
    """``loop`` is what calls the units through `call`, in segments of ``length`` (0: as they are)."""

    def __init__(self, units: int, length: int, loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, DIM)
        self.units = nn.ModuleList(Heavy() for _ in range(units))
        self.segments = Segments(length) if length else None
        self.loop = loop

    def call(self, position: int, *args: Any, **kwargs: Any) -> Any:
        unit = self.units[position]
        if self.segments is None or not torch.is_grad_enabled():
            return unit(*args, **kwargs)
        return self.segments.run(position, unit, *args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self, self.first(x))


def plain(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for position in range(len(stack.units)):
        x = stack.call(position, x)
    return x


def residual_between(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for position in range(len(stack.units)):
        y = stack.call(position, x)
        x = y + 0.5 * x if position % 3 == 1 else y
    return x


def changed_in_place(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for position in range(len(stack.units)):
        x = stack.call(position, x)
        if position % 3 == 1:
            x += 1.0
    return x


def masked(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    mask = (torch.arange(DIM) % 3 > 0).float()
    for position in range(len(stack.units)):
        x = stack.call(position, x=x, mask=mask)
    return x


def backwards_and_twice(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for position in [*reversed(range(len(stack.units))), 0, 0, 1]:
        x = stack.call(position, x)
    return x


def all_outputs_used(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(ROWS, DIM)
    for position in range(len(stack.units)):
        x = stack.call(position, x)
        total = total + x.square()
    return total


LOOPS = [plain, residual_between, changed_in_place, masked, backwards_and_twice, all_outputs_used]


def gradients(stack: Stack, steps: int = 2) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        torch.manual_seed(10 + step)
        x = torch.randn(ROWS, DIM, requires_grad=True)
        stack(x).square().mean().backward()
        after = torch.rand(1)  # the generator goes on as if nothing had been recomputed
        found += [x.grad, after, *[parameter.grad for parameter in stack.parameters()]]
        stack.zero_grad()
    return found


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
def test_gradients_are_the_plain_ones(length: int, loop: Loop) -> None:
    assert_same(gradients(Stack(7, length, loop)), gradients(Stack(7, 0, loop)))


def test_frozen_units_and_inputs_without_gradient() -> None:
    def build(length: int) -> Stack:
        stack = Stack(6, length, plain)
        for index in (0, 1, 4):
            stack.units[index].requires_grad_(False)
        stack.first.requires_grad_(False)
        return stack

    def run(stack: Stack) -> list[torch.Tensor]:
        torch.manual_seed(1)
        stack(torch.randn(ROWS, DIM)).sum().backward()
        return [parameter.grad for parameter in stack.parameters() if parameter.requires_grad]

    assert_same(run(build(3)), run(build(0)))


def test_a_graph_can_be_run_twice_and_in_parts() -> None:
    def run(stack: Stack) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(ROWS, DIM, requires_grad=True)
        y = stack(x)
        (part,) = torch.autograd.grad(y[0].sum(), x, retain_graph=True)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [part, x.grad, *[parameter.grad for parameter in stack.parameters()]]

    assert_same(run(Stack(5, 2, plain)), run(Stack(5, 0, plain)))


def test_two_forwards_before_their_backwards() -> None:
    def run(stack: Stack) -> list[torch.Tensor]:
        torch.manual_seed(1)
        one, other = stack(torch.randn(ROWS, DIM)), stack(torch.randn(ROWS, DIM))
        one.sum().backward()
        other.square().sum().backward()
        return [parameter.grad for parameter in stack.parameters()]

    assert_same(run(Stack(5, 2, plain)), run(Stack(5, 0, plain)))


def test_autocast_is_that_of_the_forward() -> None:
    def run(stack: Stack) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = stack(torch.randn(ROWS, DIM))
        y.float().sum().backward()
        return [parameter.grad for parameter in stack.parameters()]

    assert_same(run(Stack(4, 2, plain)), run(Stack(4, 0, plain)))


def test_a_unit_that_fails_leaves_the_others_whole() -> None:
    def run(stack: Stack) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = stack.call(0, stack.first(torch.randn(ROWS, DIM)))
        with pytest.raises((TypeError, RuntimeError)):
            stack.call(1, x, "no mask")
        stack.call(1, x).sum().backward()
        return [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]

    assert_same(run(Stack(3, 3, plain)), run(Stack(3, 0, plain)))


def test_units_that_return_several_things() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any], None]:
            return torch.tanh(self.inner(x)), {"sum": extra["sum"] + x.exp(), "count": extra["count"] + 1}, None

    def run(length: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        units, segments = [Pair() for _ in range(4)], Segments(max(1, length))
        x, extra = torch.randn(ROWS, DIM, requires_grad=True), {"sum": torch.zeros(ROWS, DIM), "count": 0}
        y = x
        for position, unit in enumerate(units):
            y, extra, _ = segments.run(position, unit, y, extra) if length else unit(y, extra)
        assert extra["count"] == 4
        (y.sum() + extra["sum"].sum()).backward()
        return [x.grad, *[parameter.grad for unit in units for parameter in unit.parameters()]]

    for length in (1, 2, 4):
        assert_same(run(length), run(0))


def test_a_forward_that_differs_the_second_time_is_an_error() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(DIM, DIM), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) if self.calls == 1 else self.inner(x[:1])

    y = Segments(2).run(0, Fickle(), torch.randn(ROWS, DIM, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"activations.recompute: a unit's second forward saved .*1, 16"):
        y.sum().backward()


def test_an_input_changed_before_the_backward_is_an_error() -> None:
    x = torch.randn(ROWS, DIM)
    y = Segments(2).run(0, Heavy(), x)
    x.zero_()
    with pytest.raises(RuntimeError, match="an input of a unit was changed in place"):
        y.sum().backward()


# Memory and work.


def kept_after_forward(units: int, recompute: str | int) -> tuple[int, int]:
    """Bytes that the graph of a forward holds, and how often a unit runs in forward and backward together."""
    stack = Stack(units, segment_length(recompute, units), plain)
    x = torch.randn(MANY_ROWS, DIM, requires_grad=True)
    with Live(stack) as live:
        loss = stack(x).sum()
    kept = live.nbytes()
    loss.backward()
    return kept, max(unit.forwards for unit in stack.units)


MANY_ROWS = 1024
INPUT = MANY_ROWS * DIM * 4
GENERATOR = torch.get_rng_state().nbytes
LAYERS = (4, 16, 64)


@pytest.mark.long
def test_saved_bytes_grow_as_the_formulas_say() -> None:
    """none: every activation of L units; unit: L inputs; sqrt: the root of L; and one forward more, never two."""
    kept = {mode: [kept_after_forward(units, mode) for units in LAYERS] for mode in ("none", "unit", "sqrt", 8)}
    for units, (nbytes, forwards) in zip(LAYERS, kept["none"], strict=True):
        assert nbytes >= 5 * units * INPUT
        assert forwards == 1
    for mode, inputs in {"unit": (4, 16, 64), "sqrt": (2, 4, 8), 8: (1, 2, 8)}.items():
        for units, count, (nbytes, forwards) in zip(LAYERS, inputs, kept[mode], strict=True):
            assert count * INPUT <= nbytes <= (count + 2) * INPUT + units * GENERATOR, (mode, count)
            assert forwards == 2


@pytest.mark.parametrize(("units", "length"), [(0, 1), (1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (64, 8)])
def test_the_root_is_rounded_up(units: int, length: int) -> None:
    assert segment_length("sqrt", units) == length


def test_nothing_is_held_after_the_backward() -> None:
    stack = Stack(6, 3, plain)
    with Live(stack) as live:
        stack(torch.randn(ROWS, DIM)).sum().backward()
        stack.zero_grad()
        assert live.nbytes() <= 100


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(torch.tanh(self.inner(x.clone())))


def test_units_that_change_their_input_are_right_or_refused() -> None:
    """Inside a segment the input is computed again; at its start it is all that there is."""

    def run(length: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        units, segments = [Heavy().eval(), ChangesItsInput(), ChangesItsInput()], Segments(max(1, length))
        x = torch.randn(ROWS, DIM, requires_grad=True)
        y = x
        for position, unit in enumerate(units):
            y = segments.run(position, unit, y) if length else unit(y)
        y.sum().backward()
        return [x.grad, *[parameter.grad for unit in units for parameter in unit.parameters()]]

    assert_same(run(3), run(0))
    for length in (1, 2):
        with pytest.raises(RuntimeError, match=r"an input of a unit was changed in place.*inplace=False"):
            run(length)


class InnerBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x)).square()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return x + y + slope


@pytest.mark.parametrize("length", [1, 2, 3])
def test_units_that_run_a_backward_of_their_own(length: int) -> None:
    def run(length: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        units, segments = [InnerBackward() for _ in range(4)], Segments(max(1, length))
        x = torch.randn(ROWS, DIM, requires_grad=True)
        y = x
        for position, unit in enumerate(units):
            y = segments.run(position, unit, y) if length else unit(y)
        y.sum().backward()
        return [x.grad, *[parameter.grad for unit in units for parameter in unit.parameters()]]

    assert_same(run(length), run(0))


def derived(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for position in range(len(stack.units)):
        x = stack.call(position, x, torch.sigmoid(x.mean(0)))
    return x


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_forward_without_backward_leaves_nothing(length: int) -> None:
    """Also where a unit gets what was computed from another unit of its segment."""
    stack = Stack(6, length, derived)
    with Live(stack) as live:
        for _ in range(3):
            stack(torch.randn(ROWS, DIM))
        torch.manual_seed(0)
        stack(torch.randn(ROWS, DIM)).sum().backward(retain_graph=True)
        stack.zero_grad()
    assert live.nbytes() <= 20_000  # the generators' states that the last tail holds
