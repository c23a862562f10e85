"""Steps that are sealed in the tier files: after a crash a run goes on from the last one (`tierzero.tiers.seals`).

A state is marked when the user's loop has ended a step, and sealed when all of it is on the drive: with updates beside
the next forward that is at the next step, for whose updates the other slots are then free. So a seal writes nothing
but its record. Marked, not sealed: a crash falls back to the state before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from tierzero.config import Config
from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.draft import Draft
from tierzero.sharding.collectives import Collectives, World
from tierzero.tiers import TieredStore
from tierzero.tiers.directory import lasting_folder
from tierzero.tiers.seals import SealRecord, read_records, remove_records, write_record


@dataclass(frozen=True)
class LastingFiles:
    """The lasting tier files of one rank: their name, where the records are, and the sealed state that is there."""

    name: str
    folder: Path
    found: SealRecord | None

    @classmethod
    def of(cls, config: Config, drafted: Draft, world: World) -> LastingFiles | None:
        """None where ``checkpoint.durable`` is off. Raises ConfigError where it cannot be, and for a state of other
        ranks or of a newer version.
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
        name = "lasting-" + xxhash.xxh3_64_hexdigest(str(config.checkpoint.dir.absolute()).encode())[:12]
        folder = lasting_folder(Path(config.tiers.nvme[0]), name, world.global_rank)
        return cls(name, folder, _newest_of_all(read_records(folder), folder, world))

    def with_layout(self, config: Config) -> Config:
        """The configuration with what "auto" was when the files were made."""
        if self.found is None:
            return config
        keys = []
        if config.tiers.tile is None:
            keys.append(f"tiers.tile={self.found.content['tile']}")
        if config.tiers.nvme_shares is None and self.found.layout["shares"]:
            keys.append(f"tiers.nvme_shares={self.found.layout['shares']}")
        return config.override(keys)


def _newest_of_all(records: list[SealRecord], folder: Path, world: World) -> SealRecord | None:
    numbers = {record.number for record in records}
    sizes = {record.content["world_size"] for record in records}
    everybody: list[tuple[set[int], set[int]]] = [(numbers, sizes)]
    if world.size > 1:
        everybody *= world.size
        dist.all_gather_object(everybody, (numbers, sizes), group=world.group)
    if not any(found for found, _ in everybody):
        return None
    common = set.intersection(*(found for found, _ in everybody))
    saved = set.union(*(found for _, found in everybody))
    if saved != {world.size} or not common:
        were = " or ".join(map(str, sorted(saved)))
        raise ConfigError(
            f"checkpoint.durable: {folder.parent} holds a sealed step of {were} ranks, and no other one that all "
            f"{world.size} of these have; start so many, or go on from a checkpoint with another checkpoint.dir"
        )
    return next(record for record in records if record.number == max(common))


class Sealer:
    """Marks and seals states. ``bring_up_to_date`` writes everything that is pending to the files."""

    def __init__(
        self,
        store: TieredStore,
        files: LastingFiles,
        collectives: Collectives | None,
        tile: int,
        bring_up_to_date: Callable[[], None],
    ) -> None:
        self._store, self._files, self._collectives, self._tile = store, files, collectives, tile
        self._bring_up_to_date = bring_up_to_date
        self._marked: dict[str, Any] | None = None
        self._number = files.found.number if files.found is not None else 0
        self.found = files.found
        """A state of an earlier process that nobody has taken up yet; the tiers hold it."""

    @property
    def folder(self) -> Path:
        """Where this rank's files are."""
        return self._files.folder

    def adopt(self) -> None:
        """Takes up the files of the state that was found. Raises ConfigError where they are of another model or
        configuration.
        """
        assert self.found is not None
        layout, saved = self._store.layout(), self.found.layout
        if layout != saved or len(self._store.lasting_objects()) != len(self.found.slots):
            differs = next((key for key in saved if saved[key] != layout.get(key)), "objects")
            raise ConfigError(
                f"checkpoint.durable: {self._files.folder} holds a sealed step of another model, tile, units, "
                f"placement or number of drives ({differs} differ); go on with those, or from a checkpoint with "
                "another checkpoint.dir"
            )
        self._store.adopt(self.found.slots)

    def begin(self) -> None:
        """In new files: what other files have left is nobody's."""
        remove_records(self._files.folder)

    def mark(self, content: dict[str, Any]) -> None:
        """The state as of now is to be sealed; one that was marked before and has been written since is first."""
        self.complete()
        self._marked = content

    def complete(self) -> None:
        """Seals what is marked. Every rank must call it, before anything of that state is changed."""
        if self._marked is None:
            return
        self._bring_up_to_date()
        content, self._marked = self._marked, None
        # Between the record and the seal, what is written next would still go where the record points.
        with self._store.engine.unbroken("while a step was being sealed"):
            self._store.sync()
            self._number += 1
            self._record(content)
            if self._collectives is not None:
                self._collectives.barrier()  # the state before is let go of when all have this one
            remove_records(self._files.folder, but=[self._number])
            self._store.seal()

    def _record(self, content: dict[str, Any]) -> None:
        record = SealRecord(self._number, self._store.layout(), self._store.slots(), content | {"tile": self._tile})
        try:
            write_record(self._files.folder, record)
        except OSError as error:
            raise CheckpointError(f"{self._files.folder}: a sealed step cannot be recorded: {error}") from error

    def discard(self) -> None:
        """The files go with the model: what they hold is not wanted any more."""
        self._marked = None
        remove_records(self._files.folder)
        self._store.keep_files(False)
