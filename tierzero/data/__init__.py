"""What a model is trained on: files of text or token ids, cut into deterministic batches."""

from __future__ import annotations

from .corpus import DataSplit, open_data
from .permutation import permute
from .source import TokenSource
from .stream import TokenFile, TokenStream

__all__ = ["DataSplit", "TokenFile", "TokenSource", "TokenStream", "open_data", "permute"]
