"""Configurations of DeepSpeed: what each key becomes here, or why it is not needed."""

from __future__ import annotations

from .draft import Added, Entry
from .rules import Outcome
from .translation import Translation, translate

__all__ = ["Added", "Entry", "Outcome", "Translation", "translate"]
