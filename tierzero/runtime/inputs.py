"""The inputs of a model that was converted to another precision."""

from __future__ import annotations

from typing import Any

import torch


def cast_inputs(
    dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With fp32 tensors in ``dtype`` (None: as they are), also those in tuples, lists and dicts."""
    if dtype is None:
        return args, kwargs

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            return value.to(dtype)
        if type(value) in (tuple, list):
            return type(value)(cast(item) for item in value)
        if type(value) is dict:
            return {key: cast(item) for key, item in value.items()}
        return value

    return tuple(cast(value) for value in args), {key: cast(value) for key, value in kwargs.items()}
