"""Raw memory in whole pages, as the pools take it: where it comes from and how it goes back."""

from __future__ import annotations

import contextlib
import mmap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tierzero.errors import BudgetError

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

    def vacate(self, tensor: torch.Tensor) -> None:
        """Gives the memory behind a tensor back to the system and loses its contents; the tensor and all views of it
        stay, and must not be touched before `occupy`.
        """

    def occupy(self, tensor: torch.Tensor) -> None:
        """Puts memory behind a vacated tensor again, of any contents. Raises BudgetError where there is none."""


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

    def vacate(self, tensor: torch.Tensor) -> None:
        """Pages go back to the kernel; the address range stays."""
        mapping = self._mappings[tensor.data_ptr()]
        if mapping.registered and self._unregister is not None:
            self._unregister(tensor)  # a device must not hold pages that the kernel takes back
        mapping.memory.madvise(mmap.MADV_DONTNEED)
        self._mappings[tensor.data_ptr()] = _Mapping(mapping.memory, mapping.start, False)

    def occupy(self, tensor: torch.Tensor) -> None:
        """The pages come with the first touch, zeroed."""
        mapping = self._mappings[tensor.data_ptr()]
        registered = self._try_register(tensor)
        self._mappings[tensor.data_ptr()] = _Mapping(mapping.memory, mapping.start, registered)

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
