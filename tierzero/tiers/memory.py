"""Memory with a byte budget: page-aligned buffers, and pools that never hold more than they may."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tierzero.errors import BudgetError, TierError
from tierzero.tiers.tier import Tier

PAGE = 4096
"""Unit of alignment and of sizes, in bytes: what O_DIRECT needs on every common file system."""

_HUGE_PAGE = 2 << 20


def page_round(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, in bytes."""
    if nbytes < 0:
        raise ValueError(f"a size in bytes cannot be negative, got {nbytes}")
    return -(-nbytes // PAGE) * PAGE


class Allocator(Protocol):
    """Gives and takes back raw memory. ``addressable``: the host can read, write and do I/O in it."""

    addressable: bool

    def allocate(self, capacity: int) -> torch.Tensor:
        """1-D uint8 of ``capacity`` bytes (whole pages, at least one), page-aligned where addressable."""

    def free(self, tensor: torch.Tensor) -> None:
        """Takes back a tensor that `allocate` returned."""


class Buffer:
    """Bytes taken from a `MemoryPool`, until they are released to it.

    ``nbytes`` is what was asked for, ``capacity`` that in whole pages; both in bytes.
    """

    def __init__(self, nbytes: int, tensor: torch.Tensor, pool: MemoryPool) -> None:
        self.nbytes = nbytes
        self.capacity = tensor.numel()
        self._tensor: torch.Tensor | None = tensor
        self._pool = pool
        self._bytes: memoryview | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """1-D uint8 over the whole capacity. Raises RuntimeError after the release."""
        if self._tensor is None:
            raise RuntimeError(f"a buffer of {self.nbytes} bytes is used after it was released")
        return self._tensor

    def view(self, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """1-D tensor of ``numel`` elements, ``offset_bytes`` into the buffer (a multiple of the itemsize)."""
        end = offset_bytes + numel * dtype.itemsize
        if offset_bytes < 0 or numel < 0 or end > self.capacity:
            raise ValueError(f"bytes {offset_bytes} to {end} lie outside a buffer of {self.capacity} bytes")
        return self.tensor[offset_bytes:end].view(dtype)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes ``[offset, offset + nbytes)``; host memory only (RuntimeError otherwise)."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside a buffer of {self.capacity} bytes")
        if self.tensor.device.type != "cpu":
            raise RuntimeError(f"memory on {self.tensor.device} has no host address; copy it to a host buffer first")
        if self._bytes is None:
            self._bytes = self.tensor.numpy().data
        return self._bytes[offset : offset + nbytes]

    def _give_up(self) -> torch.Tensor:
        tensor = self.tensor
        self._tensor = self._bytes = None
        return tensor


@dataclass(frozen=True)
class _Mapping:
    memory: mmap.mmap
    start: int
    registered: bool


class HostAllocator:
    """Anonymous memory straight from the kernel, on huge pages where they fit.

    Scattered 4 KiB pages cut a request at the drive's segment limit and cost up to half of the transfer rate; huge
    pages do not. ``register`` (page-locking for a GPU) may fail with any OSError or RuntimeError: the memory is then
    used pageable, and one warning says so.
    """

    addressable = True

    def __init__(
        self,
        register: Callable[[torch.Tensor], None] | None = None,
        unregister: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._mappings: dict[int, _Mapping] = {}
        self._warned = False

    def allocate(self, capacity: int) -> torch.Tensor:
        """1-D uint8 of ``capacity`` bytes, zeroed, page-aligned (2 MiB-aligned from 2 MiB on)."""
        memory, start = _map_aligned(capacity)
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=capacity, offset=start)
        self._mappings[tensor.data_ptr()] = _Mapping(memory, start, self._try_register(tensor))
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Returns the pages to the kernel at once, even while a view of them is alive (it then reads zeros)."""
        mapping = self._mappings.pop(tensor.data_ptr(), None)
        if mapping is None:
            raise RuntimeError("this memory did not come from this allocator, or was freed before")
        if mapping.registered and self._unregister is not None:
            self._unregister(tensor)
        # The address range itself goes when the last tensor over it does: the tensor pins the mapping.
        mapping.memory.madvise(mmap.MADV_DONTNEED)

    def _try_register(self, tensor: torch.Tensor) -> bool:
        if self._register is None:
            return False
        try:
            self._register(tensor)
        except (OSError, RuntimeError) as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"host memory could not be page-locked ({error}); copies to the device will be slower. "
                    "Raise the limit of locked memory (ulimit -l) to lock it.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return False
        return True


def _map_aligned(capacity: int) -> tuple[mmap.mmap, int]:
    """An anonymous private mapping and the offset in it at which ``capacity`` aligned bytes start."""
    memory = _map(capacity)
    if capacity < _HUGE_PAGE:
        return memory, 0
    start = -_address(memory) % _HUGE_PAGE
    if start:
        memory = _map(capacity + _HUGE_PAGE)
        start = -_address(memory) % _HUGE_PAGE
    # Only whole huge pages: one that reached past the capacity would cost memory that no budget counts.
    with contextlib.suppress(OSError):  # a kernel without them: small pages, only slower
        memory.madvise(mmap.MADV_HUGEPAGE, start, capacity // _HUGE_PAGE * _HUGE_PAGE)
    return memory, start


def _map(nbytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"the system refused {nbytes:,} bytes of host memory ({error.strerror}); lower tiers.host", nbytes
        ) from error
    # While a forked process (a DataLoader's worker) shared them, pages would be copied as they are written to, beyond
    # every budget; and the kernel allows no O_DIRECT into pages that a fork may copy at the same time (open(2)).
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


@dataclass(eq=False)
class _Waiter:
    nbytes: int
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[Buffer]


class MemoryPool:
    """Buffers of one tier within ``capacity`` bytes. Safe to use from any thread.

    ``used`` are bytes in buffers that somebody holds, ``cached`` bytes kept for reuse: both count against the capacity,
    and ``used + cached <= capacity`` always. Sizes count in whole pages. With ``poison`` fresh and released buffers are
    filled with 0xFF, which is NaN in every float format: whoever reads too early or too late sees it.
    """

    def __init__(self, tier: Tier, capacity: int, allocator: Allocator, *, poison: bool = False) -> None:
        if capacity < 0:
            raise ValueError(f"a pool's capacity cannot be negative, got {capacity}")
        self.tier = tier
        self.capacity = capacity
        self.used = 0
        self.cached = 0
        self.peak = 0
        """Most bytes ever in use at once."""
        self._allocator = allocator
        self._poison = poison
        self._cache: dict[int, list[torch.Tensor]] = {}
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def free(self) -> int:
        """Bytes that could be allocated now (cached ones give way)."""
        return self.capacity - self.used

    def allocate(self, nbytes: int, what: str) -> Buffer:
        """A buffer for ``what``. Raises BudgetError when there is no room now; takes room ahead of waiting `acquire`
        calls.
        """
        with self._lock:
            buffer = self._take(nbytes)
            free = self.free
        if buffer is None:
            raise self._no_room(nbytes, free, what)
        return self._fresh(buffer)

    def try_allocate(self, nbytes: int) -> Buffer | None:
        """A buffer, or None when there is no room now or others wait for room already."""
        with self._lock:
            buffer = None if self._waiters else self._take(nbytes)
        return None if buffer is None else self._fresh(buffer)

    async def acquire(self, nbytes: int) -> Buffer:
        """A buffer as soon as there is room, first come, first served. Raises BudgetError when there can never be."""
        if page_round(nbytes) > self.capacity:
            raise self._no_room(nbytes, self.free, "a request")
        loop = asyncio.get_running_loop()
        with self._lock:
            buffer = None if self._waiters else self._take(nbytes)
            if buffer is None:
                waiter = _Waiter(nbytes, loop, loop.create_future())
                self._waiters.append(waiter)
        return self._fresh(buffer if buffer is not None else await self._wait(waiter))

    async def _wait(self, waiter: _Waiter) -> Buffer:
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    self._grant()
            # Granted and cancelled in the same turn of the loop: nobody else knows this buffer.
            if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release(waiter.granted.result())
            raise

    def release(self, buffer: Buffer) -> None:
        """Takes a buffer back; nothing may touch its memory any more. Raises RuntimeError on a second release."""
        if buffer._pool is not self:
            raise RuntimeError(f"a buffer of {buffer.nbytes} bytes is released to a pool that it did not come from")
        if self._poison:
            buffer.tensor.fill_(0xFF)
        with self._lock:
            tensor = buffer._give_up()
            self.used -= buffer.capacity
            if buffer.capacity and self._closed:
                self._allocator.free(tensor)
            elif buffer.capacity:
                self.cached += buffer.capacity
                self._cache.setdefault(buffer.capacity, []).append(tensor)
            self._grant()

    def close(self) -> None:
        """Frees what is cached and fails those who wait. Buffers still held are freed at their release. Safe to call
        twice.
        """
        with self._lock:
            self._closed = True
            self._shrink(self.capacity)
            waiters, self._waiters = list(self._waiters), deque()
        for waiter in waiters:
            error = TierError(
                f"the pool of tiers.{self.tier.value} was closed while {waiter.nbytes:,} bytes were waited for"
            )
            _call_on(waiter.loop, _fail, waiter.granted, error)

    def _take(self, nbytes: int) -> Buffer | None:
        """Under the lock: a buffer, or None without room."""
        capacity = page_round(nbytes)
        if self._closed:
            raise TierError(f"the pool of tiers.{self.tier.value} is closed; {nbytes:,} bytes were asked for")
        if self.used + capacity > self.capacity:
            return None
        stack = self._cache.get(capacity)
        if not capacity:
            tensor = torch.empty(0, dtype=torch.uint8)
        elif stack:
            tensor = stack.pop()
            self.cached -= capacity
        else:
            self._shrink(capacity)
            tensor = self._allocator.allocate(capacity)
        self.used += capacity
        self.peak = max(self.peak, self.used)
        assert self.used + self.cached <= self.capacity, f"the pool of tiers.{self.tier.value} exceeds its budget"
        return Buffer(nbytes, tensor, self)

    def _shrink(self, room: int) -> None:
        """Under the lock: frees cached memory, the largest first, until ``room`` more bytes fit (or none is cached)."""
        while self.cached and (self._closed or self.used + self.cached + room > self.capacity):
            largest = max(size for size, stack in self._cache.items() if stack)
            self._allocator.free(self._cache[largest].pop())
            self.cached -= largest

    def _grant(self) -> None:
        """Under the lock: serves waiters in their order, as far as the room goes."""
        while self._waiters:
            try:
                buffer = self._take(self._waiters[0].nbytes)
            except BudgetError as error:
                # The system has less memory than the budget says: the waiter's problem, not the releaser's.
                waiter = self._waiters.popleft()
                _call_on(waiter.loop, _fail, waiter.granted, error)
                continue
            if buffer is None:
                return
            waiter = self._waiters.popleft()
            if not _call_on(waiter.loop, self._hand_over, waiter, buffer):
                self._put_back(buffer)

    def _hand_over(self, waiter: _Waiter, buffer: Buffer) -> None:
        if waiter.granted.done():  # cancelled meanwhile
            self.release(buffer)
        else:
            waiter.granted.set_result(buffer)

    def _put_back(self, buffer: Buffer) -> None:
        """Under the lock: the waiter's event loop is gone."""
        self.used -= buffer.capacity
        if buffer.capacity:
            self.cached += buffer.capacity
            self._cache.setdefault(buffer.capacity, []).append(buffer._give_up())

    def _fresh(self, buffer: Buffer) -> Buffer:
        if self._poison:
            buffer.tensor.fill_(0xFF)
        return buffer

    def _no_room(self, nbytes: int, free: int, what: str) -> BudgetError:
        key, need = f"tiers.{self.tier.value}", page_round(nbytes)
        missing = need - free if need <= self.capacity else need - self.capacity
        return BudgetError(
            f"{key}: {what} needs {need:,} bytes, but {free:,} of the pool's {self.capacity:,} are free; "
            f"raise {key} by {missing:,} bytes or place less there",
            missing,
        )


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> bool:
    """Schedules a call on another thread's event loop; False when that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _fail(granted: asyncio.Future[Buffer], error: Exception) -> None:
    if not granted.done():
        granted.set_exception(error)
