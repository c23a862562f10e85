"""Which rank this process is, and the few numbers that ranks exchange beside the training itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..config import Config
from ..errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process among all of them. ``launched``: by torchrun (or alike), so a process group is to be joined."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False

    @classmethod
    def from_environment(cls) -> Ranks:
        """From the variables that torchrun sets; alone where there are none. Raises ConfigError."""
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls()
        world = _variable("WORLD_SIZE", None)
        rank = _variable("RANK", None)
        if not 0 <= rank < world:
            raise ConfigError(
                f"environment: RANK = {rank} does not lie below WORLD_SIZE = {world}; start with torchrun"
            )
        local_world = _variable("LOCAL_WORLD_SIZE", world)
        return cls(rank, world, _variable("LOCAL_RANK", rank % max(1, local_world)), local_world, True)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and reports."""
        return self.rank == 0


def _variable(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"environment: {name} = {text!r} is no whole number; start with torchrun") from None


def micro_batches(config: Config, ranks: Ranks) -> tuple[int, int]:
    """Sequences per forward of one rank, and forwards per step. Raises ConfigError when the batch does not divide."""
    batch, world = config.train.batch_size, ranks.world_size
    if batch % world:
        raise ConfigError(
            f"{config.origin('train.batch_size')}: train.batch_size = {batch} cannot be divided among {world} ranks; "
            f"set it to a multiple of {world} or start another number of ranks"
        )
    share = batch // world
    micro = config.train.micro_batch or share
    if share % micro:
        origin = config.origin("train.micro_batch", "train.batch_size")
        raise ConfigError(
            f"{origin}: train.micro_batch = {micro} does not divide the {share} sequences of a rank "
            f"(train.batch_size = {batch} over {world} ranks); choose one that does"
        )
    return micro, share // micro


def join(ranks: Ranks) -> torch.device:
    """Joins the process group if the process was launched into one; returns the device to compute on."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if ranks.launched and not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    return device


def leave() -> None:
    """Leaves the process group, if in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def total(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over the ranks, in fp64 (exact for byte counts below 2^53)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def from_first(value: str | None, device: torch.device) -> str | None:
    """Rank 0's ``value``, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box: list[str | None] = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    return box[0]


def set_threads(config: Config, ranks: Ranks) -> None:
    """Binds the ranks of a node to cores of their own, and sets PyTorch's threads: as configured, else as
    OMP_NUM_THREADS says, else one per core. After `join`, before any thread is started: threads inherit the cores.
    """
    sharers = 1 if bind_cores(ranks) else ranks.local_world_size
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.train.threads or asked_threads(ranks.local_world_size) or max(1, cores // sharers))


def asked_threads(local_world_size: int) -> int | None:
    """OMP_NUM_THREADS, but for the 1 that torchrun sets for several ranks where nobody has said anything."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # of nested levels, the outermost
    if not asked.isdecimal() or (asked == "1" and local_world_size > 1):
        return None
    return int(asked) or None


def bind_cores(ranks: Ranks) -> bool:
    """Gives this rank its part of the cores that the ranks of the node share, so that compute, kernel and I/O threads
    of one do not disturb another's. Leaves cores alone that a launcher has divided. False: they stay shared.
    """
    if ranks.local_world_size == 1 or not hasattr(os, "sched_setaffinity"):
        return False
    allowed = sorted(os.sched_getaffinity(0))
    here = socket.gethostname()
    answers: list[tuple[str, list[int]]] = [("", [])] * ranks.world_size
    dist.all_gather_object(answers, (here, allowed))
    neighbours = [cores for host, cores in answers if host == here]
    if any(cores != allowed for cores in neighbours):
        return True
    own = core_share(allowed, ranks.local_rank, ranks.local_world_size)
    if own:
        os.sched_setaffinity(0, own)
    return bool(own)


def core_share(cores: Sequence[int], local_rank: int, local_world_size: int) -> list[int]:
    """Neighbouring cores, an equal part for each rank to within one; none where there are fewer cores than ranks."""
    if len(cores) < local_world_size:
        return []
    start, stop = (len(cores) * rank // local_world_size for rank in (local_rank, local_rank + 1))
    return list(cores[start:stop])
