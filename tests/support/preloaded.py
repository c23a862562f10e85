"""What the server of `tests.support.forked` imports before it forks."""

from __future__ import annotations

import hypothesis
import numba.np.ufunc
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp

import tierzero.cli.app
import tierzero.optim.loops
import tierzero.optim.loops_int8
import tierzero.training

__all__ = ["hypothesis", "numba", "pytest", "tierzero", "torch"]
