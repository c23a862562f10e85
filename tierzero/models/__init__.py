"""The bundled model: plain PyTorch, which knows nothing of tiers or ranks."""

from __future__ import annotations

from .bundled import bundled_model
from .gpt import GPT, Block
from .loss import cross_entropy

__all__ = ["GPT", "Block", "bundled_model", "cross_entropy"]
