"""TierZero: train models larger than the memory of the machine, with ZeRO-3 shards over device, host and NVMe tiers."""

from __future__ import annotations

from tierzero.api import averaged, close, full_state_dict, offload, reload, shard, stats
from tierzero.checkpoint import (
    discard_sealed,
    export_dcp,
    export_safetensors,
    finish_checkpoint,
    import_safetensors,
    inspect_checkpoint,
    load_checkpoint,
    load_safetensors,
    resume,
    save_checkpoint,
    seal,
    verify_checkpoint,
)
from tierzero.config import Config
from tierzero.empty import empty_init
from tierzero.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    NotResidentError,
    RankLostError,
    RankMismatchError,
    TierError,
    TierZeroError,
)
from tierzero.optim.clip import clip_grad_norm_
from tierzero.optim.optimizer import Adam, AdamW
from tierzero.optim.scaler import LossScaler
from tierzero.reaching import gathered, local_elements, read_state, write_state
from tierzero.records import Recording, record

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "LossScaler",
    "NotResidentError",
    "RankLostError",
    "RankMismatchError",
    "Recording",
    "TierError",
    "TierZeroError",
    "__version__",
    "averaged",
    "clip_grad_norm_",
    "close",
    "discard_sealed",
    "empty_init",
    "export_dcp",
    "export_safetensors",
    "finish_checkpoint",
    "full_state_dict",
    "gathered",
    "import_safetensors",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "local_elements",
    "offload",
    "read_state",
    "record",
    "reload",
    "resume",
    "save_checkpoint",
    "seal",
    "shard",
    "stats",
    "verify_checkpoint",
    "write_state",
]
