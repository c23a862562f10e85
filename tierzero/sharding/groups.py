"""Process groups of sharded models, reused after one is closed: each costs sockets and threads that PyTorch keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)
"""Where the base group does not say its own."""


@dataclass(frozen=True)
class GroupSet:
    """The groups of one model at a time. ``tags`` and ``small`` carry host values, whatever the data is, of all ranks;
    ``gather`` and ``reduce`` are of those that divide the model, and ``peers``, in hybrid sharding, of those that have
    the same shard.
    """

    serial: int
    gather: dist.ProcessGroup
    gather_tags: dist.ProcessGroup
    reduce: dist.ProcessGroup
    reduce_tags: dist.ProcessGroup
    small: dist.ProcessGroup
    peers: dist.ProcessGroup | None


_Key = tuple[dist.ProcessGroup, bool, int]
_free: dict[_Key, list[GroupSet]] = {}
_serials = itertools.count()


def take_groups(
    base: dist.ProcessGroup, host_compute: bool, own: Sequence[int] = (), peers: Sequence[int] = ()
) -> GroupSet:
    """Groups over the ranks of ``base``; every one of them must call it at the same point of the program. In hybrid
    sharding ``own`` are the global ranks that divide the model with this one, ``peers`` those that have its shard.
    """
    shards = len(own) or dist.get_world_size(base)
    free = _free.get((base, host_compute, shards), [])
    offered = free[-1].serial if free else -1
    answers: list[tuple[int, int]] = [(-1, -1)] * dist.get_world_size(base)
    dist.all_gather_object(answers, (offered, next(_serials)), group=base)
    if offered >= 0 and all(answer[0] == offered for answer in answers):
        return free.pop()
    # A rank whose models ended in another order has other groups left: none of those can be trusted to match.
    free.clear()
    return _make(base, host_compute, max(proposed for _, proposed in answers), own, peers)


def give_back_groups(base: dist.ProcessGroup, host_compute: bool, shards: int, groups: GroupSet) -> None:
    """Keeps groups on which nothing is in flight for the next model. Call it at the same point on every rank."""
    if base in dist.distributed_c10d._world.pg_map:
        _free.setdefault((base, host_compute, shards), []).append(groups)


def _make(
    base: dist.ProcessGroup, host_compute: bool, serial: int, own: Sequence[int], peers: Sequence[int]
) -> GroupSet:
    ranks = dist.get_process_group_ranks(base)
    data = "gloo" if host_compute else None
    timeout = _timeout_of(base)

    def new(backend: str | None, members: Sequence[int] = ranks) -> dist.ProcessGroup:
        # Among a part of the processes only those take part: the others may shard other models, or none.
        everyone = len(members) == dist.get_world_size()
        group = dist.new_group(
            ranks=list(members), backend=backend, timeout=timeout, use_local_synchronization=not everyone
        )
        assert isinstance(group, dist.ProcessGroup)
        return group

    own = own or ranks
    peer_group = new(data, peers) if peers else None
    return GroupSet(serial, new(data, own), new("gloo"), new(data, own), new("gloo"), new("gloo"), peer_group)


def _timeout_of(base: dist.ProcessGroup) -> timedelta:
    """What the user gave to ``init_process_group``, as far as the backend tells."""
    device = next(iter(base._device_types), None)
    options = getattr(base._get_backend(device), "options", None) if device is not None else None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else _TIMEOUT
