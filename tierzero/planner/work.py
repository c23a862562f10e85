"""What a step computes, unit by unit, as counts that a machine's rates turn into seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierzero.planner.machine import ComputeRates


@dataclass(frozen=True)
class OperationCounts:
    """``matmuls``: floating-point operations of products, by the rows that go through a weight and the geometric mean
    of its sides. ``attention``: those of fused attention, as if it were not causal, by the length of the sequence.
    ``pointwise``: bytes that all else reads and writes. ``operations``: how many there are.
    """

    matmuls: Counter[tuple[int, float]] = field(default_factory=Counter)
    attention: Counter[int] = field(default_factory=Counter)
    pointwise: float = 0.0
    operations: int = 0

    def __add__(self, other: OperationCounts) -> OperationCounts:
        return OperationCounts(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.pointwise + other.pointwise,
            self.operations + other.operations,
        )

    @property
    def flops(self) -> float:
        """Floating-point operations of products and attention."""
        return float(sum(self.matmuls.values()) + sum(self.attention.values()))

    def seconds(self, rates: ComputeRates) -> float:
        """Alone on the machine, one operation after another."""
        products = sum(flops / rates.matmul_flops(*size) for size, flops in self.matmuls.items())
        attention = sum(flops / rates.attention_flops(length) for length, flops in self.attention.items())
        return products + attention + self.pointwise / rates.pointwise_bytes + self.operations * rates.operation_s


@dataclass(frozen=True)
class Visit:
    """A stretch of a forward or backward between two changes of unit. ``counts`` are those of the unit alone, not of
    units inside it.

    ``uses_weights``: any operation reads a weight; the backward of an embedding does not. ``entered``: bytes of the
    tensors that a unit is called with. ``transient``: bytes that are alive at most during it beyond those at its begin;
    ``kept``: beyond them at its end. Weights do not count, their gradients until they are complete.
    """

    unit: int
    counts: OperationCounts
    transient: int
    kept: int
    entered: int = 0
    uses_weights: bool = True

    def followed_by(self, other: Visit) -> Visit:
        """Both as one; they are of the same unit."""
        return Visit(
            self.unit,
            self.counts + other.counts,
            max(self.transient, self.kept + other.transient),
            self.kept + other.kept,
            self.entered + other.entered,
            self.uses_weights or other.uses_weights,
        )


@dataclass(frozen=True)
class ModelWork:
    """One micro-batch: ``forward`` and ``backward`` in their order, without recomputation. ``peak``: bytes of
    activations that are alive at most.
    """

    forward: tuple[Visit, ...]
    backward: tuple[Visit, ...]
    peak: int

    @property
    def flops(self) -> float:
        """Of forward and backward."""
        return total(self.forward).flops + total(self.backward).flops


def total(visits: Iterable[Visit]) -> OperationCounts:
    """Of all visits together."""
    return sum((visit.counts for visit in visits), OperationCounts())
