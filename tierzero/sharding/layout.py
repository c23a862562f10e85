"""How a unit's parameters lie in flat buffers, and how those are cut into shards and tiles. Pure arithmetic, no
tensors.

A unit's parameters of one dtype and one trainability form a *flat group*: one buffer of ``parts`` equal shards,
padded at the end. Every offset here is in elements. Padding depends on the number of shards, so nothing that outlives
a run (a checkpoint, an export) may refer to these offsets; it refers to parameter names and element ranges inside the
parameter (`Fragment`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

SLOT_ALIGN = 32
"""Elements. Parameters start on 64-byte boundaries for 2-byte dtypes, so that matrix kernels meet aligned rows."""

SHARD_ALIGN = 2048
"""Elements. A shard of a large group starts on a page for 2- and 4-byte dtypes, so that a file can be read straight
into it."""

SMALL_SHARD = 32 * 1024
"""Elements. Below this a shard is aligned to `SLOT_ALIGN` only: page alignment would cost more padding than it saves
copies."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its flat group.

    ``names`` are all names under which the model knows the parameter (a tied weight has several), the first is the
    canonical one.
    """

    index: int
    names: tuple[str, ...]
    shape: torch.Size
    numel: int
    offset: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that lies in one shard: elements ``[start, stop)`` of the flattened parameter at
    ``shard_offset``.
    """

    slot: Slot
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TileSpan:
    """Elements ``[start, stop)`` of a shard: what moves between tiers as one."""

    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """One flat group: parameters of one dtype, all trainable or all frozen, cut into ``parts`` shards of
    ``shard_numel``.
    """

    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    parts: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole padded buffer."""
        return self.parts * self.shard_numel

    @property
    def logical_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def fragments(self, part: int) -> tuple[Fragment, ...]:
        """What of each parameter lies in shard ``part``, in order of position; parameters that do not touch it are
        left out.
        """
        begin, end = part * self.shard_numel, (part + 1) * self.shard_numel
        found = []
        for slot in self.slots:
            start, stop = max(slot.offset, begin), min(slot.offset + slot.numel, end)
            if start < stop:
                found.append(Fragment(slot, start - slot.offset, stop - slot.offset, start - begin))
        return tuple(found)

    def tiles(self, tile_numel: int) -> Iterator[TileSpan]:
        """The shard cut into tiles of ``tile_numel`` elements; the last one may be shorter."""
        for index, start in enumerate(range(0, self.shard_numel, tile_numel)):
            yield TileSpan(index, start, min(start + tile_numel, self.shard_numel))


def bucket_elements(layout: FlatLayout, whole_kept: bool = False) -> int:
    """Elements of the buffer in which a group's whole gradients are collected and, on several shards, reduced.

    ``whole_kept``: they are collected where the rank keeps whole gradients; the buffer then holds the shard that was
    accumulated there before, and the reduced one.
    """
    if layout.parts == 1:
        return layout.numel
    return layout.shard_numel + (layout.shard_numel if whole_kept else layout.numel)


def flat_layout(
    dtype: torch.dtype,
    trainable: bool,
    named: Sequence[tuple[tuple[str, ...], torch.Size]],
    parts: int,
    block: int = 1,
) -> FlatLayout:
    """Lays parameters, given as (names, shape), one after another and cuts the result into ``parts`` shards.

    ``block``: elements that belong together, a power of two of at most `SHARD_ALIGN`. No two parameters, shards, or
    tiles of a multiple of it, share one, so that blocks are counted from the start of their parameter.
    """
    slots, offset = [], 0
    align = max(SLOT_ALIGN, block)
    for index, (names, shape) in enumerate(named):
        offset = round_up(offset, align)
        numel = shape.numel()
        slots.append(Slot(index, names, shape, numel, offset))
        offset += numel
    shard = round_up(max(-(-offset // parts), 1), align)
    if parts > 1 and shard >= SMALL_SHARD:
        shard = round_up(shard, SHARD_ALIGN)
    return FlatLayout(dtype, trainable, tuple(slots), parts, shard)
