"""What a compiler that runs over a model (``torch.compile``) must not look into: its graphs end there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def out_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, of which nothing is ever compiled, nor of what it calls. Only its first call imports the compiler:
    that takes a second, which commands that run no model do not have to wait.
    """
    return _disable_dynamo(function)


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, of which nothing is compiled, but of what it calls. Imports the compiler."""
    hidden: Callable[P, R] = torch.compiler.disable(function, recursive=False, reason="TierZero moves weights here")
    return hidden


class OutOfGraphs:
    """A context whose two ends are out of graphs; what is inside may be compiled."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        self._context = context

    @out_of_graphs
    def __enter__(self) -> None:
        self._context.__enter__()

    @out_of_graphs
    def __exit__(self, *raised: Any) -> bool | None:
        return self._context.__exit__(*raised)
