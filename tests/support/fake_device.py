"""A compute device without hardware, as strict about order as a real one.

Its memory is its own: copies are made later, by a thread per direction, after random sleeps; until a copy has ended
its destination holds NaN. Memory that is freed is filled with NaN. Compute itself is PyTorch on the CPU, on the
thread that issues it, so whoever forgets a `wait`, or reuses memory before `Event.synchronize`, computes with NaN.
Host code that touches device memory, and copies that run the wrong way, raise at once.
"""

from __future__ import annotations

import bisect
import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from tierzero.runtime.device import Allocator, Event
from tierzero.tiers import HostAllocator

_DEADLINE_S = 30.0


class FakeEvent:
    """Done once the stream that it belongs to has come to it. ``blind`` makes `synchronize` return at once."""

    def __init__(self, blind: bool = False) -> None:
        self._done = threading.Event()
        self._blind = blind

    def synchronize(self) -> None:
        if not self._blind:
            self.wait()

    def wait(self) -> None:
        if not self._done.wait(_DEADLINE_S):
            raise TimeoutError("an event of the fake device was never reached: its stream waits for itself")

    def pass_(self) -> None:
        self._done.set()


class _Stream:
    """Work in order, on a thread of its own, each piece after a random sleep."""

    def __init__(self, name: str, rng: random.Random, longest_s: float) -> None:
        self._work: queue.SimpleQueue[tuple[FakeEvent, Callable[[], None]] | None] = queue.SimpleQueue()
        self._rng = rng
        self._longest_s = longest_s
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def push(self, event: FakeEvent, work: Callable[[], None]) -> None:
        self._work.put((event, work))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(_DEADLINE_S)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            event, work = item
            try:
                work()
            except BaseException as error:
                self.failure = self.failure or error
            event.pass_()

    def pause(self) -> None:
        if self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0, self._longest_s))


class _FakeMemory:
    """Device memory: the host has no business in it."""

    addressable = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, torch.Tensor] = {}
        self._starts: list[int] = []

    def allocate(self, capacity: int) -> torch.Tensor:
        tensor = torch.full((capacity,), 0xFF, dtype=torch.uint8)
        with self._lock:
            self._blocks[tensor.data_ptr()] = tensor
            bisect.insort(self._starts, tensor.data_ptr())
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        # The block itself is kept, as NaN, so that its address is never the host's.
        tensor.fill_(0xFF)

    def vacate(self, tensor: torch.Tensor) -> None:
        tensor.fill_(0xFF)

    def occupy(self, tensor: torch.Tensor) -> None:
        tensor.fill_(0xFF)

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return False
            start = self._starts[at]
            return address < start + self._blocks[start].numel()


class FakeDevice:
    """See the module's docstring. ``forget_waits`` and ``forget_synchronize`` make it lose just that ordering, which
    any test worth having must notice.
    """

    torch_device = torch.device("cpu")
    is_host = False

    def __init__(
        self,
        seed: int = 0,
        longest_s: float = 0.005,
        *,
        forget_waits: bool = False,
        forget_synchronize: bool = False,
    ) -> None:
        self.memory = _FakeMemory()
        self.copies = 0
        self._forget_waits = forget_waits
        self._forget_synchronize = forget_synchronize
        self._streams = {
            name: _Stream(f"fake-{name}", random.Random(f"{seed}-{name}"), longest_s)
            for name in ("compute", "in", "out")
        }

    def device_allocator(self) -> Allocator:
        return self.memory

    def host_allocator(self) -> HostAllocator:
        return HostAllocator()

    def now(self) -> Event:
        """Compute issued so far is done when this returns, but as on a real device nobody may count on it."""
        event = self._event()
        stream = self._streams["compute"]
        stream.push(event, lambda: None)
        return event

    def wait(self, event: Event) -> None:
        if self._forget_waits:
            return
        assert isinstance(event, FakeEvent), f"{event} belongs to another device"
        event.wait()

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        assert self.memory.owns(dst), "copy_in must end in device memory"
        return self._copy("in", dst, src, after)

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        assert self.memory.owns(src), "copy_out must start from device memory"
        return self._copy("out", dst, src, after)

    def lane(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def synchronize(self) -> None:
        for stream in self._streams.values():
            event = FakeEvent()
            stream.push(event, lambda: None)
            event.wait()

    def give_back(self) -> None:
        return

    def close(self) -> None:
        """Ends the streams; raises what failed in them."""
        for stream in self._streams.values():
            stream.close()
            if stream.failure is not None:
                raise stream.failure

    def _event(self) -> FakeEvent:
        return FakeEvent(blind=self._forget_synchronize)

    def _copy(self, direction: str, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        assert isinstance(after, FakeEvent), f"{after} belongs to another device"
        assert dst.dtype == src.dtype, "a copy between memories does not convert"
        assert dst.shape == src.shape, "a copy between memories does not broadcast"
        # The raw memory: the tensors' own storage may be given back while the copy is under way, as on a real device.
        to, source = dst.detach().view(torch.uint8), src.detach().view(torch.uint8)
        event, stream = self._event(), self._streams[direction]
        self.copies += 1

        def work() -> None:
            after.wait()
            to.fill_(0xFF)
            stream.pause()
            to.copy_(source)

        stream.push(event, work)
        return event
