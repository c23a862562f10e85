"""What a machine can do: the figures that step times are predicted from, measured (`tierzero bench`) or from data
sheets.

All rates are per second, bytes or operations as the name says. Host memory, drives and cores are those of a node; its
ranks share them. A device's figures are those of one rank.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from tierzero.errors import ConfigError
from tierzero.planner.machines import bundled_names, bundled_text

FORMAT = "tierzero-machine"
VERSION = 1
Dtype = Literal["bf16", "fp16", "fp32"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Host(_Part):
    """The memory and the cores of a node."""

    name: str
    cores: PositiveInt
    memory_bytes: PositiveInt
    copy_bytes: PositiveFloat
    """Bytes copied from host memory to host memory, read and written counted once."""


class Accelerator(_Part):
    """A device with memory of its own, one of ``count`` equal ones in a node."""

    name: str
    count: PositiveInt
    memory_bytes: PositiveInt
    to_device: PositiveFloat
    """Bytes from pinned host memory, alone."""
    to_host: PositiveFloat
    both: PositiveFloat
    """Bytes in both directions together."""
    pageable: PositiveFloat | None = None
    """Bytes from host memory that is not pinned."""


class MatmulRate(_Part):
    """Of ``rows`` through weights from width/2 to 2 ``width`` and back, as in an MLP, forward and backward: on all the
    cores of the node, or on one device.
    """

    rows: int = Field(gt=0, le=1 << 40)
    width: int = Field(gt=0, le=1 << 40)
    flops: PositiveFloat


class AttentionRate(_Part):
    """Of fused causal attention over sequences of ``length``, counted as if it were not causal."""

    length: PositiveInt
    flops: PositiveFloat


class ComputeRates(_Part):
    """What forward and backward are made of, in one data type, on all the cores of the node or on one device."""

    matmul: tuple[MatmulRate, ...] = Field(min_length=1)
    attention: tuple[AttentionRate, ...] = Field(min_length=1)
    pointwise_bytes: PositiveFloat
    """Read and written by elementwise operations on tensors as large as activations are."""
    operation_s: float = Field(default=0.0, ge=0)
    """Seconds that an operation takes however small it is."""

    def matmul_flops(self, rows: float, width: float) -> float:
        """The rate of ``rows`` through a weight whose sides have the geometric mean ``width``: from the four known
        sizes that are nearest by the logarithm.
        """
        near = sorted((math.hypot(math.log(r.rows / rows), math.log(r.width / width)), r.flops) for r in self.matmul)[
            :4
        ]
        if near[0][0] < 1e-6:
            return near[0][1]
        weights = [1 / distance**2 for distance, _ in near]
        return sum(weight * flops for weight, (_, flops) in zip(weights, near, strict=True)) / sum(weights)

    def attention_flops(self, length: float) -> float:
        """The rate over sequences of ``length``."""
        return _between([(rate.length, rate.flops) for rate in self.attention], length)


class Drive(_Part):
    """One path for tier files, through the I/O engine as the runtime uses it."""

    name: str
    read: PositiveFloat
    write: PositiveFloat
    mixed: PositiveFloat
    """Bytes read and written together, half of each, at once."""


class CollectiveRate(_Part):
    """A message of ``nbytes`` (the whole tensor), and the bytes of it per second."""

    nbytes: PositiveInt
    rate: PositiveFloat


class Network(_Part):
    """Collectives between ``ranks`` ranks; each list is by size of the message."""

    backend: str
    ranks: PositiveInt
    all_gather: tuple[CollectiveRate, ...] = Field(min_length=1)
    reduce_scatter: tuple[CollectiveRate, ...] = Field(min_length=1)
    all_reduce: tuple[CollectiveRate, ...] = Field(min_length=1)
    between_nodes: PositiveFloat | None = None
    """Bytes that one node sends to others, one direction."""


class MachineProfile(_Part):
    """A machine, or a node of a cluster."""

    name: str
    date: str
    source: str
    """How the figures were come by: by measurement, or the documents that state them."""
    host: Host
    device: Accelerator | None = None
    """None: the host's cores compute, and the device tier is host memory."""
    compute: dict[Dtype, ComputeRates]
    adam: dict[PositiveInt, PositiveFloat] = Field(min_length=1)
    """Parameters updated by so many threads: bf16 training state, casts included."""
    drives: tuple[Drive, ...] = ()
    gradients: PositiveFloat | None = None
    """Gradients taken over from autograd with their squares on all cores, in parameters; None: as elementwise work."""
    striped: Drive | None = None
    """All drives together, where there are several and it was measured."""
    network: Network | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a profile, or takes the bundled one of that name where there is no such file, which a warning says.
        Raises ConfigError with the file and what is wrong in it.
        """
        file = Path(path)
        if not file.exists():
            value = _bundled(os.fspath(path))
            warnings.warn(f"{file}: no such file here; using the profile of that name from TierZero", stacklevel=2)
            return cls.from_json(value, str(file))
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the machine profile: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{file}: not a machine profile: {error}; write one with tierzero bench all --save"
            ) from None
        return cls.from_json(value, str(file))

    @classmethod
    def from_json(cls, value: Any, source: str) -> Self:
        """``source``: for messages. Raises ConfigError."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ConfigError(f"{source}: not a machine profile; write one with tierzero bench all --save")
        if value.get("version") != VERSION:
            raise ConfigError(
                f"{source}: a machine profile of version {value.get('version')}; this TierZero reads {VERSION}: "
                "measure again with tierzero bench all --save"
            )
        try:
            return cls.model_validate({key: part for key, part in value.items() if key not in ("format", "version")})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{source}: {where}: {first['msg']}; measure again with tierzero bench all --save"
            ) from None

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **self.model_dump(mode="json")}

    def adam_rate(self, threads: int) -> float:
        """Parameters per second with so many threads, or the nearest fewer that were measured."""
        fewer = [number for number in self.adam if number <= threads]
        return self.adam[max(fewer) if fewer else min(self.adam)]

    def all_drives(self) -> Drive | None:
        """The drives as one: as measured, or their sums."""
        if self.striped is not None or len(self.drives) < 2:
            return self.striped or (self.drives[0] if self.drives else None)
        sums = {kind: sum(getattr(drive, kind) for drive in self.drives) for kind in ("read", "write", "mixed")}
        return Drive(name=" + ".join(drive.name for drive in self.drives), **sums)


def bundled_profile(name: str) -> MachineProfile:
    """A profile that comes with TierZero (`bundled_names`). Raises ConfigError."""
    return MachineProfile.from_json(_bundled(name), name)


def _bundled(name: str) -> Any:
    text = bundled_text(name)
    if text is None:
        raise ConfigError(
            f"{name}: there is no such machine profile, neither a file nor one that comes with TierZero "
            f"({', '.join(bundled_names())}); write one with tierzero bench all --save"
        )
    return json.loads(text)


def rate_at(rates: Sequence[CollectiveRate], nbytes: float) -> float:
    """Of a message of ``nbytes``: between two sizes by the logarithm of the size, outside them that of the nearest."""
    return _between([(rate.nbytes, rate.rate) for rate in rates], nbytes)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    known = sorted(points)
    if at <= known[0][0] or at >= known[-1][0]:
        return (known[0] if at <= known[0][0] else known[-1])[1]
    upper = next(number for number, (place, _) in enumerate(known) if place >= at)
    (left, low), (right, high) = known[upper - 1], known[upper]
    return low + math.log(at / left) / math.log(right / left) * (high - low)
