"""What of TierZero is in use on this machine, and why what is not in use is not."""

from __future__ import annotations

import os
import platform
import resource
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from tierzero import __version__
from tierzero.config import Config
from tierzero.errors import ConfigError
from tierzero.optim import loops
from tierzero.profiling.bench.names import block_device, cores
from tierzero.tiers import PAGE, StripedFile, TierDirectory, free_bytes
from tierzero.tiers.free_memory import available_bytes, total_bytes
from tierzero.training.text import amount


@dataclass(frozen=True)
class Finding:
    """One part. ``active``: it is in use as it is meant to be; ``text`` says how, or why not and what to do."""

    part: str
    active: bool
    text: str


@dataclass(frozen=True)
class Here:
    findings: tuple[Finding, ...]

    def lines(self) -> list[str]:
        width = max(len(found.part) for found in self.findings)
        return [f"{found.part:<{width}}  {'on ' if found.active else 'off'}  {found.text}" for found in self.findings]

    def as_json(self) -> dict[str, Any]:
        return {found.part: {"active": found.active, "text": found.text} for found in self.findings}


def look(config: Config) -> Here:
    """Every part, and each of the paths in ``tiers.nvme``, where a page is written and removed."""
    paths = [_path(path) for path in config.tiers.nvme] or [Finding("nvme", False, "tiers.nvme names no folder")]
    return Here((_versions(), _device(), _locking(), _memory(), _cores(config), _kernels(), *paths))


def _versions() -> Finding:
    text = f"Python {platform.python_version()}, PyTorch {torch.__version__}, Numba {version('numba')}"
    return Finding("tierzero", True, f"{__version__}, {text}")


def _device() -> Finding:
    if torch.cuda.is_available():
        return Finding("device", True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    built = torch.version.cuda or torch.version.hip
    why = f"this PyTorch is built for {built}, but sees no GPU" if built else "this PyTorch is built for CPUs only"
    return Finding("device", False, f"{why}; the device tier is host memory")


def _locking() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "no limit" if limit == resource.RLIM_INFINITY else f"at most {amount(limit)} by ulimit -l"
    if not torch.cuda.is_available():
        return Finding("page locking", False, f"not needed without a GPU ({said})")
    return Finding("page locking", True, f"of host buffers ({said}); what cannot be locked is copied more slowly")


def _memory() -> Finding:
    total, machine = total_bytes(), int(psutil.virtual_memory().total)
    whose = f"a control group allows, of the machine's {amount(machine)}" if total < machine else "there are"
    return Finding("host memory", True, f"{amount(available_bytes())} free of the {amount(total)} that {whose}")


def _cores(config: Config) -> Finding:
    asked = os.environ.get("OMP_NUM_THREADS")
    threads = (
        f"train.threads = {config.train.threads}" if config.train.threads else f"OMP_NUM_THREADS {asked or 'unset'}"
    )
    return Finding("cores", True, f"{cores()} of the machine's {os.cpu_count()}; {threads}")


def _kernels() -> Finding:
    where = getattr(loops.adam_bf16._cache, "cache_path", None)
    if where is None or not os.access(where if os.path.isdir(where) else os.path.dirname(where), os.W_OK):
        why = "no folder can be written to" if where is None else f"{where} cannot be written to"
        text = f"compiled again by every process, as {why}; set NUMBA_CACHE_DIR to a writable folder"
        return Finding("kernels", False, text)
    return Finding("kernels", True, f"compiled by Numba at first use, kept in {where}")


def _path(path: Path) -> Finding:
    part = f"nvme {path}"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            directory = TierDirectory.open(path, 0)
            try:
                direct = _is_direct(directory)
            finally:
                directory.close()
    except ConfigError as error:
        return Finding(part, False, str(error))
    where = f"{block_device(path).title}, {amount(free_bytes(path))} free"
    if direct:
        return Finding(part, True, f"with O_DIRECT; {where}")
    return Finding(part, False, f"{' '.join(str(each.message) for each in said)} ({where})")


def _is_direct(directory: TierDirectory) -> bool:
    file = StripedFile([directory], PAGE, block_size=PAGE)
    try:
        return file.direct[0]
    finally:
        file.close()
