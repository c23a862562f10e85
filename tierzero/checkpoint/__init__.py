"""Sharded checkpoints of a model and its optimizer."""

from tierzero.checkpoint.load import load_checkpoint
from tierzero.checkpoint.save import finish_checkpoint, save_checkpoint
from tierzero.checkpoint.sealed import resume, seal

__all__ = ["finish_checkpoint", "load_checkpoint", "resume", "save_checkpoint", "seal"]
