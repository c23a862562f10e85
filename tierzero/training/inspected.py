"""What ``tierzero inspect`` shows: one checkpoint, those in a folder, or what is sealed in tier files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.inspection import CheckpointSummary, Damage, inspect_checkpoint, verify_checkpoint
from ..checkpoint.manifest import MANIFEST, standing_folder
from ..checkpoint.output import ByteProgress
from ..checkpoint.sealed_inspection import SealedState, sealed_states
from ..errors import CheckpointError
from . import checkpoints
from .text import amount, count

_Progress = ByteProgress | None


@dataclass(frozen=True)
class Inspected:
    """A checkpoint: what it holds, if that can be read, and why not, or what is wrong with it."""

    path: Path
    summary: CheckpointSummary | None
    problem: str | None
    damage: tuple[Damage, ...] | None
    """What a verification has found; None without one."""

    @property
    def step(self) -> int | None:
        """Where the checkpoint cannot say, its name may."""
        return self.summary.step if self.summary is not None else checkpoints.step_in_name(self.path)

    @property
    def is_whole(self) -> bool:
        """As far as was looked."""
        return self.problem is None and not self.damage

    def as_json(self, tensors: bool) -> dict[str, Any]:
        """One JSON object, with the list of ``tensors`` or without."""
        found: dict[str, Any] = {"path": str(self.path), "complete": self.is_whole, "step": self.step}
        if self.summary is not None:
            found |= {key: value for key, value in self.summary.as_json().items() if tensors or key != "tensors"}
        if self.problem is not None:
            found["problem"] = self.problem
        if self.damage is not None:
            found["damage"] = [asdict(damage) for damage in self.damage]
        return found

    def lines(self, tensors: bool) -> Iterator[str]:
        """For a person."""
        if self.summary is not None:
            yield from _described(self.summary)
            if tensors:
                yield from _table(self.summary)
        yield from (f"damage      {damage}" for damage in self.damage or ())
        if self.damage is not None and self.is_whole:
            yield "verified    every checksum matches"

    def line(self) -> str:
        """In a list of several."""
        state = "whole" if self.damage is not None else "complete"
        if not self.is_whole:
            more = f", {len(self.damage) - 1} more" if self.damage and len(self.damage) > 1 else ""
            state = f"damaged: {self.damage[0] if self.damage else self.problem}{more}"
        return f"step {self.step}  {self.path}  {state}"


def several(path: Path) -> list[Path]:
    """The checkpoints in the folder ``path``; none where it is itself one, or holds none."""
    return [] if (standing_folder(path) / MANIFEST).exists() else checkpoints.all_in(path)


def inspected(path: Path, verify: bool, progress: _Progress) -> Inspected:
    """Raises ConfigError where no checkpoint is, and CheckpointError for an incomplete one that is not verified."""
    if not verify:
        return Inspected(path, inspect_checkpoint(path), None, None)
    damage = tuple(verify_checkpoint(path, progress))
    summary = None
    try:
        summary = inspect_checkpoint(path)
    except CheckpointError:
        assert damage
    return Inspected(path, summary, None, damage)


def listed(path: Path, verify: bool, progress: _Progress) -> Inspected:
    """As `inspected`, but raises nothing: one checkpoint of several."""
    try:
        return inspected(path, verify, progress)
    except (CheckpointError, ValueError) as error:
        return Inspected(path, None, str(error), None)


def _described(summary: CheckpointSummary) -> Iterator[str]:
    ranks = f"{summary.world_size} rank{'s' if summary.world_size > 1 else ''}"
    yield f"checkpoint  {summary.path}: step {summary.step}, {ranks}, format {summary.format_version}"
    dtypes = ", ".join(f"{count(elements)} {dtype}" for dtype, elements in summary.dtypes.items())
    yield f"parameters  {summary.parameters} with {count(summary.elements)} elements: {dtypes}"
    segments = ", ".join(f"{segment} {amount(nbytes)}" for segment, nbytes in summary.segment_bytes.items())
    yield f"data        {amount(sum(summary.segment_bytes.values()))}: {segments}"
    for number, group in enumerate(summary.optimizer or ()):
        values = ", ".join(f"{key} {value}" for key, value in group.items() if key != "parameters")
        yield f"group {number:<5} {group['parameters']} parameters: {values}"
    if summary.optimizer is None:
        yield "optimizer   none"
    yield f"extra       {', '.join(summary.extra) or 'nothing'}"


def _table(summary: CheckpointSummary) -> Iterator[str]:
    width = max((len(tensor.name) for tensor in summary.tensors), default=0)
    for tensor in summary.tensors:
        kind = "buffer" if tensor.step is None else f"step {tensor.step}" if tensor.trainable else "frozen"
        tied = f"  also {', '.join(tensor.tied)}" if tensor.tied else ""
        yield f"{tensor.name:<{width}}  {tensor.shape}  {tensor.dtype}  {kind}{tied}"


def sealed_on(paths: list[Path]) -> list[SealedState]:
    """What is sealed in the lasting tier files on these drives, unless the first is a checkpoint."""
    return [] if (standing_folder(paths[0]) / MANIFEST).exists() else sealed_states(paths)


def sealed_lines(state: SealedState) -> Iterator[str]:
    """For a person."""
    ranks = ", ".join(map(str, state.ranks))
    yield from (f"tier files  {folder}{ranks}" for folder in state.folders)
    if state.layout is not None and state.slots is not None:
        seen = f"{len(state.ranks)} of {state.world_size} ranks, {len(state.folders)} of {state.drives_in_all} drives"
        yield f"sealed      step {state.step}, seal {state.number}: its record is on all that was looked at, {seen}"
        tile, block, shares = (state.layout[key] for key in ("tile", "block_size", "shares"))
        yield f"layout      tile {tile:,}, blocks of {amount(block)}, shares {', '.join(map(str, shares))}"
        yield f"slots       {state.slots[0]} objects in the first, {state.slots[1]} in the second"
    elif not state.problems:
        yield "sealed      nothing to go on from"
    yield from (f"damage      {problem}" for problem in state.problems)
