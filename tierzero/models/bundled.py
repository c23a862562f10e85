"""The model of a configuration."""

from __future__ import annotations

from tierzero.config import Config

from .gpt import GPT


def bundled_model(config: Config) -> GPT:
    """The GPT that ``[model]`` describes, made wherever and in whatever dtype is PyTorch's default at the time."""
    section = config.model
    return GPT(
        section.dim,
        section.layers,
        section.heads,
        section.vocab,
        config.train.seq_len,
        tied=section.tied,
        dropout=section.dropout,
    )
