"""Stored objects: the state machine of their residency, their extents, and the leases through which they are held."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierzero.errors import TierError
from tierzero.tiers.allocator import page_round
from tierzero.tiers.memory import Buffer
from tierzero.tiers.tier import Tier


class Residency(enum.Enum):
    """Where an object's newest bytes are, and who owns the memory with them.

    =========== ======================================= ==================================================
    state       newest bytes                            memory
    =========== ======================================= ==================================================
    IN_PLACE    in the object's own buffer, for good    the object's (homes on device and host)
    AT_HOME     in the tier file only                   none
    PAGING_IN   in the tier file                        the destination is the engine's: nobody touches it
    RESIDENT    in the tier file and, equal, in memory  the lease holder's
    DIRTY       in memory; the tier file is stale       the lease holder's
    PAGING_OUT  in memory                               the engine's: the holder may read, not write
    =========== ======================================= ==================================================
    """

    IN_PLACE = "in place"
    AT_HOME = "at home"
    PAGING_IN = "paging in"
    RESIDENT = "resident"
    DIRTY = "dirty"
    PAGING_OUT = "paging out"


_LEGAL = {
    Residency.IN_PLACE: frozenset[Residency](),
    Residency.AT_HOME: frozenset({Residency.PAGING_IN, Residency.PAGING_OUT}),
    Residency.PAGING_IN: frozenset({Residency.RESIDENT, Residency.AT_HOME}),
    Residency.RESIDENT: frozenset({Residency.DIRTY, Residency.AT_HOME}),
    Residency.DIRTY: frozenset({Residency.PAGING_OUT}),
    Residency.PAGING_OUT: frozenset({Residency.AT_HOME, Residency.DIRTY}),
}


@dataclass(frozen=True)
class Extent:
    """A byte range in a tier file's logical space: whole pages."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes


About = Callable[[], str] | None
"""Says what is in an object; asked for a message only."""


