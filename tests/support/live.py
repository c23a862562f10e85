"""What of a computation's memory is still there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Remembers every memory that an operation inside returned; `nbytes` is what of it is still there, but for the
    parameters of ``model``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self._own:
                    self._seen[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def nbytes(self) -> int:
        return sum(nbytes for ref, nbytes in self._seen.items() if not ref.expired())
