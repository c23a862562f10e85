"""What a killed run leaves on its drives: copies of the tier files at chosen moments, without killing anything.

A moment is when something has just changed the files or what is current of them. The copy is made while the engine's
loop stands still, so that nothing is begun, or known to have ended, between its first byte and its last: a process that
is killed may leave exactly that.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tierzero as tz
from tierzero.api import running
from tierzero.runtime import sealing
from tierzero.tiers import TieredStore

from .oracle import Case, Outcome, built, hyper, record_state, seeded_loss, sharded
from .sealing import durable_settings
from .trials import wait_for_trials
from .zoo import Block, Stack, regression


class Skipping(Stack):
    """Leaves its second block out where ``skips`` says so."""

    skips = False

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if index != 1 or not self.skips:
                x = block(x)
        return self.last(x)


CASE = Case(lambda: Skipping(4), regression, (Block,))


@dataclass(frozen=True)
class Plan:
    """What happens in which step."""

    steps: int = 6
    clips: Collection[int] = ()
    spoiled: Collection[int] = ()
    """A gradient is not a number, and the user leaves the step out."""
    skips: Collection[int] = ()
    """A unit is not used."""
    backwards: int = 1
    unsealed: Collection[int] = ()
    patient: bool = True
    """Each step comes when all that can be tried before it is done."""
    prefetch: int = 1
    """0: the update of a unit that is left out is begun with the backward."""
    slow: str = ""
    """A method of the store that takes its time: ``page_in``, and so updates, or ``sync``, and so seals."""


@dataclass
class Life:
    """One process's part of a run."""

    outcome: Outcome = field(default_factory=Outcome)
    first: int = 0
    """The step that it began with."""
    kept: int = 0
    lost: int = 0


@contextmanager
def on_durable_tiers(root: Path, overlap: str, prefetch: int = 1) -> Iterator[tuple[Any, Any, int]]:
    """Model, optimizer and the step that follows what is sealed in ``root``. Folders side by side are of one run."""
    keys = [f"checkpoint.dir={root.parent / 'checkpoints'}", f"tiers.prefetch={prefetch}"]
    settings = durable_settings(root, overlap).override(keys)
    with sharded(built(CASE), settings, CASE.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(CASE))
        extra = tz.resume(model, optimizer)
        yield model, optimizer, 0 if extra is None else extra["step"]


def live(root: Path, overlap: str, plan: Plan, rank: int = 0, seals: bool = True) -> Life:
    """Goes on from what is sealed in ``root`` to the end of the plan."""
    life = Life()
    with slowed(plan.slow), on_durable_tiers(root, overlap, plan.prefetch) as (model, optimizer, life.first):
        for step in range(life.first, plan.steps):
            life.outcome.losses.append(take_step(model, optimizer, plan, step, rank))
            if seals and step not in plan.unsealed:
                tz.seal(model, optimizer, {"step": step + 1})
        record_state(model, life.outcome)
        speculation = running(model).updater.speculation
        life.kept, life.lost = speculation.kept, speculation.lost
    return life


def take_step(model: Any, optimizer: Any, plan: Plan, step: int, rank: int) -> float:
    model.skips = step in plan.skips
    for half in range(plan.backwards):
        loss = seeded_loss(CASE, model, 10 * step + half, rank)
        (loss * float("nan") if step in plan.spoiled else loss).backward()
    if plan.patient:
        let_try(model)
    tz.clip_grad_norm_(model, 0.01 if step in plan.clips else 1e6)
    if step not in plan.spoiled:
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def let_try(model: Any) -> None:
    """Returns when nothing is left to be tried."""
    sealer = running(model).sealer
    assert sealer is not None
    if sealer.under_way is not None:
        sealer.under_way.result()
    wait_for_trials(model)


def copy_tiers(root: Path, image: Path, rank: int = 0) -> None:
    """Of one rank. Call it where the engine's loop stands still."""
    for folder in (root / "nvme" / "tierzero").glob(f"*-rank-{rank}"):
        shutil.copytree(folder, image / "nvme" / "tierzero" / folder.name)


@contextmanager
def slowed(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if name == "page_in":
            page_in = TieredStore.page_in

            async def later(*args: Any, **kwargs: Any) -> Any:
                await asyncio.sleep(0.01)
                return await page_in(*args, **kwargs)

            patch.setattr(TieredStore, name, later)
        if name == "sync":
            sync = TieredStore.sync
            patch.setattr(TieredStore, name, lambda store: (time.sleep(0.05), sync(store)))
        yield


@dataclass
class Moments:
    """Copies ``root`` at each of the moments ``chosen``, by number or, of a kind, as (kind, number)."""

    root: Path
    chosen: Collection[int | tuple[str, int]]
    seen: list[str] = field(default_factory=list)
    sealed: int = 0
    images: list[tuple[Path, int]] = field(default_factory=list)
    """Each with the number of seals that were complete."""
    rank: int = 0
    after_image: Callable[[], None] = lambda: None

    def __call__(self, kind: str) -> None:
        self.seen.append(kind)
        if len(self.seen) in self.chosen or (kind, self.seen.count(kind)) in self.chosen:
            image = self.root.with_name(f"{self.root.name}-image-{len(self.images)}")
            copy_tiers(self.root, image, self.rank)
            self.images.append((image, self.sealed))
            self.after_image()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("write_spare", "page_out"):
                patch.setattr(TieredStore, name, self._after_async(getattr(TieredStore, name), name))
            adopt_spare = self._after(TieredStore.adopt_spare, "adopt_spare")
            patch.setattr(TieredStore, "adopt_spare", staticmethod(adopt_spare))
            patch.setattr(TieredStore, "seal", self._after(TieredStore.seal, "seal"))
            for name in ("write_record", "remove_records"):
                patch.setattr(sealing, name, self._after(getattr(sealing, name), name))
            yield

    def _after(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.sealed += kind == "seal"
            self(kind)
            return result

        return followed

    def _after_async(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        async def followed(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)
            self(kind)
            return result

        return followed
