"""Bytes moved on a drive by a process of its own while another one trains: half reads, half writes, past the page
cache, at a given rate.

The process runs this module; a number on its standard input is the rate from then on, the end of the input its end,
which a parent that is killed brings too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tierzero.errors import TierZeroError
from tierzero.tiers.drive_rate import huge_buffer, open_direct

REQUEST = 8 << 20
_DEPTH = 4
_LARGEST = 2 << 30
"""Bytes of the file, at most."""
_READY = "ready"


class Mover:
    """The process, which rests until it is given a rate.

    Its file in ``folder`` has no name by then; it holds ``nbytes``, 2 GiB at most. Use as a context. Raises
    TierZeroError where the process could not begin.
    """

    def __init__(self, folder: str | Path, nbytes: int, request: int = REQUEST) -> None:
        blocks = max(min(nbytes, _LARGEST) // request, 2 * _DEPTH)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tierzero.profiling.mover", json.dumps([str(folder), blocks, request])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for the parent, with which this process ends
        )
        try:
            self._expect_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def pace(self, rate: float) -> None:
        """Bytes per second from now on, reads and writes together. Raises TierZeroError where the process has ended."""
        assert self._process.stdin is not None
        try:
            print(rate, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._expect_ready()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect_ready(self) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != _READY:
            raise TierZeroError(f"the process that moves bytes on the drive ended: {said or 'it did not say why'}")


class Pace:
    """Numbers requests of ``nbytes`` so that they keep a rate; what a slow drive delayed is due at once."""

    def __init__(self, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes, self._clock = nbytes, clock
        self._changed = threading.Condition()
        self._rate = 0.0
        self._due = 0.0
        self._given = 0

    def set_rate(self, rate: float) -> None:
        """Bytes per second; what was owed at the old rate, or done ahead of it, still counts. 0 rests."""
        with self._changed:
            now = self._clock()
            ahead = (self._due - now) * self._rate
            self._due = now + (ahead / rate if rate else 0.0)
            self._rate = rate
            self._changed.notify_all()

    def next(self) -> int:
        """The next number, once it is due."""
        with self._changed:
            while (left := self._left()) is None or left > 0:
                self._changed.wait(left)
            self._due += self._nbytes / self._rate
            self._given += 1
            return self._given - 1

    def _left(self) -> float | None:
        """Seconds; None while no rate is set."""
        return self._due - self._clock() if self._rate else None


def lane(descriptor: int, request: int, numbers: Iterator[int], blocks: int, write_all: bool = False) -> None:
    """The requests with these numbers, one after another, round and round the file.

    Every second one reads, and in the next pass over the file the others.
    """
    buffer = huge_buffer(request)
    for number in numbers:
        lap, block = divmod(number, blocks)
        if write_all or (lap + block) % 2:
            moved = os.pwritev(descriptor, [buffer], block * request)
        else:
            moved = os.preadv(descriptor, [buffer], block * request)
        if moved != request:
            raise OSError(f"moved {moved:,} bytes of {request:,} at byte {block * request:,}")


def serve(folder: str, blocks: int, request: int) -> None:
    """The life of the process: lanes at the rate that the standard input says, until that ends."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".moved-", suffix=".tier") as file:
        os.posix_fallocate(file.fileno(), 0, blocks * request)
        descriptor = open_direct(file.name)
    lane(descriptor, request, iter(range(blocks)), blocks, write_all=True)  # a file of written blocks
    pace = Pace(request)

    def paced() -> None:
        with _said():
            lane(descriptor, request, iter(pace.next, None), blocks)

    for _ in range(_DEPTH):
        threading.Thread(target=paced, daemon=True).start()
    print(_READY, flush=True)
    for line in sys.stdin:
        pace.set_rate(float(line))
    os._exit(0)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """A failure ends the process and is its last line."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            print(error, flush=True)
        os._exit(1)


if __name__ == "__main__":
    with _said():
        serve(*json.loads(sys.argv[1]))
