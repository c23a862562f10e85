"""How many bytes a forward keeps for its backward, found by running it on tensors without memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tierzero.activations.segments import segment_length


@dataclass(frozen=True)
class ActivationBytes:
    """What autograd keeps in one forward, weights not counted: ``around`` the blocks, in each of ``blocks``, and the
    ``inputs`` of each block, which are all that recomputation keeps of it.
    """

    around: int
    blocks: tuple[int, ...]
    inputs: tuple[int, ...]

    def kept(self, recompute: str | int) -> int:
        """Bytes at the end of the forward, for ``activations.recompute``."""
        length = segment_length(recompute, len(self.blocks))
        return self.around + (sum(self.inputs[::length]) if length else sum(self.blocks))

    def peak(self, recompute: str | int) -> int:
        """Bytes while the largest segment has been recomputed for its backward."""
        length = segment_length(recompute, len(self.blocks))
        again = [sum(self.blocks[start : start + length]) for start in range(0, len(self.blocks), length or 1)]
        return self.kept(recompute) + (max(again, default=0) if length else 0)


def activation_bytes(
    build: Callable[[], nn.Module],
    blocks: Callable[[nn.Module], Sequence[nn.Module]],
    run: Callable[[nn.Module], torch.Tensor],
) -> ActivationBytes:
    """``build`` makes the model and ``run`` its loss, both without memory for any tensor; ``blocks`` are the modules
    that recomputation would run again, in the order of their use.
    """
    with FakeTensorMode():
        model = build()
        counter = _Counter(model, blocks(model))
        with saved_tensors_hooks(counter.pack, lambda tensor: tensor):
            loss = run(model)  # held until all is counted: memory that is given back would be counted twice
        return counter.result(loss)


class _Counter:
    """Attributes every memory that is saved to the block that runs when it is first saved."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._weights = {_memory(parameter) for parameter in model.parameters()}
        self._saved: dict[int, tuple[int | None, int]] = {}
        self._inputs = [0] * len(blocks)
        self._running: int | None = None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(self._enter, number), with_kwargs=True)
            block.register_forward_hook(lambda *_: self._leave())

    def _enter(self, number: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = number
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._inputs[number] = sum({_memory(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    def _leave(self) -> None:
        self._running = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _memory(tensor) not in self._weights:
            self._saved.setdefault(_memory(tensor), (self._running, tensor.untyped_storage().nbytes()))
        return tensor

    def result(self, loss: torch.Tensor) -> ActivationBytes:
        assert loss.requires_grad
        totals = dict.fromkeys([None, *range(len(self._inputs))], 0)
        for owner, nbytes in self._saved.values():
            totals[owner] += nbytes
        blocks = tuple(totals[number] for number in range(len(self._inputs)))
        return ActivationBytes(totals[None], blocks, tuple(self._inputs))


def _memory(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
