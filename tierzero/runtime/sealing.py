"""Steps that are sealed in the tier files: after a crash a run goes on from the last one (`tierzero.tiers.seals`).

A state is marked when the user's loop has ended a step, and sealed when all of it is on the drive: with updates beside
the next forward that is beside the backward after it, when the next step's updates need the other slots, tried ones
(`tierzero.runtime.speculation`) first. So a seal writes nothing but its record. Marked, not sealed: a crash falls back
to the state before.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from tierzero.config import Config
from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.draft import Draft
from tierzero.runtime.stats import Stalls
from tierzero.sharding.collectives import Collectives, World
from tierzero.tiers import TieredStore
from tierzero.tiers.directory import lasting_folder
from tierzero.tiers.seals import (
    Found,
    Key,
    Kind,
    SealRecord,
    newest_everywhere,
    read_records,
    remove_records,
    write_record,
)


@dataclass(frozen=True)
class LastingFiles:
    """The lasting tier files of one rank: their name, their folder on each drive, the sealed state that is there, and
    what the seals of these processes are told from others by.
    """

    name: str
    folders: list[Path]
    ranks: int
    life: str
    found: SealRecord | None

    @classmethod
    def of(cls, config: Config, drafted: Draft, world: World) -> LastingFiles | None:
        """None where ``checkpoint.durable`` is off. Raises ConfigError, on all ranks, where it cannot be and for a
        state that cannot be taken up.
        """
        if not config.checkpoint.durable:
            return None
        if world.shards > 1 and drafted.stage.whole:
            kept = " and ".join(sorted(drafted.stage.whole))
            raise ConfigError(
                f"checkpoint.durable: at sharding.stage = {drafted.stage.number} every rank keeps {kept} in memory; "
                "use stage 3, which keeps all of the state in the tier files"
            )
        assert config.checkpoint.dir is not None
        run = xxhash.xxh3_64_hexdigest(os.path.realpath(config.checkpoint.dir).encode())
        name = f"lasting-{run[:12]}"
        folders = [lasting_folder(Path(path), name, world.global_rank) for path in config.tiers.nvme]
        record, life = _agreed_record(read_records(folders), folders[0], world)
        if record is not None:
            _check_moments(record, drafted, folders[0])
        return cls(name, folders, world.size, life, record)

    def with_layout(self, config: Config) -> Config:
        """The configuration with what "auto" was when the files were made."""
        if self.found is None:
            return config
        keys = []
        if config.tiers.tile is None:
            keys.append(f"tiers.tile={self.found.content['tile']}")
        if config.tiers.nvme_shares is None and len(config.tiers.nvme) > 1:
            keys.append(f"tiers.nvme_shares={self.found.layout['shares']}")
        return config.override(keys)

    def check_layout(self, store: TieredStore) -> None:
        """Raises ConfigError, before the files are touched, where they are of another model or configuration."""
        if self.found is None:
            return
        layout, saved = store.layout(), self.found.layout
        if layout != saved or len(store.lasting_objects()) != len(self.found.slots):
            differs = next((key for key in saved if saved[key] != layout.get(key)), "objects")
            raise ConfigError(
                f"checkpoint.durable: {self.folders[0]} holds a sealed step of another model, tile, units, placement "
                f"or block size ({differs} differ); go on with those, or from a checkpoint with another checkpoint.dir"
            )


def _check_moments(record: SealRecord, drafted: Draft, folder: Path) -> None:
    """Raises ConfigError where the sealed moments are stored in another type."""
    parameters = record.content["manifest"]["parameters"].values()
    saved = {parameter.get("moments", "fp32") for parameter in parameters if parameter["trainable"]}
    wanted = {group.fmt.moments for group in drafted.groups if group.fmt is not None}
    if saved and wanted and saved != wanted:
        raise ConfigError(
            f'checkpoint.durable: {folder} holds a sealed step with optimizer.state_dtype = "{min(saved)}", not '
            f'"{min(wanted)}"; go on with that, or change it on the way from a checkpoint with another checkpoint.dir'
        )


def _agreed_record(own: Found, folder: Path, world: World) -> tuple[SealRecord | None, str]:
    """The record that all ranks go on from, and the life of these processes."""
    summary = (
        [set(records) for records in own.drives],
        own.damaged,
        own.misplaced + _of_other_ranks(own, folder, world),
        secrets.token_hex(8),
    )
    everybody = [summary] * world.size
    if world.size > 1:
        dist.all_gather_object(everybody, summary, group=world.group)
    for _, _, problems, _ in everybody:
        if problems:
            raise ConfigError(f"checkpoint.durable: {problems[0]}")
    damaged = [text for _, damaged, _, _ in everybody for text in damaged]
    files = f"{folder.parent}/{folder.name.rpartition('-rank-')[0]}-*"
    remedy = f"go on from a checkpoint with another checkpoint.dir, or remove {files} on all drives to start afresh"
    try:
        key = newest_everywhere([keys for drives, *_ in everybody for keys in drives])
    except LookupError:
        what = damaged[0] if damaged else "on some drives or ranks the records of the last sealed step are missing"
        raise ConfigError(f"checkpoint.durable: {what}; {remedy}") from None
    if key is None and damaged:
        raise ConfigError(f"checkpoint.durable: {damaged[0]}; {remedy}")
    return (own.drives[0][key] if key is not None else None), everybody[0][3]


def _of_other_ranks(own: Found, folder: Path, world: World) -> list[str]:
    ranks = {record.ranks for records in own.drives for record in records.values()}
    return [
        f"{folder} holds a sealed step of {number} ranks, these are {world.size}; start as many, or go on from a "
        "checkpoint with another checkpoint.dir"
        for number in ranks
        if number != world.size
    ]


@dataclass(frozen=True)
class Updates:
    """What a sealer must know of the updates that steps have fixed: ``flush`` applies and writes all, ``begin_all``
    begins those that nobody has begun, and ``written``, on the loop, waits for all that have begun and raises what
    failed in one.
    """

    flush: Callable[[], None]
    begin_all: Callable[[], None]
    written: Callable[[], Awaitable[None]]


class Sealer:
    """Marks and seals states. A seal runs in the background from its beginning on (`begin_sealing`):

    ========= =================================== =================================================
    moment    on the drives of this rank          what may happen to the files
    ========= =================================== =================================================
    marked    the record of the state before      the updates of the marked state are written
    recorded  both records                        nothing, until all ranks are known to be here
    sealed    the record of the marked state      the next state is written, and tried, to spare slots
    ========= =================================== =================================================

    A failure before the last of them is the engine's: nobody goes on from these files in this process.
    """

    def __init__(
        self,
        store: TieredStore,
        files: LastingFiles,
        collectives: Collectives | None,
        tile: int,
        updates: Updates,
        stalls: Stalls,
    ) -> None:
        self._store, self._files, self._collectives, self._tile = store, files, collectives, tile
        self._updates, self._stalls = updates, stalls
        self._layout = store.layout()
        self._marked: dict[str, Any] | None = None
        self._recorded: Future[None] | None = None
        self._sealed: Future[None] | None = None
        """Of the seal that was begun last, until somebody has waited for it."""
        self._number = files.found.key.number if files.found is not None else 0
        self.found = files.found
        """A state of an earlier process that nobody has taken up yet; the tiers hold it."""

    @property
    def folder(self) -> Path:
        """Where this rank's files are, on its first drive."""
        return self._files.folders[0]

    @property
    def under_way(self) -> Future[None] | None:
        """The seal that was begun last, unless somebody has waited for it."""
        return self._sealed

    def begin(self) -> None:
        """Once the files hold the first state, or that of the record that was found. Every rank must call it."""
        if self.found is not None:
            self._store.adopt(self.found.slots)
            # A later state that not all ranks have sealed is given up for good: its number comes again.
            remove_records(self._files.folders, but=self._number)
            return
        remove_records(self._files.folders)
        self._write(Kind.BEGUN, {}, [])
        self._meet()

    def mark(self, content: dict[str, Any]) -> None:
        """The state as of now is to be sealed; one that was marked before and has been written since is first."""
        self.complete()
        self._marked = content

    def complete(self) -> None:
        """Seals what is marked. Every rank must call it, before anything of that state is changed."""
        self._wait()
        if self._marked is not None:
            self._updates.flush()
            self.begin_sealing()
            self._wait()

    def begin_sealing(self) -> None:
        """Begins to seal what is marked, if something is. Every rank must call it at the same point among the
        reductions; nothing may change the state until `complete` has been called.
        """
        if self._marked is None:
            return
        engine = self._store.engine
        with engine.whole():
            self._updates.begin_all()
            content, self._marked = self._marked, None
            self._recorded = recorded = engine.submit(self._whole(self._record(content)))
            elsewhere = None
            if self._collectives is not None:
                elsewhere = self._collectives.submit_any(functools.partial(_has_failed, recorded))
            self._sealed = engine.submit(self._whole(self._seal(recorded, elsewhere)))

    def _wait(self) -> None:
        if self._sealed is not None:
            with self._stalls.waiting("nvme_write"):
                self._sealed.result()
            self._sealed = None

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """An interrupt of whoever waits does not reach it; the engine keeps its failure."""
        await asyncio.shield(self._store.engine.spawn(work))

    async def _record(self, content: dict[str, Any]) -> None:
        """This rank's part."""
        await self._updates.written()
        await self._store.engine.call(self._store.sync)
        self._number += 1
        slots = self._store.slots()
        await self._store.engine.call(self._write, Kind.SEALED, content | {"tile": self._tile}, slots)

    async def _seal(self, recorded: Future[None], elsewhere: Future[bool] | None) -> None:
        """The state before is let go of when all ranks have this one."""
        await asyncio.wrap_future(recorded)
        if elsewhere is not None and await asyncio.wrap_future(elsewhere):
            raise CheckpointError(f"{self.folder}: another rank could not seal a step; its message says why")
        try:
            await self._store.engine.call(remove_records, self._files.folders, self._number)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: the record of the step before cannot be removed: {error}") from error
        self._store.seal()

    def complete_alone(self) -> None:
        """As the last act on these files, when other ranks may be gone: the state before is kept as well. Files in
        which nothing was ever sealed go.
        """
        self.settle()
        if self._marked is not None:
            self._updates.flush()
            content, self._marked = self._marked, None
            self._store.engine.run(self._record(content))
        if self._number == 0:
            remove_records(self._files.folders)
            self._store.keep_files(False)

    def settle(self) -> None:
        """What has begun is over on this rank, well or badly, when this returns; other ranks may be gone."""
        begun = self._sealed if self._collectives is None else self._recorded
        if begun is not None:
            wait([begun])

    def discard(self) -> None:
        """The files go with the model: what they hold is not wanted any more. Every rank must call it."""
        self._wait()
        self._marked = None
        self._number += 1
        self._write(Kind.ENDED, {}, [])
        self._meet()
        remove_records(self._files.folders)
        self._store.keep_files(False)

    def _write(self, kind: Kind, content: dict[str, Any], slots: list[tuple[int, int]]) -> None:
        key = Key(self._number, self._files.life, kind)
        try:
            write_record(self._files.folders, SealRecord(key, self._files.ranks, self._layout, slots, content))
        except OSError as error:
            raise CheckpointError(f"{self.folder}: a step cannot be sealed: {error}") from error

    def _meet(self) -> None:
        if self._collectives is not None:
            self._collectives.barrier()


def _has_failed(work: Future[None]) -> bool:
    """Waits for its end."""
    try:
        return work.exception() is not None
    except CancelledError:
        return True
