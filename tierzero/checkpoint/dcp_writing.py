"""Writing tensors with ``torch.distributed.checkpoint``, each block read when it is written.

Apart from `export_dcp`, because the import takes as long as that of TierZero itself.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from tierzero.checkpoint.output import ByteProgress
from tierzero.checkpoint.tensors import PIECE, CheckpointTensors, ExportTensor


def write_dcp(
    folder: Path, source: CheckpointTensors, named: dict[str, ExportTensor], progress: ByteProgress | None
) -> None:
    """Writes the tensors by the names that they get. Raises OSError and what `CheckpointTensors.read` does."""
    # Without copy-ahead the loader is the serial one; the other collects several blocks at once where there is a GPU.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is asked to be
            save(shapes, storage_writer=writer, planner=_Planner(source, named, progress), no_dist=True)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        # A write that fails breaks the archive that torch.save is about to end, and it reports only that.
        hidden = failure.__context__
        raise (hidden if isinstance(hidden, OSError) else failure) from None


class _Planner(DefaultSavePlanner):
    """Plans tensors in blocks, and reads each block when it is written."""

    def __init__(
        self, source: CheckpointTensors, named: dict[str, ExportTensor], progress: ByteProgress | None
    ) -> None:
        super().__init__()
        self._source, self._named, self._progress = source, named, progress
        self._total = sum(tensor.nbytes for tensor in named.values())
        self._done = 0

    def create_local_plan(self) -> SavePlan:
        items = [item for name, tensor in self._named.items() for item in _items(name, tensor)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of a block, in its shape. Raises what `CheckpointTensors.read` does."""
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        tensor = self._named[write_item.index.fqn]
        start = sum(at * math.prod(tensor.shape[dim + 1 :]) for dim, at in enumerate(chunk.offsets))
        values = self._source.read(tensor, start, start + math.prod(chunk.sizes))
        self._done += values.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return values.view(chunk.sizes)


def _items(name: str, tensor: ExportTensor) -> Iterator[WriteItem]:
    properties = TensorProperties(dtype=tensor.dtype)
    for offsets, sizes in blocks(tensor.shape, PIECE):
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        yield WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(tensor.shape)),
        )


def blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of blocks that divide a tensor, each of ``most`` elements at most and contiguous in it."""
    if math.prod(shape) <= most:
        yield (0,) * len(shape), shape
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= most)
    inner = shape[dim + 1 :]
    rows = max(1, most // math.prod(inner))
    for leading in itertools.product(*map(range, shape[:dim])):
        for first in range(0, shape[dim], rows):
            sizes = (1,) * dim + (min(rows, shape[dim] - first), *inner)
            yield (*leading, first, *(0,) * len(inner)), sizes
