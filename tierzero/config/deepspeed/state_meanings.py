"""What DeepSpeed's stage, offload and I/O keys mean here: stage, placement, tier folders."""

from __future__ import annotations

import os
from typing import Any

from ..rules import absolute
from .draft import Draft
from .rules import Outcome

_ZERO = "zero_optimization"
_TIER = {"cpu": "host", "nvme": "nvme"}
_OLD = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
_LARGEST_DEPTH = 256
_ABSENT = "DeepSpeed's stage without the key"
_RESIDENT = "nothing is offloaded there: it stays on the device"


def translate_state(draft: Draft) -> None:
    """``zero_optimization`` and ``aio``."""
    stage = _stage(draft)
    optimizer, params = _device(draft, "offload_optimizer"), _device(draft, "offload_param")
    _place_optimizer(draft, stage, optimizer)
    _place_params(draft, stage, params)
    _folders(draft, {"offload_optimizer": optimizer, "offload_param": params})
    _io(draft)


def _stage(draft: Draft) -> int:
    whole = draft.value(_ZERO)
    if isinstance(whole, bool):  # the oldest form of all
        draft.set(_ZERO, "sharding.stage", int(whole))
        return int(whole)
    key = f"{_ZERO}.stage"
    value = draft.value(key)
    if value is None:
        draft.add("sharding.stage", 0, _ABSENT)
        return 0
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        draft.refuse(key, "must be 0, 1, 2 or 3")
        return 0
    draft.set(key, "sharding.stage", int(value))
    return int(value)


def _device(draft: Draft, section: str) -> tuple[str, str] | None:
    """The key that offloads, and the tier that it names."""
    key, old = f"{_ZERO}.{section}.device", f"{_ZERO}.{_OLD[section]}"
    value = draft.value(key)
    if value is None:
        if draft.flag(old, False):
            return old, "host"
        draft.tell(old, Outcome.NOT_NEEDED, "nothing is offloaded by it")
        return None
    draft.tell(old, Outcome.NOT_NEEDED, f"{section}.device says it")
    if value == "none":
        draft.tell(key, Outcome.NOT_NEEDED, "nothing is offloaded by it")
        return None
    if not isinstance(value, str) or value not in _TIER:
        draft.refuse(key, 'must be "none", "cpu" or "nvme"')
        return None
    return key, _TIER[value]


def _place_optimizer(draft: Draft, stage: int, device: tuple[str, str] | None) -> None:
    if device is None:
        draft.add("placement.optimizer", "device", _RESIDENT)
        draft.add("placement.gradients", "device", _RESIDENT)
        draft.tell(f"{_ZERO}.offload_optimizer.ratio", Outcome.NOT_NEEDED, "nothing is offloaded")
        return
    key, tier = device
    _split(draft, key, tier)
    # What a stage keeps whole is kept on the device, here and there.
    gradients = "device" if stage == 1 else "host"
    draft.put("placement.gradients", gradients, key)
    below = tier == "nvme" and stage < 3
    why = "DeepSpeed keeps it in host memory below stage 3; here it is on NVMe" if below else ""
    outcome = Outcome.DIFFERS if below else Outcome.MAPPED
    draft.tell(key, outcome, why, "placement.optimizer", "placement.gradients")


def _split(draft: Draft, key: str, tier: str) -> None:
    """The optimizer's placement, with Twin-Flow's fraction."""
    name = f"{_ZERO}.offload_optimizer.ratio"
    ratio = draft.number(name)
    if ratio is not None and not 0 <= ratio <= 1:
        draft.refuse(name, "must be from 0 to 1")
        ratio = None
    draft.put("placement.optimizer", tier, key)
    if ratio is None or ratio == 1:
        draft.tell(name, Outcome.NOT_NEEDED, "all of it is offloaded")
        return
    rest = round(1 - ratio, 12)
    draft.set(name, "placement.optimizer", {"device": rest, tier: round(1 - rest, 12)} if ratio else "device")


def _place_params(draft: Draft, stage: int, device: tuple[str, str] | None) -> None:
    if device is None or device[1] != "nvme":
        draft.tell(f"{_ZERO}.offload_param.max_in_cpu", Outcome.NOT_NEEDED, "acts with device nvme only")
    if device is None:
        draft.add("placement.params", "device", _RESIDENT)
        return
    key, tier = device
    if stage == 3:
        draft.put("placement.params", tier, key)
        draft.tell(key, Outcome.MAPPED, "", "placement.params")
        return
    why = f"weights are whole on every rank at stage {stage} and stay on the device, as there; stage 3 offloads them"
    draft.set(key, "placement.params", "device", why)


def _folders(draft: Draft, devices: dict[str, tuple[str, str] | None]) -> None:
    folders: dict[str, None] = {}
    keys = []
    for section, device in devices.items():
        key = f"{_ZERO}.{section}.nvme_path"
        path = draft.value(key)
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if device is None or device[1] != "nvme" or draft.values.get(_target(section)) in ("device", "host"):
            draft.tell(key, Outcome.NOT_NEEDED, "nothing is offloaded to NVMe by it")
            continue
        if not isinstance(path, str) or not path.strip() or "\0" in path or path == "auto":
            draft.refuse(key, "must be the folder for the tier files")
            continue
        folders[_absolute(draft, key, path)] = None
        keys.append(key)
    for key in keys:
        note = "both kinds of state are striped over both folders" if len(folders) > 1 else ""
        draft.set(key, "tiers.nvme", list(folders), note)


def _target(section: str) -> str:
    return "placement.optimizer" if section == "offload_optimizer" else "placement.params"


def _absolute(draft: Draft, key: str, path: str) -> str:
    """Absolute, because nobody knows where the TOML file will stand."""
    try:
        return str(absolute(path, draft.given.base))
    except RuntimeError:  # "~name" of nobody
        draft.refuse(key, "has no such home directory")
        return path


def _io(draft: Draft) -> None:
    size = draft.number("aio.block_size", whole=True)
    if size is not None:
        if size % 4096 or not 4096 <= size <= 2**30:
            why = "not a multiple of 4096 up to 1 GiB: the default of io.block_size is kept"
            draft.tell("aio.block_size", Outcome.DIFFERS, why, "io.block_size")
        else:
            small = size < 2**20
            note = "chosen for another engine: the default here is 8 MiB; measure before you keep it" if small else ""
            draft.set("aio.block_size", "io.block_size", size, note)
    _depth(draft)


def _depth(draft: Draft) -> None:
    threads_key = "aio.intra_op_parallelism" if draft.has("aio.intra_op_parallelism") else "aio.thread_count"
    depth, threads = draft.number("aio.queue_depth", whole=True), draft.number(threads_key, whole=True)
    given: dict[str, Any] = {"aio.queue_depth": depth, threads_key: threads}
    for key, value in given.items():
        if value is not None and value < 1:
            draft.refuse(key, "must be 1 or more")
            return
    used = [key for key in (threads_key, "aio.queue_depth") if given[key] is not None]
    wanted = (depth or 8) * (threads or 1)  # 8: what DeepSpeed takes without the key
    note = f"{wanted} requests in flight: {_LARGEST_DEPTH} at most per path" if wanted > _LARGEST_DEPTH else ""
    for key in used:
        draft.set(key, "io.queue_depth", min(wanted, _LARGEST_DEPTH), note)
    if threads_key == "aio.intra_op_parallelism":
        draft.tell("aio.thread_count", Outcome.NOT_NEEDED, "intra_op_parallelism says it")
