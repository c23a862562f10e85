"""Objects that live in a tier, and the state machine of where their newest bytes are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash

from tierzero.errors import BudgetError, ConfigError
from tierzero.tiers.allocator import page_round
from tierzero.tiers.digests import check_digests, digests_of
from tierzero.tiers.directory import TierDirectory
from tierzero.tiers.drive_rate import measured_shares
from tierzero.tiers.engine import IoEngine
from tierzero.tiers.executor import Priority, Request
from tierzero.tiers.faults import first_cause
from tierzero.tiers.file import Direct
from tierzero.tiers.memory import Buffer, MemoryPool
from tierzero.tiers.objects import About, Extent, Lease, Residency, StoredObject, claim, layout, runs
from tierzero.tiers.room import DriveRoom
from tierzero.tiers.striped_file import StripedFile
from tierzero.tiers.stripes import equal_shares
from tierzero.tiers.tier import Tier

__all__ = ["Extent", "Lease", "Residency", "StoredObject", "TieredStore"]


class TieredStore:
    """Named objects with a home tier each: in pool memory (device, host), or as extents of tier files (nvme).

    Declare with `add`, then `open` once. `page_in`, `page_out` and `write` are coroutines for the engine's loop. Sizes
    are in bytes. ``verify`` keeps a checksum of each nvme object as it is written and checks it at every page-in.

    ``lasting`` names tier files that outlive the process, for objects that were declared so; see `tiers.seals`.
    ``twofold``: objects that may be tried have a second slot from the start, for `write_spare`; `add_second_slots`
    gives them one later.
    """

    def __init__(
        self,
        engine: IoEngine,
        *,
        pools: dict[Tier, MemoryPool],
        nvme_paths: Sequence[Path],
        rank: int,
        block_size: int,
        direct: Direct,
        nvme_limit: int | None,
        verify: bool = False,
        nvme_shares: Sequence[int] | None = None,
        lasting: str | None = None,
        twofold: bool = False,
    ) -> None:
        self.engine = engine
        self.file: StripedFile | None = None
        """The tier files; None without nvme objects, before `open` and after `close`."""
        self._pools = pools
        self._nvme_paths = tuple(nvme_paths)
        self._rank = rank
        self._block_size = block_size
        self._direct = direct
        self._nvme_limit = nvme_limit
        self._verify = verify
        self._shares = nvme_shares
        self._lasting = lasting
        self._twofold = twofold
        self._objects: dict[str, StoredObject] = {}
        self._tried: list[StoredObject] = []
        """Objects that may get a second slot."""
        self._added: list[StoredObject] = []
        """Those that got one after the store was opened."""
        self._file_bytes = 0
        self._opened = False
        self._directories: list[TierDirectory] = []
        self._cleanup = ExitStack()

    def add(
        self,
        name: str,
        nbytes: int,
        home: Tier,
        lasting: bool = False,
        about: About = None,
        tried: bool = False,
    ) -> StoredObject:
        """Declares an object; takes nothing yet. nvme objects added one after another are neighbours in the file.

        ``lasting`` counts on nvme, in a store that has lasting files. ``about`` says in messages what is in it;
        ``tried``, that it may get a second slot.
        """
        if self._opened:
            raise RuntimeError(f"{name!r} is added to a store that is open already")
        if name in self._objects:
            raise ValueError(f"the store already has an object {name!r}")
        if nbytes < 0:
            raise ValueError(f"{name!r}: a size cannot be negative, got {nbytes}")
        extent = None
        if home is Tier.NVME:
            extent = Extent(self._file_bytes, page_round(nbytes))
            self._file_bytes += extent.nbytes
        lasting = lasting and extent is not None and self._lasting is not None
        tried = tried and extent is not None
        stored = self._objects[name] = StoredObject(name, nbytes, home, extent, lasting, about, tried and self._twofold)
        if tried:
            self._tried.append(stored)
        return stored

    def open(self, existing: bool = False) -> None:
        """Checks that everything fits, then takes it: memory from the pools, files on the nvme paths. ``existing``:
        takes the lasting files that are there instead of making new ones.

        Raises BudgetError with the missing bytes, ConfigError for paths that cannot be used; nothing is kept then.
        """
        if self._opened:
            raise RuntimeError("the store is open already")
        self._check_pools()
        self._add_spares()
        if self._file_bytes and not self._nvme_paths:
            raise ConfigError(
                f"tiers.nvme: {self._file_bytes:,} bytes of state are placed on nvme, but no path is given; "
                "set tiers.nvme"
            )
        with ExitStack() as stack:
            if self._file_bytes:
                self.file = self._open_file(stack, existing)
            for stored in self._objects.values():
                if stored.home is not Tier.NVME:
                    pool = self._pools[stored.home]
                    stored.buffer = pool.allocate(stored.nbytes, stored.name)
                    stack.callback(_free, stored, pool)
            self._cleanup = stack.pop_all()
        self._opened = True

    async def page_in(
        self, objects: Sequence[StoredObject], dest: memoryview, priority: Priority, request: Request | None = None
    ) -> Lease:
        """Reads nvme objects into ``dest``, each from the sum of the page-rounded sizes before it; neighbours in one
        request.

        Waits for a page-out of the same objects to end. Raises TierError when a read fails (the objects are then
        AT_HOME as before), RuntimeError when one is held by somebody else, ValueError when ``dest`` is too small.
        """
        file, starts = self._prepare(objects, dest)
        await _settled(objects)
        claim(objects, Residency.PAGING_IN)
        try:
            await self._read(file, objects, starts, dest, request or Request(priority))
        except BaseException:
            for stored in objects:
                stored._move(Residency.AT_HOME)
            raise
        for stored in objects:
            stored._move(Residency.RESIDENT)
        return Lease(objects, dest)

    async def peek(self, objects: Sequence[StoredObject], dest: memoryview, priority: Priority) -> None:
        """Reads nvme objects into ``dest`` as `page_in` does, without a lease. Whoever calls it sees to it that nobody
        writes to them meanwhile; RuntimeError where somebody does now. Raises TierError when a read fails.
        """
        file, starts = self._prepare(objects, dest)
        for stored in objects:
            if stored.residency in (Residency.DIRTY, Residency.PAGING_OUT):
                raise RuntimeError(f"{stored.name!r} is {stored.residency.name}: its file is not to be read now")
        await self._read(file, objects, starts, dest, Request(priority))

    def filed_digests(self, objects: Sequence[StoredObject]) -> list[int] | None:
        """Checksums of objects whose newest bytes can be taken from their extents without a look at them; None where
        one is not in the tier files, has no checksum, or was written by another process and not read yet.
        """
        found = []
        for stored in objects:
            stale = stored.residency in (Residency.DIRTY, Residency.PAGING_OUT)
            if stored.home is not Tier.NVME or stale or stored._unread or stored._digest is None:
                return None
            found.append(stored._digest)
        return found

    async def page_out(self, lease: Lease, priority: Priority, request: Request | None = None) -> None:
        """Writes a dirty lease's objects home; the lease is then over and its memory the caller's again.

        Until then nobody may write into it. On a failure the objects stay DIRTY, the lease stays alive and TierError is
        raised.
        """
        lease._check_alive()
        await self._write_home(lease.objects, lease.dest, priority, request)
        lease._end()

    async def write(
        self, objects: Sequence[StoredObject], src: memoryview, priority: Priority, request: Request | None = None
    ) -> None:
        """Writes contents that were never paged in; ``src`` is laid out as in `page_in`. Waits for a page-out to end.

        After a failure (TierError) the objects are DIRTY until another `write` of them succeeds.
        """
        self._prepare(objects, src)
        await _settled(objects)
        for stored in objects:
            stored._check_unleased("write")
        await self._write_home(objects, src, priority, request)

    async def write_spare(self, lease: Lease, priority: Priority) -> None:
        """Writes what is in a lease's memory to the spare slots of its objects; what is current stays so, and the lease
        too. Raises TierError.
        """
        lease._check_alive()
        file, starts = self._prepare(lease.objects, lease.dest)
        request = Request(priority)
        digests: Sequence[int | None] = [None] * len(lease.objects)
        if self._verify or any(stored.lasting for stored in lease.objects):
            digests = await self.engine.call(digests_of, lease.objects, starts, lease.dest)
        await _all(
            [
                self.engine.write(file, extent.offset, lease.dest[start : start + extent.nbytes], priority, request)
                for start, extent in runs([stored.spare for stored in lease.objects], starts)
            ]
        )
        for stored, value in zip(lease.objects, digests, strict=True):
            stored._spare_digest = value

    @staticmethod
    def adopt_spare(objects: Sequence[StoredObject]) -> None:
        """What `write_spare` wrote to objects that are at home is what they are from now on."""
        for stored in objects:
            if stored.residency is not Residency.AT_HOME:
                raise RuntimeError(f"{stored.name!r} is {stored.residency.name}: its slots cannot change now")
        for stored in objects:
            stored._change_slots()
            stored._digest, stored._spare_digest = stored._spare_digest, None

    @staticmethod
    def exchange(stored: StoredObject, buffer: Buffer) -> Buffer:
        """An object in memory lives in ``buffer`` from now on, of the same pool and size; returns where it was."""
        before = stored.buffer
        if before is None or before.capacity != buffer.capacity:
            raise RuntimeError(f"{stored.name!r} cannot live in a buffer of {buffer.capacity} bytes")
        stored.buffer = buffer
        return before

    @property
    def may_be_cloned(self) -> bool:
        """Whether there are checksums of what lies in the files, and nobody asked for them to be checked each time."""
        return self._lasting is not None and not self._verify

    # Lasting objects.

    def lasting_objects(self) -> list[StoredObject]:
        """In the order in which they were declared."""
        return [stored for stored in self._objects.values() if stored.lasting]

    def slots(self) -> list[tuple[int, int]]:
        """For each lasting object the slot of its newest bytes and their checksum. Nothing may be on its way there."""
        found = []
        for stored in self.lasting_objects():
            if stored.residency in (Residency.DIRTY, Residency.PAGING_OUT) or stored._digest is None:
                raise RuntimeError(f"{stored.name!r} is {stored.residency.name}: its newest bytes are not in its file")
            found.append((stored.slot, stored._digest))
        return found

    def adopt(self, slots: Sequence[tuple[int, int]]) -> None:
        """Takes up lasting objects as another process has left them; sealed. Their checksums are checked when they are
        read for the first time.
        """
        for stored, (slot, digest) in zip(self.lasting_objects(), slots, strict=True):
            if slot:
                stored.extent, stored.spare = stored.spare, stored.extent
            stored.slot, stored._digest, stored._unread = slot, digest, True
            stored._seal()

    def seal(self) -> None:
        """From now on the bytes that lasting objects have are not written over: the next ones go to the other slot."""
        for stored in self.lasting_objects():
            stored._seal()

    def sync(self) -> None:
        """What was written to the files is on the drives when this returns. Raises TierError."""
        if self.file is not None:
            self.file.sync()

    def keep_files(self, keep: bool) -> None:
        """Whether lasting files stay when the store is closed; they do unless this says otherwise."""
        for directory in self._directories:
            directory.keep = keep

    def layout(self) -> dict[str, Any]:
        """What must be the same for another process to take these files up; before `open` as far as it is known."""
        objects = [[stored.name, stored.nbytes] for stored in self._objects.values() if stored.home is Tier.NVME]
        digest = xxhash.xxh3_64_hexdigest(json.dumps(objects).encode())
        shares = self.file.shares if self.file is not None else self._shares or equal_shares(len(self._nvme_paths))
        return {"objects": digest, "block_size": self._block_size, "shares": list(shares)}

    def in_memory(self) -> list[StoredObject]:
        """The objects whose home is a buffer."""
        return [stored for stored in self._objects.values() if stored.buffer is not None]

    def vacate(self, objects: Sequence[StoredObject]) -> None:
        """Gives the memory of objects back to the system; nobody may touch them, or views of them, before `occupy`."""
        for stored in objects:
            assert stored.buffer is not None
            self._pools[stored.home].vacate(stored.buffer)

    def occupy(self, objects: Sequence[StoredObject]) -> None:
        """Memory for vacated objects, of any contents. Raises BudgetError, and has taken nothing then."""
        try:
            for stored in objects:
                assert stored.buffer is not None
                self._pools[stored.home].occupy(stored.buffer)
        except BaseException:
            self.vacate(objects)
            raise

    def beside(self) -> TieredStore:
        """An empty store for files of its own on the same paths, within what these leave of the limit, checked when
        they are read.
        """
        left = None if self._nvme_limit is None else max(0, self._nvme_limit - self._file_bytes)
        return TieredStore(
            self.engine,
            pools={},
            nvme_paths=self._nvme_paths,
            rank=self._rank,
            block_size=self._block_size,
            direct=self._direct,
            nvme_limit=left,
            verify=True,
            nvme_shares=self._shares,
        )

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Declared bytes by home tier, in whole pages on nvme."""
        totals = dict.fromkeys(Tier, 0)
        for stored in self._objects.values():
            slots = 2 if stored.twofold else 1
            totals[stored.home] += slots * stored.extent.nbytes if stored.extent else stored.nbytes
        return totals

    @property
    def spare_bytes(self) -> int:
        """Of the bytes on nvme, those in second slots."""
        return sum(stored.extent.nbytes for stored in self._objects.values() if stored.twofold and stored.extent)

    def close(self) -> None:
        """Gives the memory back and removes the files. Safe to call twice. Running transfers fail with TierError."""
        self._cleanup.close()
        self.file = None

    # Second slots, of an open store.

    @property
    def second_slot_bytes(self) -> int:
        """What `add_second_slots` would take."""
        return sum(stored.extent.nbytes for stored in self._without_second_slot() if stored.extent is not None)

    def room_for_second_slots(self, ranks: int) -> list[DriveRoom]:
        """Of every drive, for those of ``ranks`` ranks like this one. Raises OSError."""
        if self.file is None:
            return []
        return self.file.room_for(self._file_bytes + self.second_slot_bytes, ranks)

    def add_second_slots(self) -> None:
        """One for every object that may be tried and has none. Raises BudgetError where there is no room; nothing has
        changed then.
        """
        added = self._without_second_slot()
        if self.file is None or not added:
            return
        self.file.resize(self._file_bytes + self.second_slot_bytes)
        for stored in added:
            stored.twofold = True
        self._added = added
        self._add_spares()

    def drop_second_slots(self) -> None:
        """Gives up what `add_second_slots` took, before anything is written there."""
        dropped, self._added = self._added, []
        if self.file is None or not dropped:
            return
        for stored in dropped:
            assert stored.spare is not None
            self._file_bytes -= stored.spare.nbytes
            stored.spare, stored.twofold = None, False
        self.file.resize(self._file_bytes)

    def _without_second_slot(self) -> list[StoredObject]:
        return [stored for stored in self._tried if not stored.twofold]

    def _add_spares(self) -> None:
        """Second slots lie behind everything else, in the same order: neighbours are neighbours there too."""
        for stored in self._objects.values():
            if not stored.twofold or stored.spare is not None:
                continue
            assert stored.extent is not None
            stored.spare = Extent(self._file_bytes, stored.extent.nbytes)
            self._file_bytes += stored.extent.nbytes

    def _open_file(self, stack: ExitStack, existing: bool) -> StripedFile:
        if self._nvme_limit is not None and self._file_bytes > self._nvme_limit:
            missing = self._file_bytes - self._nvme_limit
            raise BudgetError(
                f"tiers.nvme_limit: {self._file_bytes:,} bytes of state are placed on nvme"
                f"{self._why_two_slots()}, but the limit is "
                f"{self._nvme_limit:,}; raise it by {missing:,} bytes or place less on nvme",
                missing,
            )
        self._directories = []
        for path in self._nvme_paths:
            directory = TierDirectory.open(path, self._rank, self._lasting, existing)
            stack.callback(directory.close)
            self._directories.append(directory)
        file = self._striped(self._directories, existing)
        stack.callback(file.close)
        return file

    def _why_two_slots(self) -> str:
        wanted = "checkpoint.durable" if self._lasting else 'optimizer.overlap = "both"' if self._twofold else ""
        return f" (two slots of each tile, for {wanted})" if wanted else ""

    def _striped(self, directories: list[TierDirectory], existing: bool) -> StripedFile:
        """Over several paths: in the given shares, else in proportion to their speed, else, where the fast ones lack
        the room for that, in equal parts.
        """

        def striped(shares: Sequence[int] | None) -> StripedFile:
            return StripedFile(
                directories,
                self._file_bytes,
                block_size=self._block_size,
                direct=self._direct,
                shares=shares,
                existing=existing,
            )

        if existing or self._shares is not None or len(directories) == 1:
            return striped(self._shares)
        try:
            return striped(measured_shares(directories))
        except (BudgetError, OSError):
            return striped(None)

    def _check_pools(self) -> None:
        for tier in (Tier.DEVICE, Tier.HOST):
            needed = sum(page_round(stored.nbytes) for stored in self._objects.values() if stored.home is tier)
            if not needed:
                continue
            if tier not in self._pools:
                raise ConfigError(
                    f"tiers.{tier.value}: {needed:,} bytes of state are placed there, but it has no budget"
                )
            free = self._pools[tier].free
            if needed > free:
                raise BudgetError(
                    f"tiers.{tier.value}: {needed:,} bytes of state are placed there, but {free:,} are free; "
                    f"raise it by {needed - free:,} bytes or place less there",
                    needed - free,
                )

    def _prepare(self, objects: Sequence[StoredObject], memory: memoryview) -> tuple[StripedFile, list[int]]:
        if self.file is None:
            raise RuntimeError("the store has no open tier file; call open() first")
        starts, total = layout(objects)
        if memory.nbytes < total:
            raise ValueError(f"{objects[0].name!r} and what follows need {total} bytes of memory, got {memory.nbytes}")
        return self.file, starts

    async def _read(
        self,
        file: StripedFile,
        objects: Sequence[StoredObject],
        starts: Sequence[int],
        dest: memoryview,
        request: Request,
    ) -> None:
        await _all(
            [
                self.engine.read(file, extent.offset, dest[start : start + extent.nbytes], request.priority, request)
                for start, extent in runs([stored.extent for stored in objects], starts)
            ]
        )
        if self._verify or any(stored._unread for stored in objects):
            check_digests(file, objects, await self.engine.call(digests_of, objects, starts, dest))
            for stored in objects:
                stored._unread = False

    async def _write_home(
        self, objects: Sequence[StoredObject], memory: memoryview, priority: Priority, request: Request | None
    ) -> None:
        file, starts = self._prepare(objects, memory)
        claim(objects, Residency.PAGING_OUT)
        request = request or Request(priority)
        try:
            wanted = self._verify or any(stored.lasting for stored in objects)
            digests: Sequence[int | None] = [None] * len(objects)
            if wanted:
                digests = await self.engine.call(digests_of, objects, starts, memory)
            await _all(
                [
                    self.engine.write(file, extent.offset, memory[start : start + extent.nbytes], priority, request)
                    for start, extent in runs([stored.target for stored in objects], starts)
                ]
            )
        except BaseException as error:
            for stored in objects:
                stored._settle(Residency.DIRTY, error)
            raise
        for stored, value in zip(objects, digests, strict=True):
            stored._digest, stored._unread = value, False
            stored._arrived()
            stored._settle(Residency.AT_HOME, None)


def _free(stored: StoredObject, pool: MemoryPool) -> None:
    if stored.buffer is not None:
        buffer, stored.buffer = stored.buffer, None
        pool.release(buffer)


async def _settled(objects: Sequence[StoredObject]) -> None:
    """Waits until none of the objects is being written; raises the error of a write that failed meanwhile."""
    while waits := [stored._written for stored in objects if stored._written is not None]:
        await asyncio.shield(waits[0])


async def _all(transfers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Waits for all, also when one fails or this is cancelled: memory that is still in use must not be given back."""
    if len(transfers) == 1:
        await transfers[0]
        return
    results = await asyncio.gather(*transfers, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise first_cause(errors)
