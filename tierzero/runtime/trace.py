"""The order in which units are used, learnt from one step and followed in the next.

A trace is cyclic: the last access of a step is followed by the first of the next, so prefetch runs across the step
boundary. An access that is not where the trace says is looked up ahead of the cursor (a skipped or repeated unit, an
evaluation of a part); either way the step being run is recorded, and becomes the trace at its end. A forward of the
whole model without gradients is no part of a step: it follows the trace from its start and leaves no mark in it. Where
nothing has been trained yet, the one before it is the trace.
"""

from __future__ import annotations

_LONGEST = 1 << 20
"""Accesses of one step. Without steps (inference) the recording would grow for ever."""


class AccessTrace:
    """Records accesses, by unit index, and foretells them. Repeated accesses to one unit in a row count once."""

    def __init__(self) -> None:
        self._trace: list[int] = []
        self._recording: list[int] = []
        self._cursor = 0
        self._forward_ends = self._recorded_forward_ends = 0
        """Accesses up to the last one that is not of a backward: in the trace, and in what is recorded."""
        self.departures = 0
        """Accesses of the current step that were not where the trace foretold them."""
        self._trained = False
        self._before_evaluation: tuple[int, int, int, int] | None = None
        """Accesses, cursor and counts of the step within which an evaluation runs."""

    def begin_forward(self, training: bool) -> None:
        """A forward of the whole model begins, with gradients or without."""
        self._leave_evaluation()
        if not training:
            ends = self._recorded_forward_ends
            self._before_evaluation = (len(self._recording), self._cursor, ends, self.departures)
            self._cursor = 0

    def _leave_evaluation(self) -> None:
        if self._before_evaluation is None:
            return
        accesses, self._cursor, forward_ends, self.departures = self._before_evaluation
        if not self._trained and accesses == 0:
            self._trace, self._forward_ends = self._recording[:], self._recorded_forward_ends
        del self._recording[accesses:]
        self._recorded_forward_ends = forward_ends
        self._before_evaluation = None

    def access(self, unit: int, in_backward: bool = False) -> None:
        """Notes that ``unit`` is used now."""
        if in_backward:
            self._leave_evaluation()
        if self._recording and self._recording[-1] == unit:
            return
        if len(self._recording) < _LONGEST:
            self._recording.append(unit)
        if not in_backward:
            self._recorded_forward_ends = len(self._recording)
        if not self._trace:
            return
        if self._trace[self._cursor] == unit:
            self._cursor = (self._cursor + 1) % len(self._trace)
            return
        self.departures += 1
        found = self._find(unit)
        if found is not None:
            self._cursor = (found + 1) % len(self._trace)

    def _find(self, unit: int) -> int | None:
        size = len(self._trace)
        return next(
            (at % size for at in range(self._cursor, self._cursor + size) if self._trace[at % size] == unit), None
        )

    def upcoming(self, count: int) -> list[int]:
        """The next ``count`` different units after the cursor, nearest first."""
        found: list[int] = []
        for ahead in range(len(self._trace) if count > 0 else 0):
            unit = self._trace[(self._cursor + ahead) % len(self._trace)]
            if unit not in found:
                found.append(unit)
                if len(found) == count:
                    break
        return found

    def left(self) -> int:
        """How many different units are still to come in the step that runs, by the trace; 0 after its last access."""
        if self._recording and self._cursor == 0:
            return 0
        return len(dict.fromkeys(self._trace[self._cursor :]))

    def in_last_backward(self) -> bool:
        """Whether the step's last forward is over, by the trace: a backward that runs now is followed by the update."""
        over = self._cursor >= self._forward_ends or (self._cursor == 0 and bool(self._recording))
        return bool(self._trace) and over

    def order(self) -> list[int]:
        """The units in the order of their first use in a step."""
        return list(dict.fromkeys(self._trace))

    def distance(self, unit: int) -> int:
        """How many accesses away the next use of ``unit`` is; beyond the trace's length when it is not in it."""
        size = len(self._trace)
        ahead = (a for a in range(size) if self._trace[(self._cursor + a) % size] == unit)
        return next(ahead, size + 1)

    def end_step(self) -> None:
        """Closes a training step: what was recorded becomes the trace, and the cursor returns to its start."""
        self._leave_evaluation()
        self._trained = True
        if self._recording:
            self._trace, self._forward_ends = self._recording, self._recorded_forward_ends
        self._recording, self._cursor, self._recorded_forward_ends, self.departures = [], 0, 0, 0
