"""The record of a run in a folder: figures of every step, and the timelines of some. `docs/formats.md` describes it."""

from __future__ import annotations

from tierzero.records.recording import Recording, record

__all__ = ["Recording", "record"]
