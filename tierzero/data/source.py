"""Batches as a function of the step: the same for every number of ranks, and resumable from the step alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError
from .permutation import permute
from .stream import TokenStream, unfit_token


class TokenSource:
    """Cuts a stream into windows of ``seq_len`` tokens (plus the target of the last one) and deals them out.

    Every window is seen once per epoch, in an order drawn from ``seed`` and the epoch. A step's global batch is
    ``batch_size`` windows; rank r of W takes the r-th part of it, so ranks never share one and the batch does not
    depend on the number of ranks or micro-batches.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, batch_size: int, vocab: int, seed: int) -> None:
        if len(stream) < seq_len + 1:
            raise ConfigError(
                f"{stream.key}: {len(stream)} tokens are too few, a sequence takes {seq_len + 1} (train.seq_len + 1); "
                "add data or lower train.seq_len"
            )
        self.stream = stream
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.vocab = vocab
        self.seed = seed
        self.windows = (len(stream) - 1) // seq_len

    def batch(
        self, step: int, micro_step: int, micro_batch: int, rank: int, world_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one forward of one rank, int64 ``[micro_batch, seq_len]`` each. Steps count from 0."""
        if self.batch_size % world_size or (self.batch_size // world_size) % micro_batch:
            raise ValueError(f"{world_size} ranks x micro-batch {micro_batch} do not divide batch {self.batch_size}")
        share = self.batch_size // world_size
        if not (0 <= rank < world_size and 0 <= micro_step < share // micro_batch):
            raise IndexError(f"micro-step {micro_step} of rank {rank}")
        first = step * self.batch_size + rank * share + micro_step * micro_batch
        return self._tensors(self._starts(range(first, first + micro_batch)))

    def spread(
        self, number: int, batches: int, micro_batch: int, rank: int, world_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One of ``batches`` fixed micro-batches spread evenly over the stream, for validation; shapes as ``batch``."""
        total = batches * micro_batch * world_size
        first = (number * world_size + rank) * micro_batch
        windows = [(first + k) * self.windows // total for k in range(micro_batch)]
        return self._tensors([window * self.seq_len for window in windows])

    def _starts(self, samples: range) -> list[int]:
        """Where in the stream each sample of the run (counted over all steps and ranks) begins."""
        # The tokens that do not fill a window come in by shifting the grid from epoch to epoch.
        slack = (len(self.stream) - 1) % self.seq_len
        starts: list[int] = []
        while samples:
            epoch, position = divmod(samples[0], self.windows)
            now = samples[: self.windows - position]
            positions = np.arange(position, position + len(now))
            shift = int(permute(epoch % (slack + 1), slack + 1, self.seed)[0])
            starts.extend((permute(positions, self.windows, self.seed, epoch) * self.seq_len + shift).tolist())
            samples = samples[len(now) :]
        return starts

    def _tensors(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows: npt.NDArray[np.int64] = np.stack([self.stream.read(start, self.seq_len + 1) for start in starts])
        if int(rows.max()) >= self.vocab:
            row, column = (int(where[0]) for where in np.nonzero(rows >= self.vocab))
            position = self.stream.start + starts[row] + column
            raise unfit_token(self.stream.key, int(rows[row, column]), self.vocab, f"token {position} of the data")
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
