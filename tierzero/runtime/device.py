"""The surface through which the runtime sees a compute device: memory, copies between host and device, and their order.

Three implementations share it: `CpuDevice`, where the device tier is host memory and everything is in order by
itself, `CudaDevice` (ROCm builds alike), and the tests' fake device, which delays copies and poisons freed memory to
expose missing ordering.

Ordering rules, for all of them:

- ``copy_in(dst, src, after)`` starts once ``after`` (an event on the compute stream) has passed, and returns an
event. Compute that reads
  ``dst`` calls ``wait(event)`` first; the host may reuse ``src`` only after ``event.synchronize()``.
- ``copy_out(dst, src, after)`` is the same towards the host; the host reads ``dst`` only after
``event.synchronize()``, and ``src``
  may be overwritten by compute only after ``wait(event)``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import torch

from tierzero.errors import BudgetError
from tierzero.tiers import HostAllocator


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the work before the event is done."""


class Allocator(Protocol):
    """Gives and takes back raw memory as 1-D uint8 tensors."""

    addressable: bool

    def allocate(self, capacity: int) -> torch.Tensor: ...

    def free(self, tensor: torch.Tensor) -> None: ...

    def vacate(self, tensor: torch.Tensor) -> None: ...

    def occupy(self, tensor: torch.Tensor) -> None: ...


class Device(Protocol):
    """What the runtime needs of a compute device. ``is_host``: its memory is host memory, so nothing need be copied
    to it.
    """

    torch_device: torch.device
    is_host: bool

    def device_allocator(self) -> Allocator: ...

    def host_allocator(self) -> HostAllocator: ...

    def now(self) -> Event:
        """An event behind the compute issued so far."""

    def wait(self, event: Event) -> None:
        """Compute issued from now on runs after ``event``."""

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event: ...

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event: ...

    def lane(self) -> Callable[[], AbstractContextManager[object]]:
        """For a thread's work in an order of its own: each block under what this gives is ordered after the one before
        it, and against all else by events only.
        """

    def synchronize(self) -> None: ...

    def give_back(self) -> None:
        """Memory that nothing uses any more goes back to the device, for other processes to take."""


class PassedEvent:
    """An event of a device whose work is done when the call returns."""

    def synchronize(self) -> None:
        return


PASSED = PassedEvent()


class CpuDevice:
    """Compute in host memory: copies are plain copies, done when the call returns."""

    torch_device = torch.device("cpu")
    is_host = True

    def device_allocator(self) -> Allocator:
        return HostAllocator()

    def host_allocator(self) -> HostAllocator:
        return HostAllocator()

    def now(self) -> Event:
        return PASSED

    def wait(self, event: Event) -> None:
        event.synchronize()

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        dst.copy_(src)
        return PASSED

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        dst.copy_(src)
        return PASSED

    def lane(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def synchronize(self) -> None:
        return

    def give_back(self) -> None:
        return


class CudaAllocator:
    """Device memory from PyTorch's caching allocator, so that the model's activations and the tiers share one pool of
    it.
    """

    addressable = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, capacity: int) -> torch.Tensor:
        return torch.empty(capacity, dtype=torch.uint8, device=self._device)

    def free(self, tensor: torch.Tensor) -> None:
        return

    # Views share the storage, so they follow it to its new address.

    def vacate(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    def occupy(self, tensor: torch.Tensor) -> None:
        try:
            tensor.untyped_storage().resize_(tensor.numel())
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"tiers.device: {tensor.numel():,} bytes cannot come back to {self._device}, whose memory others use; "
                "free some of it and call tierzero.reload again",
                tensor.numel(),
            ) from error


class CudaDevice:
    """A CUDA or ROCm GPU: one stream for each copy direction, beside the stream that the model computes on."""

    is_host = False

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._in = torch.cuda.Stream(self.torch_device)
        self._out = torch.cuda.Stream(self.torch_device)

    def device_allocator(self) -> Allocator:
        return CudaAllocator(self.torch_device)

    def host_allocator(self) -> HostAllocator:
        return HostAllocator(register=self._page_lock, unregister=self._page_unlock)

    def now(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.torch_device).wait_event(event)
        else:
            event.synchronize()

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        return self._copy(self._in, dst, src, after)

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        return self._copy(self._out, dst, src, after)

    def lane(self) -> Callable[[], AbstractContextManager[object]]:
        # Never the default stream: a collective on it would hold up all that any thread issues after it, and two ranks
        # that issue two collectives in different orders would wait for each other for ever.
        stream = torch.cuda.Stream(self.torch_device)
        return lambda: torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def give_back(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    # The current device belongs to the thread, and any thread may allocate.

    def _page_lock(self, tensor: torch.Tensor) -> None:
        with torch.cuda.device(self.torch_device):
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
            if code == 0:
                return
            with suppress(RuntimeError):
                torch.zeros(
                    1, device=self.torch_device
                )  # takes the error, which a later kernel would report as its own
        raise OSError(f"cudaHostRegister failed with code {code}")

    def _page_unlock(self, tensor: torch.Tensor) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def _copy(self, stream: torch.cuda.Stream, dst: torch.Tensor, src: torch.Tensor, after: Event) -> Event:
        if isinstance(after, torch.cuda.Event):
            stream.wait_event(after)
        else:
            after.synchronize()
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
        # The caching allocator must not hand the device side out again before this stream is done with it.
        (dst if dst.is_cuda else src).record_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
        return done


def choose_device(local_rank: int) -> Device:
    """A GPU where PyTorch sees one (``CUDA_VISIBLE_DEVICES=`` hides them), else the CPU."""
    if not torch.cuda.is_available():
        return CpuDevice()
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return CudaDevice(index)
