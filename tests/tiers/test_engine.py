"""The engine: whole transfers whatever a system call does, order of urgency, errors that say where, and a clean end."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierzero.errors import TierError
from tierzero.tiers import PAGE, IoEngine, MemoryPool, Priority, Request, StripedFile, TierDirectory
from tierzero.tiers import transfer as module

from .conftest import random_bytes

BLOCK = 4 * PAGE
SIZE = 64 * PAGE
Files = Callable[..., StripedFile]


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[Files]:
    opened: list[Any] = []

    def make(paths: int = 1, direct: Any = "auto") -> StripedFile:
        directories = []
        for index in range(paths):
            (tmp_path / str(index)).mkdir()
            directories.append(TierDirectory.open(tmp_path / str(index), 0))
        file = StripedFile(directories, SIZE, block_size=BLOCK, direct=direct)
        opened.extend([*directories, file])
        return file

    yield make
    for item in reversed(opened):
        item.close()


def memory(content: bytes | int) -> memoryview:
    """Page-aligned memory with this content, or zeros."""
    view = memoryview(mmap.mmap(-1, content if isinstance(content, int) else len(content)))
    if isinstance(content, bytes):
        view[:] = content
    return view


class Gate:
    """A fault hook that holds every system call until it is opened, and notes their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.entered = threading.Semaphore(0)
        self.passing = threading.Event()

    def __call__(self, op: str, path: Path, offset: int, nbytes: int) -> None:
        self.calls.append((op, offset, nbytes))
        self.entered.release()
        assert self.passing.wait(60)


@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("direct", ["auto", False])
def test_round_trips_at_any_place(engine: IoEngine, make_file: Files, paths: int, direct: Any) -> None:
    file = make_file(paths, direct)
    whole = bytearray(SIZE)
    for seed, (first, pages) in enumerate([(0, 64), (3, 1), (5, 4), (7, 30), (63, 1)]):
        content = random_bytes(pages * PAGE, seed)
        engine.run(engine.write(file, first * PAGE, memory(content), Priority.DEMAND))
        whole[first * PAGE : first * PAGE + len(content)] = content
    for first, pages in [(0, 64), (2, 3), (6, 33), (62, 2)]:
        dest = memory(pages * PAGE)
        engine.run(engine.read(file, first * PAGE, dest, Priority.DEMAND))
        assert bytes(dest) == whole[first * PAGE : (first + pages) * PAGE]
    assert engine.write_bytes == 100 * PAGE
    assert engine.read_bytes == 102 * PAGE
    assert engine.read_busy_s > 0
    assert engine.write_busy_s > 0


