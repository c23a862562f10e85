"""What the optimizer, clipping and the loss scaler ask of the runtime that owns a sharded parameter.

The runtime uses this package's kernels; this package sees the runtime only through these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.optim.hyper import AdamHyper


@dataclass(frozen=True)
class GroupHyper:
    """Hyperparameters of one parameter group of the optimizer, as they are when a step is fixed."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    def at(self, step: int) -> AdamHyper:
        """The update number ``step`` with these hyperparameters. Raises ConfigError where it is not defined."""
        return AdamHyper(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.decoupled, step)


class OwnedParameter(Protocol):
    """A sharded parameter as its owner knows it. ``step`` counts its updates; ``hyper_of`` is that of the newest
    optimizer that has it, ``state_of`` that of the optimizer whose moments are in the tiers (None: of the next that
    steps).
    """

    step: int
    hyper_of: HyperOf | None
    state_of: HyperOf | None

    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> StepOwner: ...


HyperOf = Callable[[Any], GroupHyper | None]
"""Hyperparameters of a parameter; None for one that the optimizer does not have."""


class StepOwner(Protocol):
    """A runtime: it holds the gradients and carries out the updates of its parameters."""

    loss_scale: float
    on_step_skipped: Callable[[bool], None] | None

    @property
    def updates_in_backward(self) -> bool: ...

    def step(self, hyper_of: HyperOf, slots: Iterable[Any]) -> bool: ...

    def zero_grad(self, slots: Sequence[Any] | None = None) -> None: ...

    def clip(self, max_norm: float) -> float: ...

    def with_gradients(self) -> Sequence[OwnedParameter]: ...


def owned(parameter: torch.Tensor) -> OwnedParameter | None:
    """The owner's view of a sharded parameter; None for any other tensor."""
    found: OwnedParameter | None = parameter.__dict__.get("_tierzero")
    return found


def require_dropping(set_to_none: bool) -> None:
    """Raises ConfigError for a ``zero_grad`` that is to leave zeros: those would let a parameter step that gets no
    gradient.
    """
    if not set_to_none:
        raise ConfigError(
            "zero_grad(set_to_none=False): gradients in the tiers are dropped, not set to zero, and a parameter "
            "without one does not step; leave set_to_none out"
        )


def owner_of(model: nn.Module) -> StepOwner:
    """The runtime that owns a sharded model's parameters. Raises ConfigError for any other module."""
    for parameter in model.parameters():
        found = owned(parameter)
        if found is not None:
            return found.owner
    raise ConfigError("this model was not sharded with tierzero.shard, or it has no parameters")


def owner_of_all(parameters: Iterable[torch.Tensor]) -> StepOwner:
    """The runtime that owns ``parameters``, which must be all of its that have gradients. Raises ConfigError."""
    given = [owned(parameter) for parameter in parameters]
    owners = {id(found.owner): found.owner for found in given if found is not None}
    if len(owners) != 1 or None in given:
        raise ConfigError("clip_grad_norm_: takes a model sharded with tierzero.shard, or all of its parameters")
    (owner,) = owners.values()
    missing = [found.name for found in owner.with_gradients() if found not in given]
    if missing:
        raise ConfigError(
            f"clip_grad_norm_: the norm is that of the whole model, but {missing[0]!r} is not among the parameters; "
            "pass the model"
        )
    return owner
