"""The bundled model. Plain PyTorch: it knows nothing of tiers or ranks."""

from __future__ import annotations

from .gpt import GPT, Block
from .loss import cross_entropy

__all__ = ["GPT", "Block", "cross_entropy"]
