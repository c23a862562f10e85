"""The ZeRO stages as data: which kinds of training state are divided among the ranks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. What a stage
does not divide, every rank keeps whole where it computes; all else follows from that:

- sharded weights are gathered for each use of a unit; whole ones are kept, and gathered once after they were updated,
  because each rank updates only its part of them;
- sharded gradients pass through a unit's bucket in which they are reduced; of whole ones the memory is the bucket;
- where nothing is sharded, gradients are all-reduced and every rank makes the same update.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("params", "gradients", "optimizer")
"""Kinds of training state, as the sections of a configuration name them."""


@dataclass(frozen=True)
class Stage:
    """One ZeRO stage; ``sharded`` kinds are divided among the ranks."""

    number: int
    sharded: frozenset[str]

    def parts(self, world_size: int) -> int:
        """Shards that a unit's flat state is cut into."""
        return world_size if self.sharded else 1

    @property
    def whole(self) -> frozenset[str]:
        """Kinds that every rank keeps whole beside its shard of the others. None at stage 0: its one shard is all
        there is, and may lie in any tier.
        """
        return frozenset(KINDS) - self.sharded if self.sharded else frozenset()


STAGES = {
    0: Stage(0, frozenset()),
    1: Stage(1, frozenset({"optimizer"})),
    2: Stage(2, frozenset({"optimizer", "gradients"})),
    3: Stage(3, frozenset(KINDS)),
}
