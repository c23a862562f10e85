"""One record per step: what was measured on every rank, put together, and written as a line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ConfigError
from ..records.files import keep_steps, strict_json
from ..runtime.stats import Tries
from . import ranks
from .memory import peak_rss_bytes, rss_bytes

TIERS = ("device", "host", "nvme")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
STALLS = ("nvme_read", "nvme_write", "gather", "optimizer", "host_budget")
AHEAD = ("redone_bytes", "tried_bytes", "kept_bytes", "read_ahead_bytes")
"""What was done ahead of the step or of the next forward, and what of it in vain."""


@dataclass(frozen=True)
class Record:
    """One step. Bytes are summed over the ranks; loss and seconds are their means. Steps count from 1."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    step_s: float
    tokens_per_s: float
    rss_bytes: int
    peak_rss_bytes: int
    tier_bytes: dict[str, int]
    peak_tier_bytes: dict[str, int]
    nvme_read_bytes: int
    nvme_write_bytes: int
    comm_bytes: dict[str, int]
    stall_s: dict[str, float]
    compute_s: float
    loss_scale: float | None = None
    redone_bytes: int = 0
    tried_bytes: int = 0
    kept_bytes: int = 0
    read_ahead_bytes: int = 0
    cold_start_s: float = 0.0
    tries: str | None = None
    clip_factor: float = 1.0

    def to_json(self) -> str:
        """One line of strict JSON: a number that is not finite becomes null."""
        return strict_json(asdict(self))


@dataclass(frozen=True)
class Measured:
    """What one rank saw of a step."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    step_s: float
    loss_scale: float | None


def combine(own: Measured, stats: Mapping[str, Any], device: torch.device, world_size: int) -> Record:
    """The record of a step from every rank's figures. ``own.tokens`` is the global count. Every rank calls it."""
    values = [own.loss, own.step_s, rss_bytes(), peak_rss_bytes(), stats["nvme_read_bytes"], stats["nvme_write_bytes"]]
    values += [stats["tier_bytes"][tier] for tier in TIERS]
    values += [stats["peak_tier_bytes"][tier] for tier in TIERS]
    values += [stats["comm_bytes"][name] for name in COLLECTIVES]
    values += [stats["stall_s"][name] for name in STALLS]
    values += [stats[name] for name in AHEAD]
    values.append(stats["cold_start_s"])
    values += [stats["tries"] == kind for kind in Tries]
    found = iter(ranks.total([float(value) for value in values], device))
    loss, step_s = next(found) / world_size, next(found) / world_size
    rss, peak, read, written = (int(next(found)) for _ in range(4))
    now = {tier: int(next(found)) for tier in TIERS}
    most = {tier: int(next(found)) for tier in TIERS}
    comm = {name: int(next(found)) for name in COLLECTIVES}
    stalls = {name: next(found) / world_size for name in STALLS}
    return Record(
        step=own.step,
        loss=loss,
        grad_norm=own.grad_norm,
        lr=own.lr,
        tokens=own.tokens,
        step_s=step_s,
        tokens_per_s=own.tokens / step_s if step_s > 0 else 0.0,
        rss_bytes=rss,
        peak_rss_bytes=peak,
        tier_bytes=now,
        peak_tier_bytes=most,
        nvme_read_bytes=read,
        nvme_write_bytes=written,
        comm_bytes=comm,
        stall_s=stalls,
        compute_s=max(0.0, step_s - sum(stalls.values())),
        loss_scale=own.loss_scale,
        **{name: int(next(found)) for name in AHEAD},
        cold_start_s=next(found) / world_size,
        tries=Tries.of_ranks([kind for kind in Tries if next(found)]),
        clip_factor=stats["clip_factor"],
    )


class MetricsFile:
    """The file of records. A run resumed after ``resumed`` steps goes on behind them; a new one starts it over.

    Records of later steps, from before the run was interrupted, are dropped: they are made again.
    """

    def __init__(self, path: Path, *, resumed: int = 0) -> None:
        if resumed and path.exists():
            keep_steps(path, resumed)
        self._file: IO[str] = open(path, "a" if resumed else "w", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def write(self, record: Record) -> None:
        """Appends a record, visible at once to whoever follows the file."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def check_writable(path: Path) -> None:
    """Makes the folder of ``path`` and sees that the file can be written, leaving its contents. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"log.metrics: cannot write {path}: {error.strerror or error}") from None
