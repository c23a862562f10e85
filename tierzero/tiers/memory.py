"""Memory with a byte budget: page-aligned buffers, and pools that never hold more than they may."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierzero.errors import BudgetError, TierError
from tierzero.tiers.allocator import Allocator, page_round
from tierzero.tiers.tier import Tier


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
        self._vacant = False

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
        if self._poison and not buffer._vacant:
            buffer.tensor.fill_(0xFF)
        with self._lock:
            tensor = buffer._give_up()
            if buffer._vacant:
                self._allocator.free(tensor)
                return
            self.used -= buffer.capacity
            if buffer.capacity and self._closed:
                self._allocator.free(tensor)
            elif buffer.capacity:
                self.cached += buffer.capacity
                self._cache.setdefault(buffer.capacity, []).append(tensor)
            self._grant()

    def vacate(self, buffer: Buffer) -> None:
        """Gives the memory of a buffer that is held back to the system; it counts no more. The buffer, its address and
        views of it stay, and must not be touched before `occupy`.
        """
        with self._lock:
            if buffer.capacity and not buffer._vacant:
                self._allocator.vacate(buffer.tensor)
                self.used -= buffer.capacity
                buffer._vacant = True

    def occupy(self, buffer: Buffer) -> None:
        """Memory for a vacated buffer, of any contents. Raises BudgetError where the system or the budget has none."""
        with self._lock:
            if not buffer._vacant:
                return
            self._shrink(buffer.capacity)
            if self.used + buffer.capacity > self.capacity:
                raise self._no_room(buffer.capacity, self.free, "a buffer that comes back")
            self._allocator.occupy(buffer.tensor)
            self.used += buffer.capacity
            buffer._vacant = False
        self._fresh(buffer)

    def trim(self) -> None:
        """Frees what is cached."""
        with self._lock:
            self._shrink(self.capacity)

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
            tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
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
