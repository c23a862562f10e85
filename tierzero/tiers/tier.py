"""The tiers that a byte can live in."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """Where bytes live. The values are the names used in configs, metrics and messages."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
