"""What the state of a parameter consists of for each training precision, and the fp32 master in and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tierzero.errors import ConfigError

_CHUNK = 4 << 20
"""Elements converted at a time: bounds the temporaries of a conversion to a few such chunks."""


@dataclass(frozen=True)
class Segment:
    """One array of a parameter's optimizer state: its name and element type."""

    name: str
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per parameter."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class StateFormat:
    """How weight and optimizer state of a parameter are stored; ``optimizer`` is in storage order."""

    name: str
    weight_dtype: torch.dtype
    optimizer: tuple[Segment, ...]

    @property
    def optimizer_itemsize(self) -> int:
        """Bytes per parameter of all optimizer segments together (the weight is not among them)."""
        return sum(segment.itemsize for segment in self.optimizer)

    @property
    def itemsize(self) -> int:
        """Bytes per parameter of weight and optimizer segments."""
        return self.weight_dtype.itemsize + self.optimizer_itemsize


_M = Segment("m", torch.float32)
_V = Segment("v", torch.float32)
_FORMATS: dict[torch.dtype, StateFormat] = {
    # The master is split: the bf16 weight is its upper half, rounded to nearest, and lo the signed rest.
    torch.bfloat16: StateFormat("bf16", torch.bfloat16, (Segment("lo", torch.int16), _M, _V)),
    torch.float32: StateFormat("fp32", torch.float32, (_M, _V)),
    torch.float16: StateFormat("fp16", torch.float16, (Segment("master", torch.float32), _M, _V)),
}


def state_format(dtype: torch.dtype) -> StateFormat:
    """Return the format of parameters whose weight has ``dtype``.

    Raises ``ConfigError`` for a dtype that cannot be trained.
    """
    found = _FORMATS.get(dtype)
    if found is None:
        raise ConfigError(
            f"parameters of dtype {dtype} cannot be trained: use torch.bfloat16, torch.float32 or torch.float16"
        )
    return found


def check_state(
    fmt: StateFormat, weight: torch.Tensor, parts: Mapping[str, torch.Tensor], names: tuple[str, ...]
) -> None:
    """Check that ``weight`` and the named ``parts`` are contiguous 1-D tensors of one length and of the format's
    dtypes.

    Raises ``ValueError`` that names the offending tensor.
    """
    wanted = {segment.name: segment.dtype for segment in fmt.optimizer}
    check_vector("weight", weight, fmt.weight_dtype, weight.numel())
    for name in names:
        if name not in parts:
            raise ValueError(f"{fmt.name} state lacks segment {name!r}: it has {sorted(parts)}")
        check_vector(name, parts[name], wanted[name], weight.numel())


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
    needed = _master_segments(fmt)
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
    needed = _master_segments(fmt)
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


def _master_segments(fmt: StateFormat) -> tuple[str, ...]:
    return tuple(segment.name for segment in fmt.optimizer if segment.name in ("lo", "master"))
