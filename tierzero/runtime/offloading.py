"""A model that gives its memory back between phases: what lies in device and host memory is copied elsewhere, and the
memory itself goes back to the system.

Buffers keep their addresses, or their storages on a GPU, so that everything that knows them is right again when the
bytes are back (`tierzero.tiers.memory.Allocator.vacate`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, get_args

from tierzero.errors import BudgetError, ConfigError, TierError
from tierzero.runtime.outcome import outcome_of
from tierzero.runtime.parked import FileCopies, HostCopies, To
from tierzero.tiers import StoredObject, Tier
from tierzero.tiers.free_memory import available_bytes

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


class Presence(Enum):
    """Where the state is that has its home in memory, and who owns that memory.

    ======= ===============================================================
    HERE    in its home; the memory is the tiers'
    AWAY    in the copies; the memory is the system's, nobody touches it
    ======= ===============================================================
    """

    HERE = "here"
    AWAY = "away"


class Offloading:
    """Takes a runtime's state out of memory and back. Both on every rank, or on none."""

    def __init__(self) -> None:
        self.presence = Presence.HERE
        self._turn = threading.Lock()
        self._copies: FileCopies | HostCopies | None = None
        self._objects: list[StoredObject] = []

    def check(self) -> None:
        """Raises ConfigError while the state is away."""
        if self.presence is Presence.AWAY:
            raise ConfigError("this model was offloaded; call tierzero.reload(model) before it is used")

    def bytes_of_copies(self) -> dict[str, int]:
        """Per tier, while the state is away."""
        nbytes = 0 if self._copies is None else self._copies.nbytes
        return {"nvme": nbytes} if isinstance(self._copies, FileCopies) else {"host": nbytes}

    def offload(self, runtime: Runtime, to: To) -> None:
        """Raises BudgetError or ConfigError where there is no room for the copies, TierError where they cannot be
        written; the state is HERE then.
        """
        with self._one_at_a_time():
            if self.presence is Presence.HERE:
                self._offload(runtime, to)

    def _offload(self, runtime: Runtime, to: To) -> None:
        _check_place(runtime, to)
        _come_to_rest(runtime)
        objects = [stored for stored in runtime.store.in_memory() if to == "nvme" or stored.home is Tier.DEVICE]
        unused = _unused_gradients(runtime)
        copies = _copies(runtime, to, [stored for stored in objects if stored not in unused])
        try:
            _on_every_rank(runtime, copies.write, "offload its state")
        except BaseException:
            copies.close()
            raise
        with runtime.engine.whole():
            runtime.store.vacate(objects)
            self._copies, self._objects, self.presence = copies, objects, Presence.AWAY
        for pool in runtime.pools.values():
            pool.trim()
        runtime.device.give_back()

    def reload(self, runtime: Runtime) -> None:
        """Raises BudgetError where the memory is not there any more, TierError where a copy cannot be read; the state
        is AWAY then, and another try may follow.
        """
        with self._one_at_a_time():
            if self.presence is Presence.AWAY:
                self._reload(runtime)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise ConfigError("another thread offloads or reloads this model; let them take turns")
        try:
            yield
        finally:
            self._turn.release()

    def _reload(self, runtime: Runtime) -> None:
        copies, objects = self._copies, self._objects
        assert copies is not None

        def bring_back() -> None:
            runtime.store.occupy(objects)
            copies.read()

        try:
            _on_every_rank(runtime, bring_back, "reload its state")
        except BaseException:
            runtime.store.vacate(objects)
            raise
        self.presence = Presence.HERE
        self.close()

    def close(self) -> None:
        """Drops the copies. Safe to call twice."""
        if self._copies is not None:
            self._copies.close()
        self._copies, self._objects = None, []


def _check_place(runtime: Runtime, to: To) -> None:
    if to not in get_args(To):
        raise ConfigError(f"offload: to is {to!r}; use 'nvme' or 'host'")
    if to == "host" and runtime.device.is_host:
        raise ConfigError("offload: device memory is host memory here, and to='host' would give none back; use 'nvme'")
    if runtime.in_model_code or runtime.held_open:
        raise ConfigError("offload: call it between steps, not in a forward, a backward or tierzero.gathered")


def _come_to_rest(runtime: Runtime) -> None:
    """Every update is applied, and nothing but homes is in memory."""
    runtime.require_open()
    runtime.flush_to_read()
    runtime.whole_state.before_edit()
    for unit in runtime.units:
        runtime.pager.forget(unit)
    runtime.engine.run(runtime.tile_io.discard_ahead())
    runtime.device.synchronize()


def _unused_gradients(runtime: Runtime) -> set[StoredObject]:
    """What holds no gradient now need not be copied."""
    return {
        tile.gradient.stored
        for group in runtime.groups()
        for tile in group.tiles
        if tile.gradient is not None and not any(slot.has_grad for slot in group.slots)
    }


def _copies(runtime: Runtime, to: To, objects: list[StoredObject]) -> FileCopies | HostCopies:
    if to == "nvme":
        return FileCopies(runtime.store, runtime.device, objects)
    copies = HostCopies(runtime.device, objects)
    used = runtime.pools["host"].used
    limit = runtime.host_limit if runtime.host_limit is not None else used + available_bytes()
    if used + copies.nbytes > limit:
        missing = used + copies.nbytes - limit
        raise BudgetError(
            f"offload: {copies.nbytes:,} bytes of device memory do not fit beside the {used:,} bytes in use on the "
            f"host, which may hold {limit:,}; raise tiers.host by {missing:,} bytes or use to='nvme'",
            missing,
        )
    return copies


def _on_every_rank(runtime: Runtime, work: Callable[[], None], task: str) -> None:
    """Raises on all ranks when ``work`` fails on any."""
    failure, failed = outcome_of(runtime, work)
    if failure is not None:
        raise failure
    if failed:
        raise TierError(f"another rank could not {task}; its message says why")
