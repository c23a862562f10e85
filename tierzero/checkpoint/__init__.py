"""Sharded checkpoints of a model and its optimizer."""

from tierzero.checkpoint.load import load_checkpoint
from tierzero.checkpoint.save import finish_checkpoint, save_checkpoint

__all__ = ["finish_checkpoint", "load_checkpoint", "save_checkpoint"]
