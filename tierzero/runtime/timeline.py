"""What each moment of a step was spent on: spans of work on every thread, and the training thread's time by phase.

Off, it costs a look at `Timeline.on`. On, a span costs about a microsecond and a fixed amount of memory. The
training thread is always in exactly one phase, so that phases add up to the step whatever happens in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from tierzero.runtime.spans import SPANS_PER_STEP, STALL_SPANS, Kind, SpanPage

STALLED = {kind: f"stall_{kind}" for kind in STALL_SPANS}
PHASES = ("forward", "backward", "recompute", *STALLED.values(), "optimizer_step", "other", "between")
"""Where the training thread's time goes. The stalls by their kind; ``optimizer_step``: the norm and optimizer.step();
``other``: inside a step, but in no forward and no backward of the model; ``between``: from the end of one step to the
first forward of the next.
"""

_PHASE_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.RECOMPUTE: "recompute",
    Kind.OPTIMIZER_STEP: "optimizer_step",
    Kind.GRADIENT_NORM: "optimizer_step",
}
_PAGES = 3
"""The one that is filled, one that is being written to disk, and one that waits for it."""
_SHORTEST_STALL = 20e-6
"""Seconds. A shorter wait counts in its phase, but is no span: what it waited for was there."""
_NOTHING = nullcontext()


@dataclass(frozen=True)
class RecordedStep:
    """One step. Times are of `time.perf_counter`; ``began`` is that of the first forward, ``started`` the end of the
    step before. ``page`` must be given back (`Timeline.take_back`); None where all were in use.
    """

    started: float
    began: float
    ended: float
    phases: dict[str, float]
    page: SpanPage | None
    dropped: int
    """Spans that found no page: all of the step's, where ``page`` is None."""