def test_buffered_io_leaves_no_page_cache_behind(
    engine: IoEngine, make_file: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (flushed.append(fd), real(fd)))
    monkeypatch.setattr("tierzero.tiers.file.SYNC_EVERY", SIZE // 2)
    file = make_file(direct=False)
    engine.run(engine.write(file, 0, memory(random_bytes(SIZE)), Priority.DEMAND))
    assert len(flushed) == 2


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("op", ["preadv", "pwritev"])
@pytest.mark.parametrize("limit", [PAGE, PAGE + 512, 3 * PAGE - 1])
def test_short_system_calls_are_completed(
    engine: IoEngine, make_file: Files, monkeypatch: pytest.MonkeyPatch, direct: Any, op: str, limit: int
) -> None:
    """Also when the rest is not aligned; with O_DIRECT the next call must then begin at a page again."""
    file = make_file(2, direct)
    real = getattr(os, op)
    offsets: list[int] = []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        whole: int = real(fd, buffers, offset)
        return min(whole, limit)

    content = random_bytes(SIZE)
    monkeypatch.setattr(module.os, op, short)
    engine.run(engine.write(file, 0, memory(content), Priority.DEMAND))
    dest = memory(SIZE)
    engine.run(engine.read(file, 0, dest, Priority.DEMAND))
    assert bytes(dest) == content
    assert len(offsets) > SIZE // BLOCK
    if file.direct[0]:
        assert all(offset % PAGE == 0 for offset in offsets)


def test_a_real_short_write_reports_the_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel cut a write short, then refuse the rest."""
    script = """
import mmap, resource, signal, sys
from pathlib import Path
from tierzero.errors import TierError
from tierzero.tiers import IoEngine, Priority, StripedFile, TierDirectory
file = StripedFile([TierDirectory.open(Path(sys.argv[1]), 0)], 1 << 20, block_size=1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (81920, 81920))
engine = IoEngine(2)
try:
    engine.run(engine.write(file, 0, memoryview(mmap.mmap(-1, 1 << 20)), Priority.DEMAND))
except TierError as error:
    print(error.errno, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith(f"{errno.EFBIG} write of 1,048,576 bytes at offset 0 of {tmp_path}")
    assert "81,920 bytes were done; raise the file size limit" in done.stdout


@pytest.mark.parametrize(("op", "moved"), [("preadv", 0), ("pwritev", 0), ("pwritev", 512)])
def test_no_progress_is_an_error_and_not_a_loop(
    engine: IoEngine, make_file: Files, monkeypatch: pytest.MonkeyPatch, op: str, moved: int
) -> None:
    file = make_file(direct=True)
    monkeypatch.setattr(module.os, op, lambda fd, buffers, offset: moved)
    move = engine.read if op == "preadv" else engine.write
    with pytest.raises(TierError, match=r"of 4,096 bytes at offset 8,192 of .*state\.tier stopped after 0 bytes"):
        engine.run(move(file, 2 * PAGE, memory(PAGE), Priority.DEMAND))


def test_an_error_says_what_where_and_how_far(engine: IoEngine, make_file: Files) -> None:
    file = make_file()

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        if offset == BLOCK:
            raise OSError(errno.ENOSPC, "")

    engine.fault = fault
    with pytest.raises(TierError) as caught:
        engine.run(engine.write(file, 0, memory(2 * BLOCK), Priority.DEMAND))
    text = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert text.startswith(f"write of 16,384 bytes at offset 16,384 of {file.paths[0]} failed: No space left on device")
    assert "0 bytes were done" in text
    assert "bytes are free; free space there, add a path to tiers.nvme" in text
    assert "\n" not in text
    engine.fault = None
    engine.run(engine.write(file, 0, memory(2 * BLOCK), Priority.DEMAND))


def test_memory_is_untouched_once_a_failed_transfer_has_ended(engine: IoEngine, make_file: Files) -> None:
    """One piece fails, others are in flight: the error arrives after they have ended; what waits is dropped."""
    file = make_file()
    running: set[int] = set()
    lock = threading.Lock()
    slow = threading.Event()

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        if offset == 0:
            slow.set()
            raise OSError(errno.EIO, "")
        slow.wait(60)
        with lock:
            running.add(offset)
        threading.Event().wait(0.05)
        with lock:
            running.discard(offset)

    engine.fault = fault
    with pytest.raises(TierError, match="Input/output error"):
        engine.run(engine.read(file, 0, memory(SIZE), Priority.DEMAND))
    assert running == set()
    assert engine.read_bytes < SIZE // 2


def test_a_cancelled_transfer_ends_only_when_its_system_calls_have(engine: IoEngine, make_file: Files) -> None:
    file = make_file()
    gate = Gate()
    engine.fault = gate

    async def scenario() -> bool:
        task = asyncio.ensure_future(engine.read(file, 0, memory(SIZE), Priority.DEMAND))
        while len(gate.calls) < engine.queue_depth:
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        held = not task.done()
        gate.passing.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return held

    assert engine.run(scenario())
    assert len(gate.calls) == engine.queue_depth


def test_an_interrupt_waits_for_the_system_calls(engine: IoEngine, make_file: Files) -> None:
    """After Ctrl-C the caller's memory must not be written to any more."""
    file = make_file()
    gate = Gate()
    engine.fault = gate
    ended: list[int] = []

    def interrupt() -> None:
        gate.entered.acquire(timeout=60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Event().wait(0.1)
        ended.append(len(gate.calls))
        gate.passing.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.run(engine.read(file, 0, memory(SIZE), Priority.DEMAND))
    assert ended  # the system calls were let go on before the interrupt was raised here
    assert len(gate.calls) == ended[0] <= engine.queue_depth
    thread.join()
    engine.fault = None
    engine.run(engine.read(file, 0, memory(SIZE), Priority.DEMAND))


def test_a_forked_process_is_told_that_it_has_no_engine(engine: IoEngine) -> None:
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what this is about
        pid = os.fork()
    if pid == 0:
        try:
            engine.run(asyncio.sleep(0))
        except TierError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert f"belongs to process {os.getpid()}" in pipe.read()
    engine.run(asyncio.sleep(0))


def test_at_most_queue_depth_calls_are_in_flight_per_path(engine: IoEngine, make_file: Files) -> None:
    file = make_file(2)
    lock = threading.Lock()
    flying: dict[Path, int] = dict.fromkeys(file.paths, 0)
    most = dict(flying)

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        with lock:
            flying[path] += 1
            most[path] = max(most[path], flying[path])
        threading.Event().wait(0.01)
        with lock:
            flying[path] -= 1

    engine.fault = fault
    engine.run(engine.read(file, 0, memory(SIZE), Priority.DEMAND))
    assert set(most.values()) == {engine.queue_depth}


def test_what_waits_goes_by_urgency_then_arrival(make_file: Files) -> None:
    engine = IoEngine(1)
    file = make_file()
    gate = Gate()
    engine.fault = gate
    promoted = Request(Priority.WRITE_BACK)

    async def move(op: str, page: int, priority: Priority, request: Request | None = None) -> None:
        call = engine.read if op == "read" else engine.write
        await call(file, page * PAGE, memory(PAGE), priority, request)

    jobs = [engine.submit(move("read", 0, Priority.DEMAND))]
    assert gate.entered.acquire(timeout=60)  # the only slot is taken: what follows waits
    for op, page, priority in [
        ("write", 1, Priority.WRITE_BACK),
        ("read", 2, Priority.PREFETCH),
        ("write", 3, Priority.WRITE_BACK),
        ("read", 4, Priority.DEMAND),
        ("read", 5, Priority.PREFETCH),
        ("read", 6, Priority.DEMAND),
    ]:
        jobs.append(engine.submit(move(op, page, priority)))
    jobs.append(engine.submit(move("read", 7, Priority.DEMAND, promoted)))
    jobs.append(engine.submit(move("read", 8, Priority.DEMAND)))
    engine.run(asyncio.sleep(0.1))  # all have reached the queue
    promoted.promote(Priority.PREFETCH)
    promoted.promote(Priority.WRITE_BACK)  # changes nothing
    assert promoted.priority is Priority.PREFETCH
    gate.passing.set()
    for job in jobs:
        job.result(60)
    assert [offset // PAGE for _, offset, _ in gate.calls] == [0, 4, 6, 8, 2, 5, 7, 1, 3]
    engine.close()


def test_unaligned_requests_are_refused(engine: IoEngine, make_file: Files) -> None:
    file = make_file(direct=True)
    for offset, nbytes in [(1, PAGE), (0, PAGE - 1)]:
        with pytest.raises(ValueError, match="multiples of 4096"):
            engine.run(engine.read(file, offset, memory(nbytes), Priority.DEMAND))


def test_memory_that_is_not_aligned_says_so(engine: IoEngine, make_file: Files) -> None:
    file = make_file(direct=True)
    with pytest.raises(TierError, match=r"Invalid argument.*must be aligned") as caught:
        engine.run(engine.read(file, 0, memory(2 * PAGE)[1 : PAGE + 1], Priority.DEMAND))
    assert caught.value.errno == errno.EINVAL


async def fail(message: str) -> None:
    raise TierError(message)


def test_a_background_failure_surfaces_everywhere(engine: IoEngine) -> None:
    engine.check()
    first = engine.spawn(fail("the first"))
    second = engine.spawn(fail("the second"))
    ended = threading.Event()
    engine._loop.call_soon_threadsafe(second.add_done_callback, lambda task: ended.set())
    assert ended.wait(60)
    assert first.done()
    assert str(engine.failure) == "the first"
    for use in (engine.check, lambda: engine.submit(asyncio.sleep(0)), lambda: engine.run(asyncio.sleep(0))):
        with pytest.raises(TierError, match="the first"):
            use()


def test_a_background_task_can_be_awaited_on_the_loop(engine: IoEngine) -> None:
    async def scenario() -> int:
        async def work() -> int:
            await asyncio.sleep(0)
            return 42

        return await engine.spawn(work())

    assert engine.run(scenario()) == 42


def test_calls_run_beside_the_loop_and_pass_errors_on(engine: IoEngine) -> None:
    def work(base: int, exponent: int) -> tuple[int, str]:
        return base**exponent, threading.current_thread().name

    value, name = engine.run(engine.call(work, 2, 5))
    assert value == 32
    assert name.startswith("tierzero-compute")
    with pytest.raises(ZeroDivisionError):
        engine.run(engine.call(lambda: 1 // 0))


def test_a_cancelled_call_waits_for_its_end(engine: IoEngine) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert go_on.wait(60)

    async def scenario() -> None:
        task = asyncio.ensure_future(engine.call(work))
        while not started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine.run(scenario())


def test_the_loop_must_not_wait_for_itself(engine: IoEngine) -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="await the coroutine"):
            engine.run(asyncio.sleep(0))
        with pytest.raises(RuntimeError, match="its own thread"):
            engine.close()

    engine.run(scenario())


def test_close_finishes_what_runs_and_refuses_what_comes(make_file: Files, pool: MemoryPool) -> None:
    engine = IoEngine(2)
    file = make_file()
    content = random_bytes(SIZE)

    def slow(*args: object) -> None:
        threading.Event().wait(0.01)

    engine.fault = slow
    threads = threading.active_count()
    writing = engine.submit(engine.write(file, 0, memory(content), Priority.WRITE_BACK))
    held = pool.allocate(pool.capacity, "everything")
    stuck = engine.submit(pool.acquire(PAGE))  # waits for room that nobody will make
    engine.close()
    engine.close()
    assert writing.result() is None
    assert stuck.cancelled()
    assert threading.active_count() < threads
    pool.release(held)
    for use in (engine.submit, engine.run, engine.spawn):
        with pytest.raises(TierError, match="closed"):
            use(asyncio.sleep(0))
    other = IoEngine(2)
    dest = memory(SIZE)
    other.run(other.read(file, 0, dest, Priority.DEMAND))
    assert bytes(dest) == content
    other.close()


def test_a_dropped_engine_ends_its_threads() -> None:
    engine = IoEngine(2)
    engine.run(engine.call(int))
    threads = [engine._thread, *engine._compute._threads]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("state", ["idle", "stuck"])
def test_an_engine_left_open_does_not_hang_the_exit(tmp_path: Path, state: str) -> None:
    script = """
import asyncio, mmap, sys, time
from pathlib import Path
from tierzero.tiers import IoEngine, Priority, StripedFile, TierDirectory
file = StripedFile([TierDirectory.open(Path(sys.argv[1]), 0)], 1 << 20, block_size=4096)
engine = IoEngine(2, fault=(lambda *call: time.sleep(600)) if sys.argv[2] == "stuck" else None)
engine.submit(engine.read(file, 0, memoryview(mmap.mmap(-1, 1 << 20)), Priority.DEMAND))
engine.submit(asyncio.sleep(600))
engine.submit(engine.call(time.sleep, 600 if sys.argv[2] == "stuck" else 0))
time.sleep(0.1)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), state], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="queue_depth"):
        IoEngine(0)
