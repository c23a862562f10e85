"""The new state of a tile while it is not known whether it counts: beside the current one, wherever that lives.

Of what lives in a tier file, the new bytes are in the spare slot (`tierzero.tiers.objects.StoredObject`) and take no
memory. Of what lives in memory they are in a buffer of the staging memory; optimizer state then stays in that very
buffer, which becomes its home, and the old one takes its place in the pool. Weights are copied: readers know their
address. State of the optimizer in device memory that the host cannot address is updated there, and not tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierzero.optim.kernel import raw
from tierzero.planner.shape import MemoryPlan
from tierzero.runtime.device import Device
from tierzero.runtime.spans import Kind
from tierzero.runtime.state import GroupState, Home, Tile
from tierzero.runtime.tile_io import OpenTile, TileIO
from tierzero.tiers import Buffer, IoEngine, Priority, Residency, StoredObject, Tier, TieredStore, page_round


@dataclass(frozen=True)
class StagingForTrials:
    """Bytes of staging memory for tiles that are ``moving`` to and from files, and for new state that is ``held``."""

    moving: int = 0
    held: int = 0

    @classmethod
    def of(cls, plan: MemoryPlan) -> StagingForTrials:
        return cls((plan.staging - plan.trials) // 2, plan.trials)


@dataclass
class Trial:
    """A tile's new state. The buffers are of what lives in memory, if anything, and the trial's until it is kept or
    forgotten.
    """

    group: GroupState
    tile: Tile
    weight: Buffer | None = None
    optimizer: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Of state."""
        return self.tile.state_bytes()


class Trials:
    """Makes, keeps and forgets trials; on the engine's loop."""

    def __init__(self, engine: IoEngine, store: TieredStore, tile_io: TileIO, device: Device) -> None:
        self._engine, self._store, self._tile_io, self._device = engine, store, tile_io, device
        self.held = 0
        """Bytes of staging memory in all trials."""

    def possible(self, tile: Tile) -> bool:
        if tile.optimizer is None or tile.optimizer.tier is Tier.DEVICE:
            return False
        if tile.optimizer.tier is Tier.HOST and tile.optimizer.nbytes != tile.optimizer.stored.nbytes:
            return False
        return all(home.tier is not Tier.NVME or home.stored.twofold for home in tile.state)

    def is_free(self, tile: Tile) -> bool:
        """Nobody has its state open, and its spare slots may be written."""
        filed = _filed(tile)
        return all(stored.residency is Residency.AT_HOME and stored.spare_is_free for stored in filed)

    def staged_bytes(self, tile: Tile) -> int:
        """Staging memory while it is tried, of which that of state in files, and of gradients there, comes back after
        it.
        """
        homes = [home for home in (*tile.state, tile.gradient) if home is not None]
        staged = sum(page_round(home.nbytes) for home in homes if not self._tile_io.addressable(home))
        return staged + self.held_bytes(tile)

    def held_bytes(self, tile: Tile) -> int:
        """Staging memory until it is kept or forgotten."""
        return tile.state_bytes() - tile.state_bytes(Tier.NVME)

    def begin(self, group: GroupState, tile: Tile) -> Trial | None:
        """None without memory for it."""
        trial = Trial(group, tile)
        assert tile.optimizer is not None
        for kind, home in (("weight", tile.weight), ("optimizer", tile.optimizer)):
            if home.tier is Tier.NVME:
                continue
            buffer = self._tile_io.staging.try_allocate(home.nbytes)
            if buffer is None:
                self.forget(trial)
                return None
            self.held += buffer.capacity
            setattr(trial, kind, buffer)
        return trial

    async def set_apart(self, opened: OpenTile, trial: Trial) -> None:
        """What of an open tile lives in memory goes on in the trial's."""
        if trial.weight is not None or trial.optimizer is not None:
            await self._engine.call(_set_apart, opened, trial)

    async def file(self, opened: OpenTile, trial: Trial) -> None:
        """What of an open tile was paged in goes to the spare slots."""
        if opened.lease is not None:
            with self._tile_io.timing(Kind.PAGE_OUT, trial.group, trial.tile, trial.tile.state_bytes(Tier.NVME)):
                await self._store.write_spare(opened.lease, Priority.WRITE_BACK)

    async def keep(self, trial: Trial) -> None:
        """It is the tile's state from now on."""
        self._store.adopt_spare(_filed(trial.tile))
        if trial.optimizer is not None:
            assert trial.tile.optimizer is not None
            # The old home goes back in place of the new one, and is as large.
            trial.optimizer = self._store.exchange(trial.tile.optimizer.stored, trial.optimizer)
        if trial.weight is not None:
            await self._copy_home(trial.weight, trial.tile.weight)
        self.forget(trial)

    async def _copy_home(self, buffer: Buffer, home: Home) -> None:
        target, source = home.tensor(torch.uint8, home.nbytes), buffer.view(torch.uint8, home.nbytes)
        if not self._tile_io.addressable(home):
            event = self._device.copy_in(target, source, self._device.now())
            self._device.wait(event)  # compute and copies that are issued from now on come after it
            await self._tile_io.passed(event)
        else:
            await self._engine.call(_copy, target, source)

    def forget(self, trial: Trial) -> None:
        """Its memory goes back."""
        buffers, trial.weight, trial.optimizer = (trial.weight, trial.optimizer), None, None
        for buffer in buffers:
            if buffer is not None:
                self.held -= buffer.capacity
                self._tile_io.give_back(buffer)


def _filed(tile: Tile) -> list[StoredObject]:
    return [home.stored for home in tile.state if home.tier is Tier.NVME]


def _set_apart(opened: OpenTile, trial: Trial) -> None:
    numel = opened.tile.span.numel
    if trial.weight is not None:
        assert opened.weight is not None
        apart = trial.weight.view(opened.weight.dtype, numel)
        _copy(apart, opened.weight)
        opened.weight = apart
        opened.mirrors.clear()
    if trial.optimizer is not None:
        assert opened.group.fmt is not None
        for segment, skip in opened.group.fmt.places(numel):
            apart = trial.optimizer.view(segment.dtype, segment.values(numel), skip)
            _copy(apart, opened.optimizer[segment.name])
            opened.optimizer[segment.name] = apart


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On one core, unlike PyTorch's: the others compute."""
    raw(target)[:] = raw(source)
