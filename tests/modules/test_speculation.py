"""``optimizer.overlap = "both"``: what is tried in the backward changes nothing, whether it is kept or lost."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running
from tierzero.runtime.trial_rules import Amount, Habit

from ..support.oracle import Case, Outcome, assert_bits, built, config, hyper, record_state, seeded_loss, sharded
from ..support.rank_pool import RankPool
from ..support.training import everything_in
from ..support.trials import wait_for_trials
from ..support.zoo import Block, Stack, regression

STACK = Case(lambda: Stack(4), regression, (Block,))
STEPS = 8


@dataclass(frozen=True)
class Loop:
    """What happens in which step."""

    clips: tuple[int, ...] = ()
    spoiled: tuple[int, ...] = ()
    """A gradient is not a number, and the user leaves the step out."""
    rates: tuple[int, ...] = ()
    """The learning rate is changed between backward and step."""
    backwards: int = 1
    more: tuple[int, ...] = ()
    """One backward more than usual."""
    read: tuple[int, ...] = ()
    """Weights are looked at between backward and step."""
    evaluated: tuple[int, ...] = ()
    """The model is run without a backward between backward and step."""
    saved: tuple[int, ...] = ()
    """A checkpoint is written beside the next step."""
    groups: bool = False
    """Vectors have hyperparameters of their own."""
    waits: bool = True
    """What is tried is let come to its end."""

    def groups_of(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        if not self.groups:
            return [{"params": list(model.parameters())}]
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0}]


def train(rank: int, ranks: int, nvme: str, overlap: str, loop: Loop, sections: dict[str, Any]) -> tuple[Outcome, Any]:
    outcome = Outcome()
    merged: dict[str, Any] = {"train": {"precision": "bf16"}} | sections
    merged["optimizer"] = merged.get("optimizer", {}) | {"overlap": overlap}
    with sharded(built(STACK), config(Path(nvme), **merged), STACK.units) as model:
        optimizer = tz.AdamW(loop.groups_of(model), **hyper(STACK))
        for step in range(STEPS):
            for half in range(loop.backwards + (step in loop.more)):
                loss = seeded_loss(STACK, model, 10 * step + half, rank)
                (loss * float("nan") if step in loop.spoiled else loss).backward()
                outcome.losses.append(loss.item())
                if loop.waits:
                    wait_for_trials(model)
            if step in loop.read:
                tz.read_state(model.blocks[3].up.weight, "weight")
            if step in loop.evaluated:
                with torch.no_grad():
                    outcome.losses.append(seeded_loss(STACK, model, 1000 + step, rank).item())
            outcome.norms.append(float(tz.clip_grad_norm_(model, 0.01 if step in loop.clips else 1e6)))
            optimizer.param_groups[0]["lr"] *= 0.5 if step in loop.rates else 1.0
            if step not in loop.spoiled:
                optimizer.step()
            optimizer.zero_grad()
            if step in loop.saved:
                tz.save_checkpoint(model, optimizer, Path(nvme) / f"{overlap}-{step}", background=True)
        tz.finish_checkpoint(model)
        record_state(model, outcome)
        outcome.norms = [norm if norm == norm else -1.0 for norm in outcome.norms]
        speculation = running(model).updater.speculation
        assert speculation.tried_bytes == speculation.kept_bytes + speculation.lost_bytes
        return outcome, (speculation.kept, speculation.lost, speculation.lost_bytes)


LOOPS = {
    "never clipped": (Loop(), True, False),
    "sometimes clipped": (Loop(clips=(3, 6)), True, True),
    "always clipped": (Loop(clips=tuple(range(STEPS))), False, True),
    "not a number": (Loop(spoiled=(2, 5)), True, True),
    "another rate": (Loop(rates=(4,)), True, True),
    "accumulated": (Loop(backwards=3), True, False),
    "one backward more": (Loop(backwards=2, more=(3, 4)), True, True),
    "looked at": (Loop(read=(3,)), True, True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_no_bit_changes(name: str, tmp_path: Path) -> None:
    loop, some_kept, some_lost = LOOPS[name]
    wanted, _ = train(0, 1, str(tmp_path), "none", loop, {})
    found, (kept, lost, lost_bytes) = train(0, 1, str(tmp_path), "both", loop, {})
    assert_bits(found, wanted)
    assert (kept > 0) == some_kept
    assert (lost > 0) == (lost_bytes > 0) == some_lost


PLACED = {
    "host": {"placement": everything_in("host")},
    "optimizer on the host": {"placement": everything_in("nvme") | {"optimizer": "host"}},
    "weights on the host": {"placement": everything_in("nvme") | {"params": "host"}},
    "weights on the device": {"placement": everything_in("host") | {"params": "device"}},
    "mixed": {"placement": everything_in({"host": 0.5, "nvme": 0.5})},
    "a stated budget": {"placement": everything_in("host"), "tiers": {"host": "1MiB"}},
}


@pytest.mark.parametrize("name", PLACED)
def test_no_bit_changes_wherever_the_state_lives(name: str, tmp_path: Path) -> None:
    loop = Loop(clips=(4,), rates=(6,))
    wanted, _ = train(0, 1, str(tmp_path), "none", loop, PLACED[name])
    found, (kept, lost, _) = train(0, 1, str(tmp_path), "both", loop, PLACED[name])
    assert_bits(found, wanted)
    assert kept > 0
    assert lost > 0


@pytest.mark.parametrize("name", ["sometimes clipped", "accumulated"])
def test_no_bit_changes_on_two_ranks(name: str, tmp_path: Path, two_ranks: RankPool) -> None:
    loop = LOOPS[name][0]
    every = [two_ranks.run(train, str(tmp_path), overlap, loop, {}) for overlap in ("none", "both")]
    for (wanted, _), (found, (kept, _, _)) in zip(*every, strict=True):
        assert_bits(found, wanted)
        assert kept > 0


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_two_optimizers_whose_steps_meet_what_was_tried(tier: str, tmp_path: Path) -> None:
    """The first step fetches its first units, and so takes what was tried for them, while the second one drops what it
    has not fixed.
    """

    def trained(overlap: str) -> Outcome:
        outcome = Outcome()
        settings = config(tmp_path, tier, optimizer={"overlap": overlap})
        with sharded(built(STACK), settings, STACK.units) as model:
            updater = running(model).updater
            kernel = updater._run_kernel

            def slowly(*arguments: Any) -> None:
                time.sleep(0.003)
                kernel(*arguments)

            updater._run_kernel = slowly  # type: ignore[method-assign]
            last = {id(parameter) for parameter in model.blocks[3].parameters()}
            first = tz.AdamW([p for p in model.parameters() if id(p) not in last], **hyper(STACK))
            second = tz.AdamW(model.blocks[3].parameters(), **hyper(STACK))
            for step in range(STEPS):
                loss = seeded_loss(STACK, model, step, 0)
                loss.backward()
                outcome.losses.append(loss.item())
                first.step()
                if step % 2 == 0:
                    second.step()
                for optimizer in (first, second):
                    optimizer.zero_grad()
            record_state(model, outcome)
            tz.full_state_dict(model)
            speculation = updater.speculation
            assert speculation.tried_bytes == speculation.kept_bytes + speculation.lost_bytes
        return outcome

    assert_bits(trained("both"), trained("none"))


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_closing_gives_back_the_memory_of_trials(tier: str, tmp_path: Path) -> None:
    model = built(STACK)
    with sharded(model, config(tmp_path, tier, optimizer={"overlap": "both"}), STACK.units):
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(3):
            seeded_loss(STACK, model, step, 0).backward()
            wait_for_trials(model)
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
        runtime = running(model)
        assert runtime.updater.speculation.tried_bytes > 0
    assert runtime.pools["host"].used == 0


def test_nothing_tried_is_neither_kept_nor_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Amount, "least", 0)
    monkeypatch.setattr(Amount, "step_ended", lambda *arguments: None)
    with sharded(built(STACK), config(tmp_path, optimizer={"overlap": "both"}), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(3):
            seeded_loss(STACK, model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = tz.stats(model)
        assert (stats["overlap"], stats["tries"], stats["tried_bytes"]) == ("both", None, 0)
        assert 0 < stats["second_slot_bytes"] < stats["state_bytes"]


def test_habit() -> None:
    """Not before a backward is known to be the last; after losses pauses that double, up to 64 steps, and half of them
    again after steps without.
    """
    habit = Habit()
    assert not habit.tries()

    def step(right: bool) -> bool:
        tried = habit.tries()
        habit.backward_ended()
        habit.step_ended(right)
        return tried

    step(True)
    assert [step(True) for _ in range(3)] == [True] * 3
    tried = [number for number in range(350) if step(False)]
    assert [b - a for a, b in itertools.pairwise(tried)] == [2, 3, 5, 9, 17, 33, 65, 65, 65, 65]
    assert sum(step(number % 40 == 0) for number in range(400)) < 25, "a few steps that do not clip are no reason"
    assert [step(True) for _ in range(10)][7:] == [True] * 3
    for _ in range(2):
        habit.backward_ended()
    habit.step_ended(True)
    assert not habit.tries()
    habit.backward_ended()
    assert habit.tries()


def test_amount() -> None:
    """Work moves to where the model's thread waits less; what waits nowhere comes back slowly."""
    amount = Amount(1000)
    amount.least = 0

    def step(forward: float, backward: float, ahead: int = 0, element_s: float = 0.01) -> int:
        amount.used(forward, False)
        amount.used(99.0, True)
        amount.backward_ended()  # one of several: the last counts
        amount.used(99.0, False)  # as does the first forward
        amount.used(backward, True)
        amount.backward_ended()
        amount.step_ended(ahead, element_s, 10.0)
        return amount.elements

    assert step(0.0, 0.0) == 0
    assert step(4.0, 1.0) == 300
    assert step(2.0, 0.0, ahead=300) == 500
    assert step(0.0, 1.0, ahead=500) == 400
    assert step(0.05, 0.05, ahead=400) == 375
    assert step(3.0, 3.0, ahead=375) == 375
    assert step(50.0, 0.0, ahead=375) == 1000
    assert step(0.0, 50.0, ahead=375) == 0
    assert step(5.0, 0.0, ahead=10, element_s=0.0) == 0, "nothing was updated: nothing is known"
    amount.least = 7
    assert step(0.0, 50.0) == 7


def test_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(tz.ConfigError, match=r"on the host or on nvme, and here none lies there"):
        tz.shard(built(STACK), config(tmp_path, "device", optimizer={"overlap": "both"}), STACK.units)
    settings = config(tmp_path, tiers={"nvme_limit": "200KB"}, optimizer={"overlap": "both"})
    with pytest.raises(tz.BudgetError, match=r'two slots of each tile, for optimizer\.overlap = "both"'):
        tz.shard(built(STACK), settings, STACK.units)
    mixed = config(tmp_path, {"host": 0.5, "nvme": 0.5}, optimizer={"overlap": "both"})
    tz.close(tz.shard(built(STACK), mixed, STACK.units))
