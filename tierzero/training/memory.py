"""Resident set of this process."""

from __future__ import annotations

import resource
import sys

import psutil


def rss_bytes() -> int:
    """Bytes resident now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The most bytes that were ever resident.

    From VmHWM where the system has it: getrusage's figure starts with that of the program that started this one.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
