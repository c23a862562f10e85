"""What PyTorch offers to wrap, compile or copy a module with: refused in one line, and the model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tierzero as tz

from ..support.oracle import Case, assert_at_rest, built, config, sharded
from ..support.zoo import Block, Stack, regression, vectors

STACK = Case(Stack, regression, (Block,))
X = vectors(0, 0)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


REFUSED: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "DDP": ("DistributedDataParallel or FSDP", DistributedDataParallel),
    "DDP of a unit": ("DistributedDataParallel or FSDP", lambda m: DistributedDataParallel(m.blocks[0])),
    "fully_shard": ("DistributedDataParallel or FSDP", fully_shard),
    "fully_shard of a layer": ("DistributedDataParallel or FSDP", lambda m: fully_shard(m.blocks[0].up)),
    "fully_shard around it": (
        "DistributedDataParallel or FSDP",
        lambda m: fully_shard(nn.Sequential(m, nn.Linear(2, 2))),
    ),
    "trace": ("torch.jit.trace", lambda m: torch.jit.trace(m, X)),
    "script": ("torch.jit.script", torch.jit.script),
    "script of a unit": ("torch.jit.script", lambda m: torch.jit.script(m.blocks[0])),
    "copy": ("cannot be copied", copy.copy),
    "copy of a unit": ("cannot be copied", lambda m: copy.copy(m.blocks[0])),
    "deepcopy": ("cannot be copied", copy.deepcopy),
    "swap": ("weakref", lambda m: torch.utils.swap_tensors(m.last.weight, nn.Parameter(torch.zeros(24, 24)))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_and_nothing_has_changed(what: str, tmp_path: Path) -> None:
    message, wrap = REFUSED[what]
    with sharded(built(STACK), config(tmp_path), STACK.units) as model:
        wanted = model(X)
        names = list(dict(model.named_parameters()))
        with pytest.raises((tz.TierZeroError, RuntimeError), match=message):
            wrap(model)
        assert list(dict(model.named_parameters())) == names
        assert torch.equal(model(X), wanted)
        assert_at_rest(model)
