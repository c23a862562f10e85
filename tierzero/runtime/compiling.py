"""``train.compile``: the forwards of blocks, compiled.

Importing this imports PyTorch's compiler, which takes a second or two; only a model that is to be compiled does so. A
unit's weights are inputs of its compiled forward, and what that keeps of them for the backward goes through the hooks
of `tierzero.runtime.forward`, as in a forward that is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

from tierzero.errors import ConfigError
from tierzero.sharding.collectives import World

Forward = Callable[..., Any]

INDUCTOR = "inductor"
_OPTIONS: dict[str, dict[str, Any]] = {
    # Random numbers from PyTorch's own generators: dropout draws what it draws without compiling.
    INDUCTOR: {"fallback_random": True}
}


def compiled(forward: Forward, title: str, backend: str = INDUCTOR) -> Forward:
    """``forward``, compiled when it is called first, and again for arguments of another kind. Modules of one class
    share the result. ``title`` names it in the error: ConfigError where the compiler fails.
    """
    fast = _compile(forward, backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except (BackendCompilerFailed, InternalTorchDynamoError) as error:
            raise ConfigError(
                f"train.compile: {title!r} cannot be compiled ({_reason(error)}); set train.compile = false"
            ) from error

    return run


def check_compiler(world: World, device: torch.device, backend: str = INDUCTOR) -> None:
    """A trial, whose result is cached. Raises ConfigError on all ranks where it fails on one."""
    reasons: list[str | None] = [_why_not(device, backend)]
    if world.size > 1:
        mine, reasons = reasons[0], [None] * world.size
        dist.all_gather_object(reasons, mine, group=world.group)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            where = f" on rank {rank}" if world.size > 1 else ""
            raise ConfigError(
                f"train.compile: torch.compile does not work here{where} ({reason}); it needs a C++ compiler such as "
                "g++ (on a GPU Triton too) and a folder for its cache (TORCHINDUCTOR_CACHE_DIR); or set "
                "train.compile = false"
            )


def _why_not(device: torch.device, backend: str) -> str | None:
    try:
        _compile(_trial, backend)(torch.ones(64, device=device))
    except Exception as error:  # whatever a compiler, its headers or its cache may lack
        return _reason(error)
    return None


def _trial(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 1


def _compile(forward: Forward, backend: str) -> Forward:
    found: Forward = torch.compile(forward, backend=backend, options=_OPTIONS.get(backend))
    return found


def _reason(error: BaseException) -> str:
    """The line of a compiler's report that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower()]
    return (telling or lines or [type(error).__name__])[0].rstrip(".:")
