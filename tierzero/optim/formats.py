"""What the state of a parameter consists of for each training precision, and the fp32 master in and out of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tierzero.errors import ConfigError

Moments = Literal["fp32", "bf16", "int8"]
"""How m and v are stored."""

_CHUNK = 4 << 20
"""Elements converted at a time: bounds the temporaries of a conversion to a few such chunks."""


@dataclass(frozen=True)
class Segment:
    """One array of a parameter's optimizer state: its name, element type, and how many neighbouring elements of the
    parameter share one of its values.
    """

    name: str
    dtype: torch.dtype
    per: int = 1

    def values(self, elements: int) -> int:
        """Of ``elements`` of a parameter."""
        return -(-elements // self.per)

    def nbytes(self, elements: int) -> int:
        """Bytes of the values of ``elements`` of a parameter."""
        return self.values(elements) * self.dtype.itemsize

    def part(self, elements: slice) -> slice:
        """The values of a range of elements, which begins at a multiple of ``per``."""
        assert elements.start % self.per == 0
        return slice(elements.start // self.per, self.values(elements.stop))


@dataclass(frozen=True)
class StateFormat:
    """How weight and optimizer state of a parameter are stored; ``optimizer`` is in storage order. ``moments`` says how
    its segments hold m and v.
    """

    name: str
    weight_dtype: torch.dtype
    optimizer: tuple[Segment, ...]
    moments: Moments = "fp32"

    @property
    def moment_segments(self) -> tuple[Segment, ...]:
        """Those that hold m and v; all of them 0: both are."""
        return _MOMENTS[self.moments]

    @property
    def block(self) -> int:
        """Elements that share a value of some segment: what holds a parameter's state begins at multiples of this in
        the parameter.
        """
        return max(segment.per for segment in self.optimizer)

    @property
    def is_averaged(self) -> bool:
        """The average of the weights is kept, as the last segment; see `tierzero.optim.average`."""
        return self.optimizer[-1] == AVERAGE

    @functools.cached_property
    def updated(self) -> tuple[Segment, ...]:
        """The optimizer segments that the Adam update reads and writes."""
        return self.optimizer[:-1] if self.is_averaged else self.optimizer

    def optimizer_bytes(self, elements: int) -> int:
        """Bytes of all optimizer segments of ``elements`` together (the weight is not among them)."""
        return sum(segment.nbytes(elements) for segment in self.optimizer)

    def places(self, elements: int) -> list[tuple[Segment, int]]:
        """Each segment and its first byte where those of ``elements``, a multiple of `block`, lie one after another."""
        found, start = [], 0
        for segment in self.optimizer:
            found.append((segment, start))
            start += segment.nbytes(elements)
        return found

    def cut(self, parts: Mapping[str, torch.Tensor], elements: slice) -> dict[str, torch.Tensor]:
        """Views of the segments' values of a range of elements, which begins at a multiple of `block`."""
        return {
            segment.name: parts[segment.name][segment.part(elements)]
            for segment in self.optimizer
            if segment.name in parts
        }


AVERAGE = Segment("ema", torch.float32)

BLOCK = 128
"""Elements of a parameter that share the scales of int8 moments."""

_MASTERS: dict[torch.dtype, tuple[str, tuple[Segment, ...]]] = {
    # The master is split: the bf16 weight is its upper half, rounded to nearest, and lo the signed rest.
    torch.bfloat16: ("bf16", (Segment("lo", torch.int16),)),
    torch.float32: ("fp32", ()),
    torch.float16: ("fp16", (Segment("master", torch.float32),)),
}
_MOMENTS: dict[Moments, tuple[Segment, ...]] = {
    "fp32": (Segment("m", torch.float32), Segment("v", torch.float32)),
    "bf16": (Segment("m", torch.bfloat16), Segment("v", torch.bfloat16)),
    "int8": (
        Segment("m", torch.int8),
        Segment("v", torch.uint8),
        Segment("m_scale", torch.float32, BLOCK),
        Segment("v_scale", torch.float32, BLOCK),
    ),
}


