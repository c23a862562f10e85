"""When an update is tried ahead of its step, and how much of it.

Both rules follow from what the steps before have shown, not from a model of the machine. They decide about time only:
whatever is tried, the result is the same. So each rank may decide by itself.
"""

from __future__ import annotations

_LONGEST_PAUSE = 64
"""Steps."""
_NEGLIGIBLE = 0.01
"""Of a step: waits that are not worth doing anything about."""
_LESS = 15 / 16


class Habit:
    """Whether trying pays: not where it was lost lately, and only in the backward that the step usually follows.

    After a step in which it was lost, or would have been, 1, 2, 4 and up to 64 steps go without, as often as that
    happens again; each step in which it would have been kept halves that number. So a run that clips in every step
    tries in one of 64, and hardly more often where a few steps do not clip.
    """

    def __init__(self) -> None:
        self._usual = self._backwards = 0
        self._pause = self._left = 0
        self.left_out = False
        """The step that runs goes without, because of an earlier one."""

    @property
    def pauses(self) -> bool:
        return self._left > 0

    def tries(self) -> bool:
        """Called in a backward."""
        self.left_out = self.pauses
        return not self.pauses and self._backwards + 1 == self._usual

    def backward_ended(self) -> None:
        self._backwards += 1

    def step_ended(self, factor_was_one: bool) -> None:
        """``factor_was_one``: what was tried, if anything, was right."""
        self._usual, self._backwards, self.left_out = self._backwards, 0, False
        if factor_was_one:
            self._pause //= 2
            self._left = min(self._left, self._pause)
        elif self._left:
            self._left -= 1
        else:
            self._pause = min(_LONGEST_PAUSE, max(1, 2 * self._pause))
            self._left = self._pause


class Amount:
    """How many elements are tried: as many as the forward after the step cannot take in its stride, and no more than
    the backward can.

    A step in which the model's thread waits for weights in the forward has more to update there than drive and
    processor get done beside it; where it waits in the backward, the drive has no time left there. So the next
    backward tries what was done ahead this time, and of the difference between the two waits as much as is updated
    in that time. Where neither waits, it tries a sixteenth less, until the forward begins to wait.

    Not counted is what a forward waits for before its first unit is there: that is the last one whose gradients are
    complete, so that trying cannot help it.
    """

    least = 0
    """Elements that are tried whatever the waits say."""

    def __init__(self, most: int) -> None:
        self._most = most
        """Elements that there are."""
        self.elements = 0
        self._forward = self._backward = self._last_backward = 0.0
        self._backwards = 0

    def used(self, waited: float, backward: bool) -> None:
        """The model's thread ``waited`` seconds for a unit's weights."""
        if backward:
            self._backward += waited
        elif not self._backwards:
            self._forward += waited

    def backward_ended(self) -> None:
        self._backwards += 1
        self._last_backward, self._backward = self._backward, 0.0

    def step_ended(self, ahead: int, element_s: float, step_s: float) -> None:
        """``ahead``: elements that had been updated ahead for the forward of this step; ``element_s``: seconds of drive
        or processor for the update of one, 0 where none was updated.
        """
        forward, backward = self._forward, self._last_backward
        if max(forward, backward) < _NEGLIGIBLE * step_s:
            self.elements = int(ahead * _LESS)
        elif element_s:
            self.elements = ahead + int((forward - backward) / element_s)
        self.elements = min(self._most, max(self.least, self.elements))
        self._backwards = 0
        self._forward = self._backward = self._last_backward = 0.0
