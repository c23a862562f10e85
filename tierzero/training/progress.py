"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from .metrics import Record
from .text import amount

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Takes the records of the run."""

    def show(self, record: Record) -> None:
        """A step has ended."""

    def note(self, line: str) -> None:
        """Something else to say, on a line of its own."""

    def close(self) -> None:
        """The last record was shown."""


class Silent:
    """For the ranks that do not report."""

    def show(self, record: Record) -> None:
        return

    def note(self, line: str) -> None:
        return

    def close(self) -> None:
        return


def describe(record: Record) -> str:
    """A record in one line, without the step."""
    norm = f"norm {record.grad_norm:.3f}  " if record.grad_norm is not None else ""
    traffic = ""
    if record.nvme_read_bytes or record.nvme_write_bytes:
        read, written = (
            amount(n / max(record.step_s, 1e-9)) for n in (record.nvme_read_bytes, record.nvme_write_bytes)
        )
        traffic = f"  nvme {read}/s in, {written}/s out"
    return (
        f"loss {record.loss:.4f}  {norm}lr {record.lr:.2e}  {record.tokens_per_s:,.0f} tokens/s  "
        f"rss {amount(record.rss_bytes)}{traffic}"
    )


class Lines:
    """One line every ``every`` steps, the first and the last included."""

    def __init__(self, steps: int, every: int) -> None:
        self._steps = steps
        self._every = every
        self._first = True

    def show(self, record: Record) -> None:
        if self._first or record.step % self._every == 0 or record.step == self._steps:
            print(f"step {record.step}/{self._steps}  {describe(record)}  {record.step_s:.2f} s", flush=True)
        self._first = False

    def note(self, line: str) -> None:
        print(line, flush=True)

    def close(self) -> None:
        return


class Bar:
    """A progress bar with the newest record beside it."""

    def __init__(self, steps: int, start: int) -> None:
        self._bar = _rich_bar()
        self._task = self._bar.add_task("starting", total=steps, completed=start)
        self._bar.start()

    def show(self, record: Record) -> None:
        self._bar.update(self._task, completed=record.step, description=describe(record))

    def note(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(compact=True),
        console=Console(),
    )


def open_progress(steps: int, start: int, every: int) -> Progress:
    """The bar where standard output is a terminal, lines where it is not."""
    return Bar(steps, start) if sys.stdout.isatty() else Lines(steps, every)
