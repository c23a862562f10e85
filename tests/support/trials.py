"""What is tried ahead of a step follows from time; tests that look at it wait for it."""

from __future__ import annotations

import asyncio

from torch import nn

from tierzero.api import running
from tierzero.runtime.speculation import Speculation


def wait_for_trials(model: nn.Module) -> None:
    """Until what the backward has begun is done, however busy the machine is. What found no room waits for the step."""
    runtime = running(model)
    runtime.gradients.finish()
    runtime.engine.run(_all_tried(runtime.updater.speculation))


async def _all_tried(speculation: Speculation) -> None:
    quiet = 0
    while quiet < 10:
        await asyncio.sleep(0.001)
        quiet = 0 if any(attempt.running for attempt in speculation._attempts.values()) else quiet + 1