class Timeline:
    """Records while it is on. All but `span` and `write` belong to the training thread."""

    def __init__(self, capacity: int = SPANS_PER_STEP) -> None:
        self.on = False
        self._capacity = capacity
        self._page = SpanPage(0)
        self._free: deque[SpanPage] = deque()
        self._deliver: Callable[[RecordedStep], None] = lambda step: None
        self._open: list[tuple[Kind, int, float]] = []
        self._spent: dict[str, float] = {}
        self._last = self._started = self._began = 0.0
        self._in_step = False

    def start(self, deliver: Callable[[RecordedStep], None]) -> None:
        """Begins to record; ``deliver`` gets every step on the training thread, and must not wait."""
        self._page = SpanPage(self._capacity)
        self._free = deque(SpanPage(self._capacity) for _ in range(_PAGES - 1))
        self._deliver = deliver
        self._open.clear()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._in_step = False
        self._last = self._started = self._began = time.perf_counter()
        self.on = True

    def stop(self) -> None:
        """Ends recording and gives its memory back; what was recorded of a step that has not ended is lost."""
        self.on = False
        self._page, self._free = SpanPage(0), deque()

    def take_back(self, page: SpanPage) -> None:
        """A delivered page is free again; from any thread."""
        page.restart()
        if self.on:
            self._free.append(page)

    # Spans, from any thread.

    def span(
        self, kind: Kind, unit: int = -1, group: int = 0, tile: int = -1, nbytes: int = 0
    ) -> AbstractContextManager[object]:
        """The time that the block takes, on whatever thread; blocks of one kind may overlap."""
        return _Timed(self, (kind, unit, group, tile), nbytes) if self.on else _NOTHING

    def write(self, kind: int, unit: int, group: int, tile: int, start: float, end: float, nbytes: int) -> None:
        self._page.write(kind, unit, group, tile, start, end, nbytes)

    # The training thread.

    def begin_step(self) -> None:
        """The step's first forward begins."""
        self._count_until(time.perf_counter())
        self._began, self._in_step = self._last, True

    def end_step(self) -> None:
        """The step is over: ends what is open, and delivers it."""
        self.leave(1)
        now = time.perf_counter()
        self._count_until(now)
        full, dropped = self._page, 0
        page: SpanPage | None = full
        if self._free:
            self._page = self._free.popleft()
        else:
            spans, beyond = full.close()
            page, dropped = None, len(spans) + beyond
            full.restart()
        began = self._began if self._in_step else now
        step = RecordedStep(self._started, began, now, self._spent, page, dropped)
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._started, self._in_step = now, False
        self._deliver(step)

    def enter(self, kind: Kind, unit: int = -1) -> int:
        """Begins a span of the training thread inside those that are open; returns the depth for `leave`."""
        now = time.perf_counter()
        self._count_until(now)
        self._open.append((kind, unit, now))
        return len(self._open)

    def leave(self, depth: int) -> None:
        """Ends the span that `enter` has opened at ``depth``, with what was left open inside it."""
        if depth > len(self._open):
            return
        now = time.perf_counter()
        self._count_until(now)
        while len(self._open) >= depth:
            kind, unit, started = self._open.pop()
            self._page.write(kind, unit, 0, -1, started, now, 0)

    def phase(self, kind: Kind) -> AbstractContextManager[object]:
        """`enter` and `leave` around a block."""
        return self._entered(kind) if self.on else _NOTHING

    @contextmanager
    def _entered(self, kind: Kind) -> Iterator[None]:
        depth = self.enter(kind)
        try:
            yield
        finally:
            self.leave(depth)

    def stalled(self, kind: str, unit: int, started: float, ended: float, for_room: float) -> None:
        """A wait is over, the last ``for_room`` seconds of which count as one for ``host_budget``."""
        self._count_until(started)
        self._last = ended
        if self._in_step:
            self._spent[STALLED[kind]] += ended - started - for_room
            self._spent[STALLED["host_budget"]] += for_room
        else:
            self._spent["between"] += ended - started
        for name, begin, end in (kind, started, ended - for_room), ("host_budget", ended - for_room, ended):
            if end - begin >= _SHORTEST_STALL:
                self._page.write(STALL_SPANS[name], unit, 0, -1, begin, end, 0)

    # Forward and backward of the model.

    def enter_forward(self, unit: int) -> int:
        """A unit's forward begins; inside a backward it is a recomputation. Returns the depth for `leave`."""
        if torch._C._current_graph_task_id() == -1:
            return self.enter(Kind.FORWARD, unit)
        if self._reach_backward():
            self._leave_unit()
        return self.enter(Kind.RECOMPUTE, unit)

    def in_backward(self, unit: int) -> None:
        """The backward has asked for a weight of ``unit``: its part of the backward has begun, if it had not."""
        if torch._C._current_graph_task_id() == -1 or (self._open and self._open[-1][:2] == (Kind.BACKWARD, unit)):
            return
        if self._reach_backward():
            self._leave_unit()
            self.enter(Kind.BACKWARD, unit)

    def close_backward(self) -> None:
        """Ends the backward, and one that an error has broken off."""
        for depth, (kind, _, _) in enumerate(self._open, 1):
            if kind is Kind.BACKWARD:
                self.leave(depth)
                return

    def _reach_backward(self) -> bool:
        """Opens the model's backward if none is open; False inside a recomputation, which goes on."""
        if self._open and self._open[-1][0] is Kind.BACKWARD:
            return True
        if any(kind is Kind.BACKWARD for kind, _, _ in self._open):
            return False
        _at_end_of_backward(lambda: _at_end_of_backward(self.close_backward))
        self.enter(Kind.BACKWARD)
        return True

    def _leave_unit(self) -> None:
        if self._open[-1][1] >= 0:
            self.leave(len(self._open))

    def _count_until(self, now: float) -> None:
        phase = "between"
        if self._in_step:
            phase = _PHASE_OF.get(self._open[-1][0], "other") if self._open else "other"
        self._spent[phase] += now - self._last
        self._last = now


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """Of the one that runs. Called in such a callback, it comes after all others: gradients are on their way then."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Timed:
    __slots__ = ("_nbytes", "_started", "_timeline", "_what")

    def __init__(self, timeline: Timeline, what: tuple[Kind, int, int, int], nbytes: int) -> None:
        self._timeline, self._what, self._nbytes = timeline, what, nbytes

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *failure: object) -> None:
        self._timeline.write(*self._what, self._started, time.perf_counter(), self._nbytes)
