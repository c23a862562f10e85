"""Ending a run on SIGINT or SIGTERM without leaving anything behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self


class Stopped(BaseException):
    """The run was asked to stop. Not an Exception: nothing on the way may take it for a failure and go on."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's code for a process that a signal ended."""
        return 128 + self.signum


class StopSignals:
    """While active, SIGINT and SIGTERM ask for a stop: the first at the next :meth:`check`, a second one at once.

    Inside :meth:`at_once` the first one acts at once too.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, quiet: bool = False) -> None:
        self.requested: int | None = None
        self._quiet = quiet
        self._closing = False
        self._at_once = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises Stopped if a stop was asked for. Called where no collective and no update is half done."""
        if self.requested is not None and not self._closing:
            raise Stopped(self.requested)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For work that may take long and leaves nothing half done that matters."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def closing(self) -> None:
        """From here on signals are only remembered: what is being cleaned up is not interrupted."""
        self._closing = True

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._closing:
            return
        if self.requested is not None:
            raise Stopped(self.requested)
        self.requested = signum
        if not self._quiet:
            name = signal.Signals(signum).name
            hint = "" if self._at_once else " (again to stop at once)"
            print(f"\ntierzero: {name}: stopping{hint}", file=sys.stderr, flush=True)
        if self._at_once:
            raise Stopped(signum)
