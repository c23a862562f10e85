"""Worker threads that take the most urgent job first, and never hold up the end of the interpreter."""

from __future__ import annotations

import enum
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Priority(enum.IntEnum):
    """How urgent a request is; the lower, the sooner."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


class Request:
    """A handle on a transfer, through which its pieces that still wait can be made more urgent, from any thread."""

    def __init__(self, priority: Priority) -> None:
        self._priority = priority
        self._lock = threading.Lock()
        self._queued: list[tuple[PriorityExecutor, _Job]] = []
        self.abandoned = False
        """Pieces that have not started need not be transferred any more."""

    @property
    def priority(self) -> Priority:
        return self._priority

    def promote(self, priority: Priority = Priority.DEMAND) -> None:
        """Moves what still waits ahead; a less urgent ``priority`` than the present one changes nothing."""
        with self._lock:
            if priority >= self._priority:
                return
            self._priority = priority
            queued = [(executor, job) for executor, job in self._queued if not job.taken]
            self._queued = queued
        for executor, job in queued:
            executor._requeue(job, priority)

    def _note(self, executor: PriorityExecutor, job: _Job) -> Priority:
        with self._lock:
            self._queued.append((executor, job))
            return self._priority


class _Job:
    """A call and the future of its result. ``order``: arrival, which decides among equal priorities."""

    __slots__ = ("behind", "call", "future", "order", "taken")

    def __init__(self, call: Callable[[], Any], order: int) -> None:
        self.call: Callable[[], Any] | None = call
        self.future: Future[Any] = Future()
        self.order = order
        self.taken = False
        self.behind = False


class PriorityExecutor(Executor):
    """At most ``workers`` calls at a time, the waiting ones by (priority, arrival). Calls of the least urgency leave a
    quarter of the workers free: what is urgent never waits for all of them to end.

    The threads are daemons and start on demand: unlike those of ThreadPoolExecutor they are not joined at interpreter
    exit, where a stuck drive would hang the process.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._workers = workers
        self._most_behind = workers - workers // 4
        self._behind = 0
        """Calls of the least urgency that run now."""
        self._name = name
        self._heap: list[tuple[int, int, int, _Job]] = []
        self._sequence = itertools.count()
        self._ready = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._busy = 0
        self._stopping = False

    @property
    def pending(self) -> bool:
        """Whether a call waits or runs."""
        with self._ready:
            return self._busy > 0 or any(not job.taken for *_, job in self._heap)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._push(_Job(lambda: fn(*args, **kwargs), next(self._sequence)), Priority.DEMAND)

    def ticket(self, request: Request) -> Executor:
        """This executor as seen by one transfer: all that is submitted through it has the transfer's place in the
        queue.
        """
        return _Ticket(self, request, next(self._sequence))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the threads end once nothing waits; ``wait`` joins them."""
        with self._ready:
            self._stopping = True
            dropped = [job for *_, job in self._heap if not job.taken] if cancel_futures else []
            if cancel_futures:
                self._heap.clear()
            self._ready.notify_all()
        for job in dropped:
            job.future.cancel()
        if wait:
            self.join()

    def join(self, deadline: float | None = None) -> None:
        """Waits for the threads to end, until ``deadline`` (of `time.monotonic`) at most."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _push(self, job: _Job, priority: Priority) -> Future[Any]:
        with self._ready:
            if self._stopping:
                raise RuntimeError(f"{self._name} has been shut down")
            heapq.heappush(self._heap, (priority, job.order, next(self._sequence), job))
            self._ready.notify()
            # Idle threads that were notified count as idle until they run: compare with all that waits.
            if len(self._heap) > self._idle and len(self._threads) < self._workers:
                self._start_thread()
        return job.future

    def _requeue(self, job: _Job, priority: Priority) -> None:
        with self._ready:
            if not job.taken:  # the old entry stays behind and is skipped
                heapq.heappush(self._heap, (priority, job.order, next(self._sequence), job))
                self._ready.notify()

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            try:
                self._execute(job)
            finally:
                with self._ready:
                    self._busy -= 1
                    self._behind -= job.behind
                    if self._stopping:  # who waits for its turn behind this one has to see that nothing is left
                        self._ready.notify_all()
                    elif job.behind:
                        self._ready.notify()
            # An idle worker must not keep the last job's memory alive.
            del job

    def _next(self) -> _Job | None:
        with self._ready:
            while True:
                while self._heap and (self._heap[0][0] < Priority.WRITE_BACK or self._behind < self._most_behind):
                    priority, _, _, job = heapq.heappop(self._heap)
                    if not job.taken:
                        job.taken = True
                        self._busy += 1
                        job.behind = priority >= Priority.WRITE_BACK
                        self._behind += job.behind
                        return job
                if self._stopping and not self._heap:
                    return None
                self._idle += 1
                self._ready.wait()
                self._idle -= 1

    @staticmethod
    def _execute(job: _Job) -> None:
        call, job.call = job.call, None
        if not job.future.set_running_or_notify_cancel():
            return
        assert call is not None
        try:
            result = call()
        except BaseException as error:  # a worker reports everything to whoever awaits the result
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


class _Ticket(Executor):
    def __init__(self, executor: PriorityExecutor, request: Request, order: int) -> None:
        self._executor = executor
        self._request = request
        self._order = order

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job = _Job(lambda: fn(*args, **kwargs), self._order)
        priority = self._request._note(self._executor, job)
        future = self._executor._push(job, priority)
        if self._request.priority < priority:  # promoted between the two lines above
            self._executor._requeue(job, self._request.priority)
        return future
