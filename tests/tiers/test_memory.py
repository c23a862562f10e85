"""Pools keep their budget under any concurrent use; buffers are aligned, poisoned when asked, and released once."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.errors import BudgetError, ConfigError, TierError
from tierzero.tiers import PAGE, HostAllocator, IoEngine, MemoryPool, Tier, page_round


class CountingAllocator:
    """Counts live bytes for real, apart from the pool's own books."""

    addressable = True

    def __init__(self) -> None:
        self.live: dict[int, torch.Tensor] = {}
        self.vacant: dict[int, torch.Tensor] = {}
        self.most = 0

    def allocate(self, capacity: int) -> torch.Tensor:
        tensor = torch.empty(capacity, dtype=torch.uint8)
        self.live[id(tensor)] = tensor
        self.most = max(self.most, sum(t.numel() for t in self.live.values()))
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        del (self.vacant if id(tensor) in self.vacant else self.live)[id(tensor)]

    def vacate(self, tensor: torch.Tensor) -> None:
        self.vacant[id(tensor)] = self.live.pop(id(tensor))

    def occupy(self, tensor: torch.Tensor) -> None:
        self.live[id(tensor)] = self.vacant.pop(id(tensor))


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that a tensor lies in which are in physical memory."""
    address = tensor.data_ptr()
    inside = False
    total = 0
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head and ":" not in head:
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start < address + tensor.numel() and end > address
            elif inside and head == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_sizes_round_up_to_pages(nbytes: int, rounded: int) -> None:
    assert page_round(nbytes) == rounded


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        page_round(-1)


@pytest.mark.parametrize("capacity", [PAGE, 2 << 20, (2 << 20) + PAGE, 5 << 20])
def test_host_memory_is_aligned_and_returned(capacity: int) -> None:
    allocator = HostAllocator()
    tensor = allocator.allocate(capacity)
    assert tensor.numel() == capacity
    assert tensor.data_ptr() % (2 << 20 if capacity >= 2 << 20 else PAGE) == 0
    assert int(tensor.count_nonzero()) == 0
    tensor.fill_(7)
    before = resident_bytes(tensor)
    assert before >= capacity
    view = tensor[:PAGE]
    allocator.free(tensor)
    assert resident_bytes(tensor) <= before - capacity
    assert int(view.count_nonzero()) == 0  # the view is still valid memory


def test_host_memory_that_is_vacated_keeps_its_address() -> None:
    locked: list[int] = []
    allocator = HostAllocator(lambda t: locked.append(t.data_ptr()), lambda t: locked.remove(t.data_ptr()))
    tensor = allocator.allocate(4 << 20)
    view = tensor[PAGE : 2 * PAGE]
    tensor.fill_(7)
    before = resident_bytes(tensor)
    allocator.vacate(tensor)
    assert locked == []
    assert resident_bytes(tensor) <= before - (4 << 20)
    allocator.occupy(tensor)
    assert locked == [tensor.data_ptr()]
    tensor.fill_(9)
    assert int((view == 9).sum()) == PAGE
    allocator.vacate(tensor)
    allocator.free(tensor)
    assert locked == []


def test_vacated_buffers_count_no_more() -> None:
    memory = CountingAllocator()
    pool = MemoryPool(Tier.HOST, 3 * PAGE, memory)
    kept, cached = pool.allocate(2 * PAGE, "kept"), pool.allocate(PAGE, "cached")
    pool.release(cached)
    pool.vacate(kept)
    pool.vacate(kept)
    pool.trim()
    assert (pool.used, pool.cached, len(memory.live)) == (0, 0, 0)
    taken = pool.allocate(2 * PAGE, "somebody else")
    with pytest.raises(BudgetError, match="a buffer that comes back needs 8,192 bytes, but 4,096"):
        pool.occupy(kept)
    pool.release(taken)
    pool.occupy(kept)
    pool.occupy(kept)
    assert pool.used == 2 * PAGE
    pool.vacate(kept)
    pool.close()
    pool.release(kept)
    assert (pool.used, len(memory.live), len(memory.vacant)) == (0, 0, 0)


def test_freeing_twice_is_refused() -> None:
    allocator = HostAllocator()
    tensor = allocator.allocate(PAGE)
    allocator.free(tensor)
    with pytest.raises(RuntimeError, match="freed before"):
        allocator.free(tensor)


def test_page_locking_pairs_up_and_its_failure_warns_once() -> None:
    locked: list[int] = []
    allocator = HostAllocator(lambda t: locked.append(t.data_ptr()), lambda t: locked.remove(t.data_ptr()))
    tensor = allocator.allocate(PAGE)
    assert locked == [tensor.data_ptr()]
    allocator.free(tensor)
    assert locked == []

    def refuse(tensor: torch.Tensor) -> None:
        raise OSError("no more locked memory")

    failing = HostAllocator(refuse, lambda t: pytest.fail("was never locked"))
    with pytest.warns(RuntimeWarning, match="no more locked memory") as caught:
        tensors = [failing.allocate(PAGE) for _ in range(2)]
    assert len(caught) == 1
    for tensor in tensors:
        failing.free(tensor)


def test_a_buffer_gives_views_and_bytes_of_the_same_memory(pool: MemoryPool) -> None:
    buffer = pool.allocate(100, "test")
    assert (buffer.nbytes, buffer.capacity) == (100, PAGE)
    buffer.view(torch.float32, 3, 8).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert list(buffer.memory(8, 12).cast("f")) == [1.0, 2.0, 3.0]
    buffer.memory(0, 1)[0] = 200
    assert int(buffer.tensor[0]) == 200
    with pytest.raises(ValueError, match="outside"):
        buffer.view(torch.float32, 1, PAGE - 2)
    with pytest.raises(ValueError, match="outside"):
        buffer.memory(PAGE, 1)
    pool.release(buffer)


def test_memory_without_a_host_address_gives_no_bytes() -> None:
    class MetaAllocator:
        addressable = False

        def allocate(self, capacity: int) -> torch.Tensor:
            return torch.empty(capacity, dtype=torch.uint8, device="meta")

        def free(self, tensor: torch.Tensor) -> None:
            return

        vacate = occupy = free

    buffer = MemoryPool(Tier.DEVICE, PAGE, MetaAllocator()).allocate(1, "test")
    with pytest.raises(RuntimeError, match="no host address"):
        buffer.memory(0, 1)


def test_the_error_names_the_key_and_the_missing_bytes() -> None:
    pool = MemoryPool(Tier.HOST, 3 * PAGE, CountingAllocator())
    pool.allocate(PAGE, "first")
    with pytest.raises(BudgetError, match=r"tiers\.host: the second needs 12,288 bytes, but 8,192 .*12,288") as caught:
        pool.allocate(3 * PAGE, "the second")
    assert caught.value.missing == PAGE
    assert isinstance(caught.value, ConfigError)
    assert pool.try_allocate(3 * PAGE) is None


def test_released_memory_is_reused_and_gives_way_to_other_sizes_largest_first() -> None:
    allocator = CountingAllocator()
    pool = MemoryPool(Tier.HOST, 6 * PAGE, allocator)
    buffers = [pool.allocate(pages * PAGE, "test") for pages in (1, 2, 3)]
    addresses = [buffer.tensor.data_ptr() for buffer in buffers]
    for buffer in buffers:
        pool.release(buffer)
    assert (pool.used, pool.cached, pool.peak) == (0, 6 * PAGE, 6 * PAGE)
    again = pool.allocate(2 * PAGE, "test")
    assert again.tensor.data_ptr() == addresses[1]
    pool.allocate(4 * PAGE, "test")  # needs the room of the cached 3 pages, and of the 1
    assert (pool.used, pool.cached) == (6 * PAGE, 0)
    assert allocator.most == 6 * PAGE


def test_a_second_release_and_a_use_after_release_raise(pool: MemoryPool) -> None:
    buffer = pool.allocate(10, "test")
    pool.release(buffer)
    with pytest.raises(RuntimeError, match="after it was released"):
        pool.release(buffer)
    with pytest.raises(RuntimeError, match="after it was released"):
        buffer.view(torch.uint8, 1)
    assert pool.used == 0


def test_a_buffer_goes_back_to_its_own_pool_only(pool: MemoryPool) -> None:
    other = MemoryPool(Tier.HOST, PAGE, HostAllocator())
    with pytest.raises(RuntimeError, match="did not come from"):
        other.release(pool.allocate(10, "test"))


def test_poison_is_nan_before_and_after_use() -> None:
    pool = MemoryPool(Tier.HOST, PAGE, HostAllocator(), poison=True)
    buffer = pool.allocate(PAGE, "test")
    views = [buffer.view(dtype, 16) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    assert all(bool(view.isnan().all()) for view in views)
    buffer.tensor.zero_()
    pool.release(buffer)
    assert all(bool(view.isnan().all()) for view in views)


def test_an_empty_buffer_costs_nothing(pool: MemoryPool) -> None:
    buffer = pool.allocate(0, "nothing")
    assert (pool.used, buffer.capacity, buffer.view(torch.float32, 0).numel()) == (0, 0, 0)
    pool.release(buffer)
    assert pool.cached == 0


def run(coro: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coro, 60))


def test_waiters_are_served_in_order_even_when_a_later_one_would_fit() -> None:
    pool = MemoryPool(Tier.HOST, 4 * PAGE, CountingAllocator())

    async def scenario() -> None:
        held = [pool.allocate(PAGE, "test") for _ in range(4)]
        served: list[int] = []

        async def wait_for(pages: int) -> None:
            await pool.acquire(pages * PAGE)
            served.append(pages)

        tasks = []
        for pages in (3, 1):
            tasks.append(asyncio.ensure_future(wait_for(pages)))
            await asyncio.sleep(0)
        pool.release(held.pop())
        await asyncio.sleep(0.01)
        assert served == []  # one page is free, but the first in line needs three
        assert pool.try_allocate(PAGE) is None
        for buffer in held:
            pool.release(buffer)
        await asyncio.gather(*tasks)
        assert served == [3, 1]

    run(scenario())


def test_a_release_on_another_thread_wakes_a_waiter(engine: IoEngine) -> None:
    pool = MemoryPool(Tier.HOST, PAGE, CountingAllocator())
    held = pool.allocate(PAGE, "test")
    waiting = engine.submit(pool.acquire(PAGE))
    threading.Thread(target=pool.release, args=(held,)).start()
    assert waiting.result(60).capacity == PAGE


def test_a_waiter_that_can_never_be_served_fails_at_once(engine: IoEngine) -> None:
    pool = MemoryPool(Tier.HOST, PAGE, CountingAllocator())
    with pytest.raises(BudgetError, match=r"tiers\.host"):
        engine.run(pool.acquire(PAGE + 1))


def test_a_cancelled_waiter_loses_no_memory_and_lets_the_next_one_pass() -> None:
    pool = MemoryPool(Tier.HOST, 2 * PAGE, CountingAllocator())

    async def scenario() -> None:
        held = [pool.allocate(PAGE, "test") for _ in range(2)]
        first = asyncio.ensure_future(pool.acquire(2 * PAGE))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(pool.acquire(PAGE))
        await asyncio.sleep(0)
        pool.release(held.pop())
        first.cancel()
        buffer = await second
        with pytest.raises(asyncio.CancelledError):
            await first
        # Granted and cancelled before it could run on.
        third = asyncio.ensure_future(pool.acquire(PAGE))
        await asyncio.sleep(0)
        pool.release(buffer)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        await asyncio.sleep(0)
        assert pool.used == PAGE

    run(scenario())


def test_closing_fails_the_waiters_and_frees_the_memory() -> None:
    allocator = CountingAllocator()
    pool = MemoryPool(Tier.HOST, 2 * PAGE, allocator)

    async def scenario() -> None:
        held = pool.allocate(PAGE, "test")
        pool.release(pool.allocate(PAGE, "test"))
        waiting = asyncio.ensure_future(pool.acquire(2 * PAGE))
        await asyncio.sleep(0)
        pool.close()
        pool.close()
        with pytest.raises(TierError, match="closed"):
            await waiting
        assert len(allocator.live) == 1
        pool.release(held)
        assert not allocator.live
        with pytest.raises(TierError, match="closed"):
            pool.allocate(1, "test")

    run(scenario())


def test_memory_that_the_system_refuses_is_an_error_of_the_waiter_not_of_the_releaser() -> None:
    class Refusing(CountingAllocator):
        def allocate(self, capacity: int) -> torch.Tensor:
            if capacity == 2 * PAGE:
                raise BudgetError("the system refused")
            return super().allocate(capacity)

    pool = MemoryPool(Tier.HOST, 2 * PAGE, Refusing())

    async def scenario() -> None:
        held = pool.allocate(PAGE, "test")
        waiting = asyncio.ensure_future(pool.acquire(2 * PAGE))
        await asyncio.sleep(0)
        pool.release(held)
        with pytest.raises(BudgetError, match="refused"):
            await waiting
        assert pool.used == 0

    run(scenario())


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 12 * PAGE), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
)
def test_concurrent_use_never_exceeds_the_budget(capacity: int, sizes: list[int], seed: int) -> None:
    """Threads and coroutines at once; the allocator counts what is really held, cached memory included."""
    allocator = CountingAllocator()
    pool = MemoryPool(Tier.HOST, capacity * PAGE, allocator, poison=True)
    fitting = [size for size in sizes if page_round(size) <= pool.capacity]

    async def borrow(size: int) -> None:
        buffer = await pool.acquire(size)
        buffer.tensor.fill_(1)
        await asyncio.sleep(0)
        assert bool((buffer.tensor == 1).all())
        pool.release(buffer)

    async def borrow_all() -> None:
        await asyncio.gather(*(borrow(size) for size in fitting))

    def take_now() -> None:
        draw = random.Random(seed)
        for size in draw.sample(sizes, len(sizes)):
            buffer = pool.try_allocate(size)
            if buffer is not None:
                buffer.tensor.fill_(2)
                time.sleep(0)
                assert bool((buffer.tensor == 2).all())
                pool.release(buffer)

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            take_now()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(2)]
    for thread in threads:
        thread.start()
    run(borrow_all())
    for thread in threads:
        thread.join()
    assert not errors
    assert allocator.most <= pool.capacity
    assert pool.used == 0
    assert pool.cached == sum(tensor.numel() for tensor in allocator.live.values())
    pool.close()
    assert not allocator.live


def test_a_usual_allocation_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostAllocator().allocate(4 << 20)


def test_a_forked_process_has_no_share_of_it() -> None:
    """Else its being there would double what the parent writes to."""
    allocator = HostAllocator()
    memory = allocator.allocate(4 << 20)
    start = memory.data_ptr()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        os.write(writer, b"%d" % any(int(low, 16) <= start < int(high, 16) for low, high in ranges))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"0"
    os.close(reader)
    os.close(writer)
    allocator.free(memory)
