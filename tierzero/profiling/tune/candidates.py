"""What `tierzero tune` tries: single changes of the keys that a configuration leaves open, and their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tierzero.config import Config
from tierzero.config.rules import parse_size
from tierzero.config.toml import toml_text
from tierzero.profiling.tune.halving import Scored

Value = int | str

MOST_COMBINED = 3
"""Combinations that are tried of the changes that helped."""


@dataclass(frozen=True)
class Candidate:
    """Changed keys, "section.key" each; none: the configuration as it is."""

    changes: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{key} = {toml_text(value)}" for key, value in self.changes) or "as configured"

    def settings(self) -> dict[str, dict[str, Any]]:
        """The changes by section and key."""
        found: dict[str, dict[str, Any]] = {}
        for dotted, value in self.changes:
            section, key = dotted.split(".")
            found.setdefault(section, {})[key] = value
        return found


@dataclass(frozen=True)
class Facts:
    """What a run of the configuration does on this machine, as far as it decides what a change can matter for."""

    on_host: bool
    """It computes on the host's processor."""
    uses_nvme: bool
    moves_tiles: bool
    gathers: bool
    """Units are gathered into memory of their own, not used where they lie."""
    tile: int
    prefetch: int
    threads: int
    units: int
    largest_shard: int
    """Elements."""
    micro_steps: int
    overlap: str
    """What the update runs beside, as the run has it."""
    may_try: bool
    """There are tiles that the backward can try."""


OPTIONS: dict[str, tuple[Value, ...]] = {
    "optimizer.overlap": ("backward", "both", "forward", "none"),
    "tiers.tile": (1 << 21, 1 << 19, 1 << 22, 1 << 18, 1 << 20, 1 << 17, 1 << 16),
    "io.queue_depth": (16, 4, 32, 8),
    "io.block_size": ("4MiB", "16MiB", "2MiB", "8MiB"),
    "tiers.prefetch": (3, 1, 4, 2),
}
"""For each key the values that are tried where they differ from what runs now, in the order in which time is spent on
them. `train.threads` depends on the machine, see `_threads`."""
_TILE_RANGE = 4
"""A tile is tried up to so many times larger or smaller than the one that runs."""


def open_candidates(config: Config, facts: Facts) -> list[Candidate]:
    """Every single change worth trying: the first of every key, then the second, and so on."""
    columns = [[Candidate(((key, value),)) for value in values] for key, values in _open_options(config, facts).items()]
    return [candidate for row in zip_longest(*columns) for candidate in row if candidate is not None]


def left_alone(config: Config, facts: Facts) -> list[str]:
    """The keys that could matter but were set by the user."""
    return [key for key in _sensible(config, facts) if _is_set(config, key)]


def combinations(scored: Sequence[Scored[Candidate]]) -> list[Candidate]:
    """Of the changes that helped, the best of each key: the two best together, the three best, and all of them."""
    best: dict[str, tuple[str, Value]] = {}
    for each in sorted(scored, key=lambda each: each.ratio):
        if each.ratio < 1 and len(each.candidate.changes) == 1:
            best.setdefault(each.candidate.changes[0][0], each.candidate.changes[0])
    changes = list(best.values())
    sizes = sorted({2, 3, len(changes)} & set(range(2, len(changes) + 1)))
    return [Candidate(tuple(changes[:size])) for size in sizes[:MOST_COMBINED]]


def _open_options(config: Config, facts: Facts) -> dict[str, list[Value]]:
    found = {key: values for key, values in _sensible(config, facts).items() if not _is_set(config, key)}
    return {key: values for key, values in found.items() if values}


def _is_set(config: Config, key: str) -> bool:
    """Whether the user gave it a value; "auto" leaves it open."""
    section, name = key.split(".")
    return name in config.given().get(section, {}) and getattr(getattr(config, section), name) not in (None, "auto")


def _sensible(config: Config, facts: Facts) -> dict[str, list[Value]]:
    """The values other than the present one, of the keys that can matter for what this configuration does."""
    tiles = [
        value
        for value in OPTIONS["tiers.tile"]
        if isinstance(value, int)
        and facts.tile // _TILE_RANGE <= value <= facts.tile * _TILE_RANGE
        and value <= facts.largest_shard
    ]
    now: dict[str, tuple[bool, Value, Sequence[Value]]] = {
        "optimizer.overlap": (True, facts.overlap, _overlaps(config, facts)),
        "train.threads": (facts.on_host, facts.threads, _threads(facts.threads)),
        "tiers.tile": (facts.moves_tiles, facts.tile, tiles),
        "io.queue_depth": (facts.uses_nvme, config.io.queue_depth, OPTIONS["io.queue_depth"]),
        "io.block_size": (facts.uses_nvme, config.io.block_size, OPTIONS["io.block_size"]),
        "tiers.prefetch": (
            facts.gathers,
            facts.prefetch,
            [value for value in OPTIONS["tiers.prefetch"] if int(value) < facts.units],
        ),
    }
    return {
        key: [value for value in values if _plain(key, value) != present]
        for key, (matters, present, values) in now.items()
        if matters
    }


def _plain(key: str, value: Value) -> Value | None:
    return parse_size(value) if key == "io.block_size" else value


def _overlaps(config: Config, facts: Facts) -> list[Value]:
    can = {
        "backward": config.train.grad_clip == 0 and config.train.precision != "fp16" and facts.micro_steps == 1,
        "both": facts.may_try,
    }
    return [value for value in OPTIONS["optimizer.overlap"] if can.get(str(value), True)]


def _threads(cores: int) -> list[Value]:
    """Fewer than one for each core: those left over are for the updates and the I/O that run beside."""
    return [count for count in dict.fromkeys((cores - 1, cores * 3 // 4, cores // 2)) if 0 < count < cores]
