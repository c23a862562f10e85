"""The order and the limits of the I/O threads' work."""

from __future__ import annotations

import threading
import time

from tierzero.tiers.executor import Priority, PriorityExecutor, Request

WORKERS = 4


def held(executor: PriorityExecutor, count: int, gate: threading.Event) -> list[object]:
    """So many calls of the least urgency that wait for ``gate``."""
    return [executor.ticket(Request(Priority.WRITE_BACK)).submit(gate.wait, 10) for _ in range(count)]


def test_urgent_work_finds_a_worker_beside_any_number_of_writes() -> None:
    executor, gate = PriorityExecutor(WORKERS, "test"), threading.Event()
    writes = held(executor, 3 * WORKERS, gate)
    read = executor.ticket(Request(Priority.DEMAND)).submit(lambda: "read")
    assert read.result(timeout=5) == "read"
    assert not any(write.done() for write in writes)  # type: ignore[attr-defined]
    gate.set()
    assert all(write.result(timeout=5) for write in writes)  # type: ignore[attr-defined]
    executor.shutdown()


def test_a_waiting_write_that_becomes_urgent_starts_at_once() -> None:
    executor, gate = PriorityExecutor(WORKERS, "test"), threading.Event()
    held(executor, WORKERS, gate)
    request = Request(Priority.WRITE_BACK)
    promoted = executor.ticket(request).submit(lambda: "done")
    time.sleep(0.05)
    assert not promoted.done()
    request.promote()
    assert promoted.result(timeout=5) == "done"
    gate.set()
    executor.shutdown()


def test_a_shutdown_lets_all_that_waits_run_and_ends_every_thread() -> None:
    for workers in (1, 2, 4, 8):
        executor, ran = PriorityExecutor(workers, "test"), []
        for number in range(50):
            priority = Priority.WRITE_BACK if number % 5 else Priority.DEMAND
            executor.ticket(Request(priority)).submit(ran.append, number)
        executor.shutdown(wait=True)
        assert sorted(ran) == list(range(50))
        assert not any(thread.is_alive() for thread in executor._threads)