class StoredObject:
    """``nbytes`` that live in tier ``home``: in ``buffer`` (device, host; set while the store is open) or at ``extent``
    (nvme).

    A twofold object has a second slot in its file, ``spare``; so has every lasting one. Bytes that were sealed are
    never written over: the next ones go to the other slot, which is where ``extent`` then is. What is written to the
    spare slot by itself (`TieredStore.write_spare`) counts once it is adopted.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        home: Tier,
        extent: Extent | None,
        lasting: bool = False,
        about: About = None,
        twofold: bool = False,
    ) -> None:
        self.name = name
        self.about = about
        self.nbytes = nbytes
        self.home = home
        self.extent = extent
        self.lasting = lasting
        self.twofold = lasting or twofold
        self.spare: Extent | None = None
        self.slot = 0
        """Of the two, which one ``extent`` is."""
        self._sealed = False
        self.buffer: Buffer | None = None
        self._residency = Residency.AT_HOME if extent is not None else Residency.IN_PLACE
        self._lease: Lease | None = None
        self._written: asyncio.Future[None] | None = None
        """Pending while PAGING_OUT."""
        self._digest: int | None = None
        self._spare_digest: int | None = None
        self._unread = False
        """Another process wrote it: its checksum is still to be checked."""

    @property
    def residency(self) -> Residency:
        """Where the newest bytes are."""
        return self._residency

    @property
    def target(self) -> Extent | None:
        """Where the next bytes go."""
        return self.spare if self._sealed else self.extent

    def _arrived(self) -> None:
        """The next bytes are where they should go."""
        if self._sealed:
            self._change_slots()

    def _change_slots(self) -> None:
        self.extent, self.spare = self.spare, self.extent
        self.slot, self._sealed = 1 - self.slot, False

    @property
    def spare_is_free(self) -> bool:
        """Nothing that a seal needs lies in the spare slot."""
        return self.twofold and (self._sealed or not self.lasting)

    def _seal(self) -> None:
        self._sealed = True

    def _check(self, to: Residency) -> None:
        if to not in _LEGAL[self._residency]:
            raise RuntimeError(f"{self.name!r} cannot go from {self._residency.name} to {to.name}")

    def _check_unleased(self, action: str) -> None:
        if self._lease is not None:
            raise RuntimeError(
                f"{self.name!r} cannot be the object of {action}: a lease holds it ({self._residency.name})"
            )

    def _move(self, to: Residency) -> None:
        self._check(to)
        self._residency = to

    def _settle(self, to: Residency, error: BaseException | None) -> None:
        """Ends PAGING_OUT and wakes those who wait for its end."""
        self._move(to)
        written, self._written = self._written, None
        if written is None or written.done():
            return
        if error is None:
            written.set_result(None)
            return
        failure = error
        if not isinstance(error, TierError):
            failure = TierError(f"the write of {self.name!r} was given up: {error!r}")
        written.set_exception(failure)
        written.exception()  # with nobody waiting, the writer's own error is the only report


class Lease:
    """The right to the copies of ``objects`` in ``dest``, from `TieredStore.page_in` until `release` or a page-out.

    Object i starts in ``dest`` at the sum of the page-rounded sizes before it.
    """

    def __init__(self, objects: Sequence[StoredObject], dest: memoryview) -> None:
        self.objects = tuple(objects)
        self.dest = dest
        self._alive = True
        for stored in self.objects:
            stored._lease = self

    def release(self) -> None:
        """Gives unchanged copies up. Raises RuntimeError when they are DIRTY or being written, or on a second call."""
        self._check_alive()
        for stored in self.objects:
            if stored.residency is not Residency.RESIDENT:
                raise RuntimeError(
                    f"{stored.name!r} is {stored.residency.name}: its newest bytes would be lost; "
                    "page it out instead of releasing it"
                )
        for stored in self.objects:
            stored._move(Residency.AT_HOME)
        self._end()

    def mark_dirty(self) -> None:
        """Says that the copies are about to change: from now on only a page-out ends the lease. May be repeated."""
        self._check_alive()
        fresh = [stored for stored in self.objects if stored.residency is not Residency.DIRTY]
        for stored in fresh:
            stored._check(Residency.DIRTY)
            if stored.residency is Residency.PAGING_OUT:
                raise RuntimeError(f"{stored.name!r} is being written and must not change before the end")
        for stored in fresh:
            stored._move(Residency.DIRTY)

    def _check_alive(self) -> None:
        if not self._alive:
            raise RuntimeError(f"the lease on {', '.join(repr(stored.name) for stored in self.objects)} is over")

    def _end(self) -> None:
        self._alive = False
        for stored in self.objects:
            stored._lease = None


def layout(objects: Sequence[StoredObject]) -> tuple[list[int], int]:
    """(start of each object in memory, bytes in all), one after another in whole pages. ValueError unless distinct nvme
    objects.
    """
    if not objects:
        raise ValueError("no objects were given")
    if len(set(objects)) != len(objects):
        raise ValueError(f"an object appears twice among {', '.join(repr(stored.name) for stored in objects)}")
    starts, total = [], 0
    for stored in objects:
        if stored.home is not Tier.NVME:
            raise ValueError(f"{stored.name!r} lives on {stored.home.value}, in place: there is nothing to page")
        starts.append(total)
        total += page_round(stored.nbytes)
    return starts, total


def claim(objects: Sequence[StoredObject], to: Residency) -> None:
    """Moves all or, when one must not move, none. Call it on the event loop."""
    for stored in objects:
        stored._check(to)
    for stored in objects:
        stored._move(to)
        if to is Residency.PAGING_OUT:
            stored._written = asyncio.get_running_loop().create_future()


def runs(extents: Sequence[Extent | None], starts: Sequence[int]) -> list[tuple[int, Extent]]:
    """(start in memory, extent) of each request: objects that are neighbours in the file share one."""
    merged: list[tuple[int, Extent]] = []
    for extent, start in zip(extents, starts, strict=True):
        assert extent is not None
        if merged and merged[-1][1].end == extent.offset:
            first_start, first = merged[-1]
            merged[-1] = (first_start, Extent(first.offset, first.nbytes + extent.nbytes))
        else:
            merged.append((start, extent))
    return merged
