"""What of this machine's memory and drives a model may have: as configured, as is free, as other models leave."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.planner.shape import Budgets
from tierzero.runtime.device import Device, choose_device
from tierzero.sharding.collectives import World
from tierzero.tiers.free_memory import available_bytes
from tierzero.tiers.room import rooms_of

_FREE_SHARE = 0.8
"""Of the free memory, what an unstated budget may take: the rest is for activations and the system."""

_holders: weakref.WeakKeyDictionary[Holder, Share] = weakref.WeakKeyDictionary()
"""The open models of this process that share budgets."""


class Holder(Protocol):
    """A model that holds a share until it is closed."""

    @property
    def is_closed(self) -> bool: ...


@dataclass(frozen=True)
class Share:
    """The ``part`` of the budgets in ``config`` that one model may have. None: they are its own."""

    config: Config
    part: float | None

    @classmethod
    def taken_from(cls, config: Config, part: float | None) -> Share:
        """Raises ConfigError where the open models that share the same budgets leave less."""
        if part is None:
            return cls(config, None)
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0.0 < part <= 1.0:
            raise ConfigError(f"shard: share is {part!r}; use a fraction of the budgets, above 0 and at most 1")
        taken = sum(
            held.part or 0.0 for model, held in _holders.items() if not model.is_closed and held.config == config
        )
        if taken + part > 1.0 + 1e-9:
            raise ConfigError(
                f"shard: share = {part:g} of these budgets is more than the {max(0.0, 1.0 - taken):g} that the other "
                "models with this configuration leave; lower the shares, or close a model"
            )
        return cls(config, part)

    def held_by(self, model: Holder) -> None:
        """Until the model is closed."""
        if self.part is not None:
            _holders[model] = self

    def of_config(self) -> Config:
        """The configuration with this share of what it states."""
        if self.part is None:
            return self.config
        tiers = self.config.tiers
        stated = {key: getattr(tiers, key) for key in ("device", "host", "nvme_limit")}
        scaled = {key: int(value * self.part) for key, value in stated.items() if value is not None}
        return self.config.model_copy(update={"tiers": tiers.model_copy(update=scaled)})

    def of_free(self, budgets: Budgets) -> Budgets:
        """With this share of what is free, which is the budget where none is stated."""
        if self.part is None:
            return budgets
        return replace(
            budgets,
            device_free=int(budgets.device_free * self.part),
            host_free=int(budgets.host_free * self.part),
            available=int(budgets.available * self.part),
        )


def budgets_here(config: Config, local_size: int, device: Device | None = None) -> Budgets:
    """Of each of ``local_size`` ranks on this machine, from the memory that is free now."""
    tiers = config.tiers
    device = device or choose_device(0)
    available = available_bytes(local_size)
    host_free = int(available * _FREE_SHARE)
    device_free = host_free
    if not device.is_host:
        device_free = (
            int(torch.cuda.mem_get_info(device.torch_device)[0] * _FREE_SHARE)
            if device.torch_device.type == "cuda"
            else host_free
        )
    return Budgets(
        tiers.device,
        tiers.host // local_size if tiers.host is not None else None,
        device_free,
        host_free,
        device.is_host,
        bool(tiers.nvme),
        local_size,
        available,
        *_nvme_capacity(config),
        *_nvme_free(config),
    )


def agreed(budgets: Budgets, world: World) -> Budgets:
    """With what is free as the scarcest rank has it: ranks that plan alike gather alike, in the same order."""
    if world.size == 1:
        return budgets
    names = ("device_free", "host_free", "available", "nvme_capacity")
    found: list[list[int]] = [[]] * world.size
    dist.all_gather_object(found, [getattr(budgets, name) for name in names], group=world.group)
    device_free, host_free, available, nvme_capacity = (min(column) for column in zip(*found, strict=True))
    return replace(
        budgets, device_free=device_free, host_free=host_free, available=available, nvme_capacity=nvme_capacity
    )


def _nvme_capacity(config: Config) -> tuple[int, bool]:
    """Bytes, and whether it is the limit of the configuration. Of the whole drives: what is free, and whether a path
    can be used at all, is seen when the store has opened them, which clears away what killed runs left.
    """
    try:
        size = sum(shutil.disk_usage(path).total for path in config.tiers.nvme)
    except OSError:
        size = 1 << 62
    limit = config.tiers.nvme_limit
    return (size, False) if limit is None or limit > size else (limit, True)


def _nvme_free(config: Config) -> tuple[int, bool]:
    """Bytes that files in equal parts could take of the drives now, and whether one of them is memory."""
    paths = config.tiers.nvme
    try:
        drives = rooms_of(dict.fromkeys(paths, 1))
    except OSError:
        drives = []
    if not drives:
        return 1 << 62, False
    return min(drive.free // drive.wanted for drive in drives) * len(paths), any(drive.in_memory for drive in drives)
