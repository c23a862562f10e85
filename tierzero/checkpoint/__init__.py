"""Sharded checkpoints of a model and its optimizer, and ways from and to the files of other programs."""

from tierzero.checkpoint.export import export_safetensors
from tierzero.checkpoint.export_dcp import export_dcp
from tierzero.checkpoint.import_safetensors import import_safetensors
from tierzero.checkpoint.inspection import inspect_checkpoint, verify_checkpoint
from tierzero.checkpoint.load import load_checkpoint
from tierzero.checkpoint.load_weights import load_safetensors
from tierzero.checkpoint.save import finish_checkpoint, save_checkpoint
from tierzero.checkpoint.sealed import discard_sealed, resume, seal

__all__ = [
    "discard_sealed",
    "export_dcp",
    "export_safetensors",
    "finish_checkpoint",
    "import_safetensors",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "resume",
    "save_checkpoint",
    "seal",
    "verify_checkpoint",
]
