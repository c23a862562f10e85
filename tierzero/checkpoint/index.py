"""The index of a rank's data file: where the parts of arrays lie in it, and which checksum which of its bytes have.

A checksum is of a range of bytes (`Check`), and whoever wants a part of that reads and checks the whole. In versions 1
and 2 each extent had a checksum of its own: such an index is read as one with a check for each extent.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from tierzero.errors import CheckpointError

_FIRST_WITH_CHECKS = 3
_NAMED = 3
"""Parameters that a message names, of many."""


@dataclass(frozen=True)
class Extent:
    """Elements ``[start, stop)`` of ``segment`` of ``parameter``: ``nbytes`` at byte ``offset`` of the rank's data
    file.
    """

    parameter: str
    segment: str
    start: int
    stop: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Check:
    """``nbytes`` at byte ``offset`` of the rank's data file have this xxh3_64, as hex."""

    offset: int
    nbytes: int
    digest: str

    @classmethod
    def of(cls, offset: int, raw: bytes | memoryview) -> Check:
        """Of the bytes ``raw``, which stand at ``offset``."""
        return cls(offset, len(raw), xxhash.xxh3_64_hexdigest(raw))

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes

    def matches(self, raw: bytes | memoryview) -> bool:
        return len(raw) == self.nbytes and xxhash.xxh3_64_hexdigest(raw) == self.digest


@dataclass(frozen=True)
class RankIndex:
    """``checks`` are in order of their place and do not overlap; every extent lies inside one of them."""

    nbytes: int
    rng: dict[str, str]
    extents: list[Extent]
    checks: list[Check]

    @classmethod
    def parsed(cls, value: Mapping[str, Any], version: int, path: Path) -> RankIndex:
        """From the object in the file ``path``. Raises CheckpointError where it is none of this ``version``."""
        try:
            if version < _FIRST_WITH_CHECKS:
                extents, checks = _with_own_digests(value["extents"])
            else:
                extents = [Extent(**entry) for entry in value["extents"]]
                checks = [Check(**entry) for entry in value["checks"]]
            checks.sort(key=lambda check: check.offset)
            found = cls(int(value["nbytes"]), dict(value.get("rng", {})), extents, checks)
            found._check_ranges()
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the index is damaged: {error}") from None
        return found

    def _check_ranges(self) -> None:
        for one, other in itertools.pairwise(self.checks):
            if one.end > other.offset:
                raise ValueError(f"two checksums are of byte {other.offset:,}")
        for extent in self.extents:
            self.check_of(extent)

    @cached_property
    def _offsets(self) -> list[int]:
        return [check.offset for check in self.checks]

    def check_of(self, extent: Extent) -> Check:
        """The check that the extent lies in. Raises ValueError where there is none."""
        if extent.nbytes == 0:
            return Check.of(extent.offset, b"")
        place = bisect_right(self._offsets, extent.offset) - 1
        if place < 0 or extent.end > self.checks[place].end:
            raise ValueError(f"no checksum is of bytes {extent.offset:,} to {extent.end:,}")
        return self.checks[place]

    def inside(self, check: Check) -> list[Extent]:
        """What is lost where its bytes are damaged."""
        return [e for e in self.extents if e.nbytes and check.offset <= e.offset and e.end <= check.end]


def _with_own_digests(entries: Iterable[Mapping[str, Any]]) -> tuple[list[Extent], list[Check]]:
    extents, checks = [], []
    for entry in entries:
        values = dict(entry)
        digest = values.pop("xxh3")
        extents.append(Extent(**values))
        if extents[-1].nbytes:
            checks.append(Check(extents[-1].offset, extents[-1].nbytes, digest))
    return extents, checks


def index_as_json(
    nbytes: int, rng: Mapping[str, str], extents: Iterable[Extent], checks: Iterable[Check]
) -> dict[str, Any]:
    """The object that is written, extents and checks in order of their place."""
    return {
        "extents": [asdict(extent) for extent in sorted(extents, key=lambda extent: extent.offset)],
        "checks": [asdict(check) for check in sorted(checks, key=lambda check: check.offset)],
        "rng": dict(rng),
        "nbytes": nbytes,
    }


def arrays_of(extents: Iterable[Extent]) -> tuple[list[str], list[str]]:
    """The segments and the parameters that the extents are of, in order and once each."""
    extents = list(extents)
    return list(dict.fromkeys(e.segment for e in extents)), list(dict.fromkeys(e.parameter for e in extents))


def named(segments: list[str], parameters: list[str]) -> str:
    """For messages."""
    names = ", ".join(repr(name) for name in parameters[:_NAMED])
    more = f" and {len(parameters) - _NAMED} more" if len(parameters) > _NAMED else ""
    return f"{', '.join(segments)} of {names}{more}"
