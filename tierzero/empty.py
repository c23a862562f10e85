"""Building a model whose parameters take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def empty_init() -> Iterator[None]:
    """Inside, modules register their parameters without memory (on the meta device); buffers are built as usual.

    ``tierzero.shard`` fills the model afterwards, one unit at a time. The parameter objects stay the same, so tied
    weights stay tied. Nesting is harmless.
    """
    original = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:
            # The values the constructor allocated were never touched, so they never took memory either.
            torch.utils.swap_tensors(param, nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad))

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
