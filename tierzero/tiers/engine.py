"""The I/O engine: one event loop on a thread of its own, and worker threads that make the system calls.

Everything that waits is a coroutine on the loop, everything that blocks runs on workers: one set per path for
transfers, one for computation. A transfer ends, well or badly, only when no system call touches its memory any more,
cancelled or not: the memory may be reused as soon as the awaiting coroutine goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tierzero.errors import TierError
from tierzero.tiers.allocator import PAGE
from tierzero.tiers.executor import Priority, PriorityExecutor, Request
from tierzero.tiers.faults import first_cause, no_progress, transfer_error
from tierzero.tiers.file import Piece, TransferFile
from tierzero.tiers.interrupts import held_back
from tierzero.tiers.transfer import Fault, Traffic, read_some, write_some

__all__ = ["IoEngine", "Priority", "Request"]

T = TypeVar("T")
R = TypeVar("R")

_STALL_S = 1.0
_ABANDON_S = 2.0


class IoEngine:
    """Moves bytes between memory and tier files, at most ``queue_depth`` system calls in flight per path.

    ``compute_threads`` workers run what `call` is given (default: one per core that this process may use).
    """

    def __init__(self, queue_depth: int, *, compute_threads: int | None = None, fault: Fault | None = None) -> None:
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, got {queue_depth}")
        self.queue_depth = queue_depth
        self.fault = fault
        self.failure: BaseException | None = None
        """The first failure of a task that was started with `spawn`, or the first interrupt of a `whole` section."""
        self._both = Traffic()
        """The time of transfers to and from tier files."""
        self._reads, self._writes = Traffic(self._both), Traffic(self._both)
        self._other = Traffic()
        """Of files that are no tiers, both ways."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closing = False
        self._lanes: dict[Path, PriorityExecutor] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._compute = PriorityExecutor(compute_threads or len(os.sched_getaffinity(0)), "tierzero-compute")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="tierzero-io", daemon=True)
        self._thread.start()
        # Must not refer to the engine, or it would never be collected.
        self._abandon = weakref.finalize(
            self, _abandon, self._pid, self._loop, self._thread, self._lanes, self._compute
        )

    # Counters.

    @property
    def read_bytes(self) -> int:
        """Bytes read from tier files since the start."""
        return self._reads.nbytes

    @property
    def write_bytes(self) -> int:
        """Bytes written to tier files since the start."""
        return self._writes.nbytes

    @property
    def read_busy_s(self) -> float:
        """Seconds of wall time with at least one read in flight."""
        return self._reads.busy_s

    @property
    def write_busy_s(self) -> float:
        """Seconds of wall time with at least one write in flight."""
        return self._writes.busy_s

    @property
    def busy_s(self) -> float:
        """Seconds of wall time with at least one transfer to or from tier files in flight."""
        return self._both.busy_s

    # Work.

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the loop, from any thread. Raises an earlier background failure, TierError after
        `close`.
        """
        try:
            self.check()
            return self._schedule(coro)
        except BaseException:
            coro.close()
            raise

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for its result; never from the loop's own thread (RuntimeError).

        An interrupt (Ctrl-C) cancels the coroutine and is raised once it has ended.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("IoEngine.run would block the event loop that it waits for; await the coroutine instead")
        tasks: list[asyncio.Task[Any]] = []
        outer = _noting_task(coro, tasks)
        future: concurrent.futures.Future[T] | None = None
        try:
            # An interrupt between the start of the coroutine and the wait for it would leave it running.
            with held_back():
                future = self.submit(outer)
            return future.result()
        except BaseException:
            if future is None:
                coro.close()
            elif not future.done():
                self._loop.call_soon_threadsafe(_cancel_noted, self._loop, tasks)
                concurrent.futures.wait([future])
            raise

    def spawn(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a coroutine as a background task of the loop, from any thread.

        If it fails and is the first to fail, `check` raises its error from then on. Raises TierError after `close`.
        """
        guarded = self._guard(coro)
        try:
            if threading.current_thread() is self._thread:
                return self._start(guarded)
            starting = _started(self._start, guarded)
            try:
                return self._schedule(starting).result()
            except BaseException:
                starting.close()
                raise
        except BaseException:
            guarded.close()
            coro.close()
            raise

    def check(self) -> None:
        """Raises the first background failure, if there was one."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around a section that must not be left half done: Ctrl-C is held back, and after any other interrupt in it
        `check` raises. Not for sections that wait.
        """
        with held_back(), self.unbroken("while state was changing hands"):
            yield

    @contextlib.contextmanager
    def unbroken(self, when: str) -> Iterator[None]:
        """Around a change of state in several parts: after an interrupt in it `check` raises. May wait."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.failure = self.failure or TierError(
                f"{type(error).__name__} {when}: what is in the tiers cannot be relied upon; go on from a checkpoint"
            )
            raise

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Runs ``fn`` on a compute thread. Cancelled, it still waits for a call that has begun: it may hold memory."""
        future = self._compute.submit(fn, *args)
        result = asyncio.wrap_future(future)
        await _ended([result], future.cancel)
        value: T = result.result()
        return value

    async def read(
        self, file: TransferFile, offset: int, dest: memoryview, priority: Priority, request: Request | None = None
    ) -> None:
        """Fills ``dest`` from ``offset`` of the file (both in bytes, multiples of `PAGE`, ``dest`` page-aligned).

        Raises TierError. ``request``, if given, carries the priority and can be promoted meanwhile.
        """
        await self._transfer("read", file, offset, dest, request or Request(priority))

    async def write(
        self, file: TransferFile, offset: int, src: memoryview, priority: Priority, request: Request | None = None
    ) -> None:
        """Writes ``src`` at ``offset`` of the file; as `read`. ``src`` must not change before the end."""
        await self._transfer("write", file, offset, src, request or Request(priority))

    def close(self) -> None:
        """Ends what is running, then the threads. Safe to call twice.

        Transfers and computations are finished; coroutines that wait for neither (for room in a pool, say) are
        cancelled.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("IoEngine.close would wait for its own thread; call it from another one")
        with self._lock:
            first, self._closing = not self._closing, True
        if not first or not self._abandon.alive:
            self._thread.join()
            return
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._abandon.detach()
        for executor in (*self._lanes.values(), self._compute):
            executor.shutdown()
        _stop(self._loop)
        self._thread.join()

    # Inside.

    def _schedule(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._closing:
                raise TierError("the I/O engine is closed")
            if os.getpid() != self._pid:
                raise TierError(
                    f"the I/O engine belongs to process {self._pid}; a forked process has none of its threads: "
                    "start the process with spawn, or make the engine there"
                )
            return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def _start(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """On the loop: a task that lives until it ends, and whose error counts as seen (`failure` keeps it)."""
        task = self._loop.create_task(coro)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()

    async def _guard(self, coro: Coroutine[Any, Any, T]) -> T:
        try:
            return await coro
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            raise

    async def _drain(self) -> None:
        own = asyncio.current_task()
        while others := [task for task in asyncio.all_tasks() if task is not own]:
            done, pending = await asyncio.wait(others, timeout=_STALL_S, return_when=asyncio.FIRST_COMPLETED)
            if not done and not any(executor.pending for executor in (*self._lanes.values(), self._compute)):
                for task in pending:
                    task.cancel()

    def _lane(self, path: Path) -> PriorityExecutor:
        lane = self._lanes.get(path)
        if lane is None:
            lane = self._lanes[path] = PriorityExecutor(self.queue_depth, f"tierzero-{path.parent.name}")
        return lane

    async def _transfer(self, op: str, file: TransferFile, offset: int, memory: memoryview, request: Request) -> None:
        memory = memory if memory.format == "B" and memory.ndim == 1 else memory.cast("B")
        if any(file.direct) and (offset % PAGE or len(memory) % PAGE):
            raise ValueError(f"{op} of {len(memory)} bytes at offset {offset}: both must be multiples of {PAGE}")
        pieces = file.pieces(offset, len(memory))
        if not pieces:
            return
        tasks = [
            asyncio.ensure_future(
                self._move(op, file, piece, memory[piece.start : piece.start + piece.nbytes], request)
            )
            for piece in pieces
        ]
        await _ended(tasks, lambda: setattr(request, "abandoned", True))
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise first_cause(errors)

    async def _move(self, op: str, file: TransferFile, piece: Piece, memory: memoryview, request: Request) -> None:
        """One piece, until all of it is done: a system call may do less than it was asked."""
        index, done, stuck = piece.path_index, 0, 0
        ticket = self._lane(file.lanes[index]).ticket(request)
        traffic, step = (self._reads, read_some) if op == "read" else (self._writes, write_some)
        traffic = traffic if file.is_tier else self._other
        while done < piece.nbytes:
            try:
                moved = await step(
                    self.fault, traffic, file, index, memory[done:], piece.file_offset + done, request, executor=ticket
                )
            except TierError:
                request.abandoned = True
                raise
            except OSError as error:
                request.abandoned = True
                raise transfer_error(op, file, piece, done, error) from error
            except BaseException:
                request.abandoned = True
                raise
            traffic.add(moved)
            if done + moved < piece.nbytes and file.direct[index]:
                # O_DIRECT goes on from a page boundary only: a page that was begun is done again.
                moved -= (done + moved) % PAGE
            stuck = stuck + 1 if moved <= 0 else 0
            if stuck == 3:
                request.abandoned = True
                raise no_progress(op, file, piece, done)
            done += max(moved, 0)


async def _ended(futures: Iterable[asyncio.Future[Any]], abandon: Callable[[], object]) -> None:
    """Waits until all are done, however. Cancelled, it calls ``abandon``, waits on, and only then passes the
    cancellation on.
    """
    futures = list(futures)
    pending = set(futures)
    cancelled = False
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
            abandon()
            pending = {future for future in pending if not future.done()}
    if cancelled:
        for future in futures:
            if not future.cancelled():
                future.exception()  # the cancellation takes precedence; mark it as seen
        raise asyncio.CancelledError


async def _started(start: Callable[[T], R], what: T) -> R:
    return start(what)


async def _noting_task(coro: Coroutine[Any, Any, T], tasks: list[asyncio.Task[Any]]) -> T:
    task = asyncio.current_task()
    assert task is not None
    tasks.append(task)
    return await coro


def _cancel_noted(loop: asyncio.AbstractEventLoop, tasks: list[asyncio.Task[Any]]) -> None:
    if tasks:
        tasks[0].cancel()
    else:  # it is scheduled, but has not begun
        loop.call_soon(_cancel_noted, loop, tasks)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        # Only what an abandoned engine left behind: a closed one has drained.
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=_STALL_S))
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(loop.stop)


def _abandon(
    pid: int,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    lanes: dict[Path, PriorityExecutor],
    compute: PriorityExecutor,
) -> None:
    """For an engine that was dropped without `close`, or is open at interpreter exit: stops the threads, without
    waiting for long.
    """
    if os.getpid() != pid:  # a forked child has no such threads
        return
    executors = (*lanes.values(), compute)
    for executor in executors:
        executor.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + _ABANDON_S
    for executor in executors:
        executor.join(deadline)
    _stop(loop)
    if thread is not threading.current_thread():
        thread.join(_ABANDON_S)