@functools.cache
def state_format(dtype: torch.dtype, moments: Moments = "fp32") -> StateFormat:
    """Return the format of parameters whose weight has ``dtype`` and whose moments are stored as ``moments``.

    Raises ``ConfigError`` for a dtype that cannot be trained.
    """
    found = _MASTERS.get(dtype)
    if found is None:
        raise ConfigError(
            f"parameters of dtype {dtype} cannot be trained: use torch.bfloat16, torch.float32 or torch.float16"
        )
    name, master = found
    return StateFormat(name, dtype, (*master, *_MOMENTS[moments]), moments)


@functools.cache
def with_average(fmt: StateFormat) -> StateFormat:
    """The format with the average of the weights as one more segment."""
    return replace(fmt, optimizer=(*fmt.optimizer, AVERAGE))


def check_state(
    fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], names: tuple[str, ...]
) -> None:
    """Check that ``weight`` and the named ``parts`` are contiguous 1-D tensors of the format's dtypes and of lengths
    that fit together.

    Raises ``ValueError`` that names the offending tensor.
    """
    wanted = {segment.name: segment for segment in fmt.optimizer}
    check_vector("weight", weight, fmt.weight_dtype, weight.numel())
    for name in names:
        if name not in parts:
            raise ValueError(f"{fmt.name} state lacks segment {name!r}: it has {sorted(parts)}")
        check_vector(name, parts[name], wanted[name].dtype, wanted[name].values(weight.numel()))


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    """Check one contiguous 1-D tensor; raises ``ValueError``."""
    if tensor.dim() != 1 or tensor.numel() != length or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous 1-D {dtype} tensor of {length} elements, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        )


def join_master(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 weight and its int16 rest: ``bits = (hi << 16) + lo``. Any shape, any device."""
    bits = hi.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(lo).view(torch.float32)


def split_master(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    """Write fp32 ``master`` as bf16 ``hi`` and int16 ``lo``, by the rule of ``bits.split``. Any shape, any device."""
    bits = master.view(torch.int32)
    upper = bits.add(0x8000).bitwise_right_shift_(16)
    rest = bits - upper.bitwise_left_shift(16)
    nan = master.isnan()
    upper = torch.where(nan, bits.bitwise_right_shift(16).bitwise_or_(0x40), upper)
    hi.view(torch.int16).copy_(upper)
    lo.copy_(rest.masked_fill_(nan, 0))


def load_master(fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the fp32 master weights as a new tensor of the shape of ``weight``, on its device.

    ``weight`` is 1-D of ``fmt.weight_dtype``; ``parts`` holds at least the segments that the master needs (bf16:
    ``lo``, fp16: ``master``). Exact. Raises ``ValueError`` for tensors that do not fit the format.
    """
    needed = master_segments(fmt)
    check_state(fmt, weight, parts, needed)
    if not needed:
        return weight.detach().clone()
    if fmt.name == "fp16":
        return parts["master"].detach().clone()
    master = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    for start in range(0, weight.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        master[piece] = join_master(weight.detach()[piece], parts["lo"][piece])
    return master


def store_master(
    fmt: StateFormat, master: torch.Tensor, weight: torch.Tensor, parts: Mapping[str, torch.Tensor]
) -> None:
    """Set ``weight`` and the master's segments in ``parts`` from fp32 ``master``, so that ``load_master`` returns it
    again.

    Exact but for NaN, which stays a NaN of its sign in a split master. Moments are left as they are. Raises
    ``ValueError`` for tensors that do not fit the format.
    """
    needed = master_segments(fmt)
    check_state(fmt, weight, parts, needed)
    check_vector("master", master, torch.float32, weight.numel())
    weight, master = weight.detach(), master.detach()
    if fmt.name == "bf16":
        for start in range(0, weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            split_master(master[piece], weight[piece], parts["lo"][piece])
        return
    weight.copy_(master)
    if fmt.name == "fp16":
        parts["master"].copy_(master)


def master_segments(fmt: StateFormat) -> tuple[str, ...]:
    """Names of the segments that the master is made of, beside the weight or (fp16) in its place."""
    return tuple(segment.name for segment in fmt.optimizer if segment.name in ("lo", "master"))
