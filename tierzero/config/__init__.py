"""What a user may say: the configuration, validated before anything is allocated."""

from __future__ import annotations

from .config import Config
from .rules import parse_size
from .sections import (
    ActivationsSection,
    CheckpointSection,
    DataSection,
    IoSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    ShardingSection,
    TiersSection,
    TrainSection,
)

__all__ = [
    "ActivationsSection",
    "CheckpointSection",
    "Config",
    "DataSection",
    "IoSection",
    "LogSection",
    "ModelSection",
    "OptimizerSection",
    "PlacementSection",
    "ShardingSection",
    "TiersSection",
    "TrainSection",
    "parse_size",
]
