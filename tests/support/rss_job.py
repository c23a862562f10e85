"""Trains with all state on NVMe under small budgets, and prints what it did to this process's memory as JSON.

``python -m tests.support.rss_job NVME`` with bytes throughout; ``baseline`` is the peak of a process that has trained
a tiny sharded model, and run one layer of the large one in plain PyTorch: libraries, activations, autograd's workspace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # the usual name
from torch import nn

import tierzero as tz
from tests.support.models import net
from tests.support.training import Recipe, Result, configured, sharded, take_steps, train_sharded
from tierzero.api import running

DIM, HIDDEN, LAYERS = 512, 2048, 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Tower(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def empty() -> Tower:
    with tz.empty_init():
        return Tower()


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def inputs(step: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, DIM, generator=torch.Generator().manual_seed(step)),)


def plain_passes() -> None:
    """Forward and backward of one layer, without an optimizer."""
    model = Tower(layers=1).bfloat16()
    for step in range(3):
        model(inputs(step)[0].bfloat16()).backward()
        model.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    nvme = Path(sys.argv[1])
    recipe = Recipe(steps=3, groups=False, batches=inputs)
    train_sharded(net(), configured(nvme), Recipe(steps=3))
    forget_peak()
    plain_passes()
    baseline, result = memory("VmHWM"), Result()
    config = configured(nvme, tiers={"device": "32MiB", "host": "20MiB", "tile": 131072})
    forget_peak()
    model = empty()
    with sharded(model, config, recipe, units=(Layer,)) as optimizer:
        filled = memory("VmHWM")
        forget_peak()
        take_steps(model, optimizer, lambda most: tz.clip_grad_norm_(model, most), recipe, result)
        trained = memory("VmHWM")
        pools = {name: (pool.peak, pool.capacity) for name, pool in running(model).pools.items()}
        state = tz.stats(model)["state_bytes"]
    print(
        json.dumps(
            {
                "baseline": baseline,
                "filled": filled,
                "trained": trained,
                "device": config.tiers.device,
                "host": config.tiers.host,
                "state": state,
                "pools": pools,
                "losses": result.losses,
            }
        )
    )


if __name__ == "__main__":
    main()
