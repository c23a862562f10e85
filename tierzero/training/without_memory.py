"""The bundled model and its loss, for whoever runs them on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import Config
from ..models import bundled_model
from ..runtime.draft import DTYPES


def model_and_loss(
    config: Config, micro_batch: int
) -> tuple[Callable[[], torch.nn.Module], Callable[[torch.nn.Module], torch.Tensor]]:
    """What makes the model in ``train.precision``, and what runs it on a micro-batch of so many sequences."""

    def build() -> torch.nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[config.train.precision])
        try:
            return bundled_model(config)
        finally:
            torch.set_default_dtype(before)

    def run(model: torch.nn.Module) -> torch.Tensor:
        ids = torch.zeros(micro_batch, config.train.seq_len, dtype=torch.int64)
        loss: torch.Tensor = model(ids, ids)
        return loss

    return build, run
