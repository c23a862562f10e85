"""The state of all tiles as one thing: copied as of a moment, sealed, replaced by another, whole or not.

Updates change it tile by tile, beside everything else. Whatever changes it otherwise comes here first (`before_edit`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from tierzero.errors import CheckpointError, ConfigError
from tierzero.runtime.device import Device
from tierzero.runtime.sealing import Sealer
from tierzero.runtime.snapshot import Receiver, Snapshot
from tierzero.runtime.state import GroupState
from tierzero.runtime.update import Updater
from tierzero.tiers import IoEngine, Priority, TieredStore


class WholeState:
    """``sealer`` is None where the tiers end with the process. ``forget`` drops everything that was computed from the
    state: gradients, gathered weights, pending updates.
    """

    def __init__(
        self,
        engine: IoEngine,
        store: TieredStore,
        device: Device,
        updater: Updater,
        sealer: Sealer | None,
        forget: Callable[[], None],
    ) -> None:
        self._engine, self._store, self._device, self._updater = engine, store, device, updater
        self._forget = forget
        self._snapshot: Snapshot | None = None
        self._half_loaded: Path | None = None
        """What a load has begun with and not ended."""
        self.sealer = sealer
        self.averaged = False
        """Averages stand in the weights' place; see `tierzero.runtime.averaging`."""

    def begin_snapshot(self, groups: Sequence[GroupState], receiver: Receiver, priority: Priority) -> Future[None]:
        """Copies the tiles of ``groups`` as they are now to ``receiver``, beside whatever the training does next. The
        tiers must be up to date. Every rank must call it.
        """
        self.before_edit()
        snapshot = Snapshot(self._engine, self._store, self._device, groups, receiver)
        self._snapshot, self._updater.before_change = snapshot, snapshot.secure
        return snapshot.begin(priority)

    def abandon_snapshot(self) -> None:
        """Ends a snapshot that nobody wants any more."""
        if self._snapshot is not None:
            self._snapshot.cancel()
        self._end_snapshot()

    def before_edit(self) -> None:
        """Seals what is marked, and waits until a snapshot needs nothing of the state any more. Every rank must call
        it.
        """
        if self.sealer is not None:
            self.sealer.complete()
        self._end_snapshot()

    def _end_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = self._updater.before_change = None

    @contextlib.contextmanager
    def replacing(self, source: Path) -> Iterator[None]:
        """Around a load of all state from ``source``. Half of it on top of another state is neither: where the block
        fails, nothing goes on from that but another load. Every rank must enter it.
        """
        self.refuse_averages(f"loading {source}")
        self.before_edit()
        if self.sealer is not None:
            self.sealer.found = None  # it is not taken up; its bytes stay until another state is sealed
        self._forget()
        self._half_loaded = source
        yield
        self._half_loaded = None

    def refuse_averages(self, what: str) -> None:
        """Raises ConfigError for what needs the weights that are trained."""
        if self.averaged:
            raise ConfigError(
                f"{what} inside tierzero.averaged, where averages stand in the weights' place; leave that first"
            )

    def check(self) -> None:
        """Raises CheckpointError where half of a state is there, ConfigError for one that nobody has taken up."""
        if self._half_loaded is not None:
            raise CheckpointError(
                f"the model holds half of {self._half_loaded}, which could not be loaded to its end; load another "
                "checkpoint with tierzero.load_checkpoint, or shard a new model"
            )
        if self.sealer is not None and self.sealer.found is not None:
            raise ConfigError(
                "the tiers hold a sealed step of an earlier run; take it up with tierzero.resume(model, optimizer), or "
                f"load a checkpoint, or remove {self.sealer.folder} before the start"
            )
