"""The store: contents survive, neighbours move together, states change only as they may, failures lose nothing."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tierzero.errors import BudgetError, ConfigError, TierError
from tierzero.tiers import (
    PAGE,
    HostAllocator,
    IoEngine,
    MemoryPool,
    Priority,
    Residency,
    StoredObject,
    Tier,
    TieredStore,
    page_round,
)

from .conftest import BLOCK, random_bytes

MakeStore = Callable[..., TieredStore]
ODD_SIZES = (1, 2, 511, 512, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 12345, 0, 777_777)


class Case:
    """An open store with nvme objects of some sizes, and a staging buffer for all of them."""

    def __init__(self, store: TieredStore, pool: MemoryPool, sizes: tuple[int, ...]) -> None:
        self.store = store
        self.engine = store.engine
        self.objects = [store.add(f"object{index}", size, Tier.NVME) for index, size in enumerate(sizes)]
        store.open()
        self.buffer = pool.allocate(sum(page_round(size) for size in sizes), "staging")
        self.memory = self.buffer.memory(0, self.buffer.capacity)
        self.contents = [random_bytes(size, seed) for seed, size in enumerate(sizes)]

    def fill(self, objects: list[StoredObject]) -> memoryview:
        at = 0
        for stored in objects:
            content = self.contents[self.objects.index(stored)]
            self.memory[at : at + len(content)] = content
            at += page_round(stored.nbytes)
        return self.memory[:at]

    def write_all(self) -> None:
        self.engine.run(self.store.write(self.objects, self.fill(self.objects), Priority.DEMAND))

    def check(self, objects: list[StoredObject]) -> None:
        """Pages these in over garbage and compares."""
        self.buffer.tensor.fill_(0xAB)
        lease = self.engine.run(self.store.page_in(objects, self.memory, Priority.DEMAND))
        at = 0
        for stored in objects:
            assert stored.residency is Residency.RESIDENT
            assert bytes(lease.dest[at : at + stored.nbytes]) == self.contents[self.objects.index(stored)]
            at += page_round(stored.nbytes)
        lease.release()


@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("direct", ["auto", False])
def test_odd_sizes_come_back_in_any_grouping(
    make_store: MakeStore, pool: MemoryPool, paths: int, direct: str | bool
) -> None:
    case = Case(make_store(paths, direct=direct, verify=True), pool, ODD_SIZES)
    case.write_all()
    case.check(case.objects)
    case.check(case.objects[::-1])
    case.check(case.objects[::3])
    for stored in case.objects:
        case.check([stored])
    assert all(stored.residency is Residency.AT_HOME for stored in case.objects)


def test_neighbours_are_one_request_and_strangers_one_each(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(), pool, (PAGE + 5, 100, 3 * PAGE, PAGE))
    calls: list[tuple[str, int, int]] = []
    case.engine.fault = lambda op, path, offset, nbytes: calls.append((op, offset // PAGE, nbytes // PAGE))
    case.write_all()
    case.check(case.objects)
    assert calls == [("write", 0, 7), ("read", 0, 7)]
    calls.clear()
    first, second, _, fourth = case.objects
    case.check([first, second, fourth])
    assert sorted(calls) == [("read", 0, 3), ("read", 6, 1)]


def test_changes_are_paged_out_and_back(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(2, verify=True), pool, (BLOCK + 7, 2 * BLOCK, 9))
    case.write_all()
    lease = case.engine.run(case.store.page_in(case.objects, case.memory, Priority.DEMAND))
    lease.mark_dirty()
    case.contents = [random_bytes(len(content), 100 + seed) for seed, content in enumerate(case.contents)]
    case.fill(case.objects)
    case.engine.run(case.store.page_out(lease, Priority.WRITE_BACK))
    case.check(case.objects)


def test_a_page_in_waits_for_the_write_of_the_same_object_only(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(), pool, (PAGE, PAGE, PAGE))
    case.write_all()
    writing, go_on = threading.Event(), threading.Event()

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        if op == "write":
            writing.set()
            assert go_on.wait(60)

    async def scenario() -> None:
        store, (first, second, _) = case.store, case.objects
        lease = await store.page_in([first], case.memory[:PAGE], Priority.DEMAND)
        lease.mark_dirty()
        case.memory[:PAGE] = case.contents[0] = random_bytes(PAGE, 9)
        case.engine.fault = fault
        out = asyncio.ensure_future(store.page_out(lease, Priority.WRITE_BACK))
        while not writing.is_set():
            await asyncio.sleep(0.001)
        assert first.residency is Residency.PAGING_OUT
        again = asyncio.ensure_future(store.page_in([first], case.memory[2 * PAGE :], Priority.DEMAND))
        (await store.page_in([second], case.memory[PAGE : 2 * PAGE], Priority.DEMAND)).release()
        assert not again.done()
        go_on.set()
        await out
        copy = await again
        assert bytes(copy.dest[:PAGE]) == case.contents[0]
        copy.release()

    case.engine.run(scenario())


def test_a_failed_read_leaves_the_objects_at_home(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(), pool, (BLOCK, PAGE, BLOCK))
    case.write_all()

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "")

    case.engine.fault = fault
    with pytest.raises(TierError, match="Input/output error"):
        case.engine.run(case.store.page_in([case.objects[0], case.objects[2]], case.memory, Priority.DEMAND))
    case.engine.fault = None
    case.check(case.objects)


def test_a_failed_page_out_keeps_the_lease_and_can_be_repeated(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(verify=True), pool, (BLOCK, PAGE))
    case.write_all()
    lease = case.engine.run(case.store.page_in(case.objects, case.memory, Priority.DEMAND))
    lease.mark_dirty()
    case.contents = [random_bytes(len(content), 50) for content in case.contents]
    case.fill(case.objects)

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "")

    case.engine.fault = fault
    with pytest.raises(TierError, match="No space left on device"):
        case.engine.run(case.store.page_out(lease, Priority.WRITE_BACK))
    assert {stored.residency for stored in case.objects} == {Residency.DIRTY}
    with pytest.raises(RuntimeError, match="DIRTY"):
        lease.release()
    case.engine.fault = None
    case.engine.run(case.store.page_out(lease, Priority.WRITE_BACK))
    case.check(case.objects)


def test_a_failed_write_is_not_readable_until_it_is_repeated(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(), pool, (PAGE,))

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "")

    case.engine.fault = fault

    async def both() -> list[object]:
        write = case.store.write(case.objects, case.memory, Priority.DEMAND)
        read = case.store.page_in(case.objects, case.memory, Priority.DEMAND)
        return list(await asyncio.gather(write, read, return_exceptions=True))

    results = case.engine.run(both())
    assert [type(result) for result in results] == [
        TierError,
        TierError,
    ]  # who waited for the write learns of its failure
    case.engine.fault = None
    with pytest.raises(RuntimeError, match="'object0' cannot go from DIRTY to PAGING_IN"):
        case.engine.run(case.store.page_in(case.objects, case.memory, Priority.DEMAND))
    case.write_all()
    case.check(case.objects)


def test_objects_change_state_all_together_or_not_at_all(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(), pool, (PAGE, PAGE))
    case.write_all()
    first, second = case.objects
    lease = case.engine.run(case.store.page_in([second], case.memory, Priority.DEMAND))
    with pytest.raises(RuntimeError, match="'object1' cannot go from RESIDENT to PAGING_IN"):
        case.engine.run(case.store.page_in([first, second], case.memory, Priority.DEMAND))
    assert first.residency is Residency.AT_HOME
    with pytest.raises(RuntimeError, match="a lease holds it"):
        case.engine.run(case.store.write([first, second], case.memory, Priority.DEMAND))
    assert first.residency is Residency.AT_HOME
    lease.release()


LEGAL = {
    ("AT_HOME", "PAGING_IN"),
    ("AT_HOME", "PAGING_OUT"),
    ("PAGING_IN", "RESIDENT"),
    ("PAGING_IN", "AT_HOME"),
    ("RESIDENT", "DIRTY"),
    ("RESIDENT", "AT_HOME"),
    ("DIRTY", "PAGING_OUT"),
    ("PAGING_OUT", "AT_HOME"),
    ("PAGING_OUT", "DIRTY"),
}


@pytest.mark.parametrize(("start", "to"), list(itertools.product(Residency, Residency)))
def test_only_legal_moves_are_made(start: Residency, to: Residency) -> None:
    stored = StoredObject("thing", 1, Tier.NVME, None)
    stored._residency = start
    if (start.name, to.name) in LEGAL:
        stored._move(to)
        assert stored.residency is to
    else:
        with pytest.raises(RuntimeError, match=f"'thing' cannot go from {start.name} to {to.name}"):
            stored._move(to)
        assert stored.residency is start


def test_a_lease_that_is_over_is_refused(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(), pool, (PAGE,))
    case.write_all()
    lease = case.engine.run(case.store.page_in(case.objects, case.memory, Priority.DEMAND))
    with pytest.raises(RuntimeError, match="cannot go from RESIDENT to PAGING_OUT"):
        case.engine.run(case.store.page_out(lease, Priority.DEMAND))
    lease.mark_dirty()
    lease.mark_dirty()
    case.engine.run(case.store.page_out(lease, Priority.DEMAND))
    for use in (lease.release, lease.mark_dirty):
        with pytest.raises(RuntimeError, match="the lease on 'object0' is over"):
            use()


def test_damage_on_the_drive_is_found(make_store: MakeStore, pool: MemoryPool) -> None:
    case = Case(make_store(2, verify=True), pool, (PAGE, BLOCK, PAGE))
    case.write_all()
    case.check(case.objects)
    assert case.store.file is not None
    path = case.store.file.paths[0]
    with open(path, "r+b") as file:
        file.seek(PAGE + 100)  # object1 begins at the second page of the first path
        byte = file.read(1)
        file.seek(PAGE + 100)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(
        TierError, match=r"'object1' was read back damaged: bytes 4,096 to 69,632 .*offset 4,096 of .*drive0"
    ):
        case.engine.run(case.store.page_in(case.objects, case.memory, Priority.DEMAND))
    case.check([case.objects[0], case.objects[2]])


def test_requests_that_make_no_sense_are_refused(make_store: MakeStore, pool: MemoryPool) -> None:
    store = make_store()
    host = store.add("host", 10, Tier.HOST)
    case = Case(store, pool, (PAGE, PAGE))
    first = case.objects[0]
    for objects, memory, text in [
        ([first], case.memory[: PAGE - 1], "need 4096 bytes of memory, got 4095"),
        ([first, first], case.memory, "appears twice"),
        ([host], case.memory, "'host' lives on host"),
        ([], case.memory, "no objects"),
    ]:
        with pytest.raises(ValueError, match=text):
            case.engine.run(case.store.page_in(objects, memory, Priority.DEMAND))
    other = make_store()
    other.add("a", 1, Tier.HOST)
    with pytest.raises(ValueError, match="already has an object"):
        other.add("a", 1, Tier.HOST)
    with pytest.raises(RuntimeError, match="open already"):
        store.add("late", 1, Tier.HOST)
    with pytest.raises(RuntimeError, match="open already"):
        store.open()


def test_host_objects_are_in_place_and_counted(make_store: MakeStore, pool: MemoryPool) -> None:
    store = make_store()
    stored = store.add("weights", 1000, Tier.HOST)
    store.add("state", 1000, Tier.NVME)
    assert store.bytes_by_tier() == {Tier.DEVICE: 0, Tier.HOST: 1000, Tier.NVME: PAGE}
    assert stored.buffer is None
    store.open()
    assert stored.residency is Residency.IN_PLACE
    assert stored.buffer is not None
    assert stored.buffer.view(torch.float32, 250).numel() == 250
    assert pool.used == PAGE
    store.close()
    store.close()
    assert pool.used == 0


def test_without_nvme_objects_no_directory_is_touched(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(nvme_paths=[tmp_path / "nowhere"])
    store.add("weights", 1000, Tier.HOST)
    store.open()
    assert store.file is None
    store.close()


def test_what_cannot_fit_is_refused_before_anything_is_taken(
    make_store: MakeStore, pool: MemoryPool, tmp_path: Path
) -> None:
    drive = tmp_path / "drive0"

    def refused(error: type[ConfigError], text: str, host: int, nvme: int, **changes: object) -> ConfigError:
        store = make_store(**changes)
        store.add("weights", host, Tier.HOST)
        store.add("state", nvme, Tier.NVME)
        with pytest.raises(error, match=text) as caught:
            store.open()
        assert pool.used == 0
        assert list(drive.iterdir()) == []
        return caught.value

    small = MemoryPool(Tier.HOST, 3 * PAGE, HostAllocator())
    small.allocate(PAGE, "something else")
    error = refused(
        BudgetError, r"tiers\.host: 12,288 bytes .* but 8,192 are free", 3 * PAGE, 1, pools={Tier.HOST: small}
    )
    assert isinstance(error, BudgetError)
    assert error.missing == PAGE
    error = refused(BudgetError, r"tiers\.nvme_limit: 8,192 .* limit is 4,096", 1, PAGE + 1, nvme_limit=PAGE)
    assert isinstance(error, BudgetError)
    assert error.missing == PAGE
    refused(ConfigError, r"tiers\.nvme: .*no path is given; set tiers\.nvme", 1, 1, nvme_paths=[])
    refused(ConfigError, r"tiers\.nvme: .*does not exist", 1, 1, nvme_paths=[tmp_path / "nowhere"])
    refused(ConfigError, r"tiers\.host: .*no budget", 1, 1, pools={})
    refused(BudgetError, r"tiers\.nvme: .* bytes free, but [\d,]+ are needed", 1, 1 << 60)


def test_closing_the_store_empties_the_paths_even_while_something_is_read(
    make_store: MakeStore, pool: MemoryPool, tmp_path: Path
) -> None:
    case = Case(make_store(2), pool, (4 * BLOCK,))
    entered, go_on = threading.Event(), threading.Event()

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        entered.set()
        assert go_on.wait(60)

    case.engine.fault = fault
    reading = case.engine.submit(case.store.page_in(case.objects, case.memory, Priority.DEMAND))
    assert entered.wait(60)
    closing = threading.Thread(target=case.store.close)
    closing.start()
    assert any(tmp_path.rglob("state.tier"))
    go_on.set()
    closing.join(60)
    assert reading.exception(60) is None or isinstance(reading.exception(), TierError)
    assert [path for path in tmp_path.rglob("*") if path.parent != tmp_path] == []


def test_a_cancelled_page_in_gives_the_memory_back_only_when_nothing_writes_to_it(
    make_store: MakeStore, pool: MemoryPool
) -> None:
    """Two strangers, so two requests; both are in the middle of a system call."""
    case = Case(make_store(), pool, (PAGE, PAGE, PAGE))
    case.write_all()
    first, _, third = case.objects
    entered, go_on = threading.Semaphore(0), threading.Event()

    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        entered.release()
        assert go_on.wait(60)

    case.engine.fault = fault

    async def scenario() -> None:
        task = asyncio.ensure_future(case.store.page_in([first, third], case.memory, Priority.DEMAND))
        await case.engine.call(lambda: [entered.acquire(timeout=60) for _ in range(2)])
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        assert {first.residency, third.residency} == {Residency.PAGING_IN}
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {first.residency, third.residency} == {Residency.AT_HOME}

    case.engine.run(scenario())
    case.engine.fault = None
    case.check(case.objects)


def test_two_stores_of_one_process_share_a_path(make_store: MakeStore, pool: MemoryPool) -> None:
    cases = [Case(make_store(), pool, (BLOCK + index,)) for index in range(2)]
    for case in cases:
        case.write_all()
    for case in cases:
        case.check(case.objects)


def test_many_leases_at_once(engine: IoEngine, make_store: MakeStore, pool: MemoryPool) -> None:
    """Tiles go round page-in, change and page-out beside each other, within a budget of a few buffers."""
    store = make_store(3, verify=True)
    tiles = [store.add(f"tile{index}", BLOCK + 100 * index, Tier.NVME) for index in range(12)]
    store.open()
    staging = MemoryPool(Tier.HOST, 5 * 2 * BLOCK, HostAllocator(), poison=True)

    async def visit(stored: StoredObject, step: int) -> None:
        buffer = await staging.acquire(2 * BLOCK)
        values = buffer.tensor[: stored.nbytes]
        if step == 0:
            values.zero_()
            await store.write([stored], buffer.memory(0, buffer.capacity), Priority.WRITE_BACK)
        else:
            lease = await store.page_in([stored], buffer.memory(0, buffer.capacity), Priority.PREFETCH)
            lease.mark_dirty()
            await engine.call(values.add_, 1)
            assert bool((values == step).all())
            await store.page_out(lease, Priority.WRITE_BACK)
        staging.release(buffer)

    async def scenario() -> None:
        for step in range(6):
            await asyncio.gather(*(visit(stored, step) for stored in tiles))

    engine.run(scenario())
    assert staging.peak == staging.capacity
    staging.close()
