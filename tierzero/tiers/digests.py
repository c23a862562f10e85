"""Checksums of stored objects: taken when they are written, compared when they are read back."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from tierzero.errors import TierError
from tierzero.tiers.objects import StoredObject
from tierzero.tiers.striped_file import StripedFile


def digests_of(objects: Sequence[StoredObject], starts: Sequence[int], memory: memoryview) -> list[int]:
    """xxh3_64 of each object's bytes, which begin in ``memory`` at ``starts``."""
    return [
        int(xxhash.xxh3_64_intdigest(memory[start : start + stored.nbytes]))
        for stored, start in zip(objects, starts, strict=True)
    ]


def check_digests(file: StripedFile, objects: Sequence[StoredObject], found: Sequence[int]) -> None:
    """Raises TierError for an object whose bytes, read from ``file``, are not those that were written."""
    for stored, value in zip(objects, found, strict=True):
        if stored._digest is None or stored._digest == value:
            continue
        assert stored.extent is not None
        first = file.pieces(stored.extent.offset, stored.extent.nbytes)[0]
        what = f"{stored.name!r} ({stored.about()})" if stored.about else repr(stored.name)
        raise TierError(
            f"{what} was read back damaged: bytes {stored.extent.offset:,} to "
            f"{stored.extent.offset + stored.extent.nbytes:,} of the tier, from offset {first.file_offset:,} of "
            f"{file.paths[first.path_index]}, differ from what was written; "
            "go on from a checkpoint and check the drive"
        )
