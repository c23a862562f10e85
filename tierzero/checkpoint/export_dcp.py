"""From a checkpoint to a folder that ``torch.distributed.checkpoint.load`` reads, block by block."""

from __future__ import annotations

import os
from pathlib import Path

from tierzero.checkpoint.output import ByteProgress, check_space, check_unused, failures_named, new_folder
from tierzero.checkpoint.tensors import CheckpointTensors


def export_dcp(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    weights: str = "trained",
    progress: ByteProgress | None = None,
) -> None:
    """Writes the weights and persistent buffers of a checkpoint as a ``torch.distributed.checkpoint`` folder ``out``,
    under the names of the model's ``state_dict()``: a tied parameter under each of its names.

    ``dtype`` and ``weights`` as for `export_safetensors`. Memory is a few extents, and every checksum is verified. The
    folder appears whole or not at all. Raises ConfigError, before anything is written, for a bad argument, anything
    that stands at ``out`` already or too little space (BudgetError), and CheckpointError for a damaged checkpoint or a
    failing drive.
    """
    from tierzero.checkpoint.dcp_writing import write_dcp

    target = Path(out)
    check_unused(target)
    with CheckpointTensors(checkpoint, dtype, weights) as source:
        named = {name: tensor for tensor in source.tensors for name in tensor.names}
        check_space(target, sum(tensor.nbytes for tensor in named.values()))
        with failures_named(target), new_folder(target) as staging:
            write_dcp(staging, source, named, progress)
