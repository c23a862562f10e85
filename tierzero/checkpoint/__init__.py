"""Sharded checkpoints of a model and its optimizer."""

from tierzero.checkpoint.load import load_checkpoint
from tierzero.checkpoint.save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
