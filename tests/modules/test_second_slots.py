"""``optimizer.overlap = "auto"``: both halves of the step where second slots have plenty of room, on all ranks or on
none, and never a failure for lack of it where the next forward alone would do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.tiers import Extent, Tier, striped_file
from tierzero.tiers.room import DriveRoom, lies_in_memory

from ..support.oracle import Case, Outcome, assert_bits, built, config, hyper, record_state, seeded_loss, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import Block, Stack, regression

STACK = Case(lambda: Stack(4), regression, (Block,))
MIXED = {"params": {"host": 0.5, "nvme": 0.5}, "optimizer": "nvme", "gradients": "host"}


def resolved(settings: tz.Config) -> tuple[str, int, int]:
    """The overlap of a run, its tier files' bytes, and those of second slots."""
    with sharded(built(STACK), settings, STACK.units) as model:
        runtime = running(model)
        filed = sum(path.stat().st_size for path in settings.tiers.nvme[0].rglob("*.tier"))
        assert filed == runtime.store.file.nbytes if runtime.store.file else filed == 0
        assert tz.stats(model)["tier_bytes"]["nvme"] == filed
        return runtime.overlap, filed, sum(spare.nbytes for spare in spares(model) if spare is not None)


def spares(model: nn.Module) -> list[Extent | None]:
    """Of all weights and optimizer states."""
    tiles = [tile for group in running(model).groups() for tile in group.tiles]
    return [home.stored.spare for tile in tiles for home in (tile.weight, tile.optimizer) if home is not None]


def first_slots(settings: tz.Config) -> int:
    """Bytes of the tier files of a run without second ones."""
    return resolved(settings.override(["optimizer.overlap=forward"]))[1]


def room(free: int, in_memory: bool = False) -> Any:
    """A drive with so much free, whoever asks."""

    def rooms(wanted: dict[Path, int]) -> list[DriveRoom]:
        return [DriveRoom(free, sum(wanted.values()), in_memory)]

    return mock.patch.object(striped_file, "rooms_of", rooms)


def test_what_it_comes_to(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert settings.optimizer.overlap == "auto"
    first = first_slots(settings)
    overlap, filed, second = resolved(settings)
    assert (overlap, filed - first) == ("both", second)
    for fewer in ({"placement": dict.fromkeys(("params", "optimizer"), "host")}, {"placement": {"params": "host"}}):
        assert resolved(config(tmp_path, **fewer))[::2] == ("forward", 0)
    durable = config(tmp_path, checkpoint={"durable": True, "dir": str(tmp_path)})
    with room(0):
        assert resolved(durable)[0] == "both", "which have second slots anyway"
    overlap, _, some = resolved(config(tmp_path, placement=MIXED))
    assert overlap == "both"
    assert 0 < some < second, "only tiles that can be tried have a second slot"


@pytest.mark.parametrize(("more", "wanted"), [(0, "both"), (-1, "forward")])
def test_the_limit_and_the_drive(more: int, wanted: str, tmp_path: Path) -> None:
    settings = config(tmp_path)
    first, filed = first_slots(settings), resolved(settings)[1]
    limited = config(tmp_path, tiers={"nvme_limit": filed + more})
    second = filed - first
    assert resolved(limited)[:2] == (wanted, filed if wanted == "both" else first)
    with room(2 * second + more):
        assert resolved(settings)[:2] == (wanted, filed if wanted == "both" else first)


def test_what_lies_in_memory_is_no_drive(tmp_path: Path) -> None:
    with room(1 << 40, in_memory=True):
        assert resolved(config(tmp_path))[0] == "forward"
    assert lies_in_memory(Path("/dev/shm"))
    assert not lies_in_memory(Path("/proc"))


def full_once_it_grows() -> Any:
    """A drive that somebody else fills after the check: files cannot get longer than they were made."""
    allocate: Callable[[Any], None] = striped_file._preallocate

    def preallocate(stripe: Any) -> None:
        if os.fstat(stripe.fd).st_size:
            os.posix_fallocate(stripe.fd, 0, stripe.size // 2)  # what a full drive may have given already
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(stripe)

    return mock.patch.object(striped_file, "_preallocate", preallocate)


def trained(settings: tz.Config) -> tuple[Outcome, str, int]:
    outcome = Outcome()
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(3):
            seeded_loss(STACK, model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        record_state(model, outcome)
        return outcome, running(model).overlap, tz.stats(model)["tier_bytes"]["nvme"]


def test_a_drive_that_is_filled_meanwhile(tmp_path: Path) -> None:
    wanted = trained(config(tmp_path, optimizer={"overlap": "forward"}))
    with full_once_it_grows():
        found = trained(config(tmp_path))
    assert_bits(found[0], wanted[0])
    assert found[1:] == wanted[1:]


def test_what_a_killed_run_left_does_not_count(tmp_path: Path) -> None:
    """It is cleared when the tiers are opened."""
    (tmp_path / "tierzero" / "rank-7").mkdir(parents=True)
    left = tmp_path / "tierzero" / "rank-7" / "state.tier"
    left.write_bytes(b"x")
    (tmp_path / "tierzero" / "rank-7.lock").touch()
    looked: list[bool] = []

    def rooms(wanted: dict[Path, int]) -> list[DriveRoom]:
        looked.append(left.exists())
        return [DriveRoom(1 << 40, 0)]

    with mock.patch.object(striped_file, "rooms_of", rooms):
        assert resolved(config(tmp_path))[0] == "both"
    assert looked == [False]


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def on_a_rank(rank: int, ranks: int, nvme: str, trouble: str) -> str:
    """``trouble``: of the second rank's drive."""
    troubles = {"little room": lambda: room(1), "filled": full_once_it_grows, "none": nothing}
    with troubles[trouble]() if rank else nothing():
        return resolved_on(config(Path(nvme)))


def resolved_on(settings: tz.Config) -> str:
    with sharded(built(STACK), settings, STACK.units) as model:
        overlap = running(model).overlap
        assert all((spare is not None) == (overlap == "both") for spare in spares(model))
        return overlap


@pytest.mark.parametrize("trouble", ["none", "little room", "filled"])
def test_all_ranks_or_none(trouble: str, tmp_path: Path, two_ranks: RankPool) -> None:
    found = two_ranks.run(on_a_rank, str(tmp_path), trouble)
    assert found == ["both" if trouble == "none" else "forward"] * 2


def room_counts_all_ranks(rank: int, ranks: int, nvme: str) -> list[str]:
    """Each rank's second slots once would leave as much; those of both do not."""
    settings = config(Path(nvme))
    with sharded(built(STACK), settings.override(["optimizer.overlap=forward"]), STACK.units) as model:
        second = running(model).store.second_slot_bytes
    found = []
    for times in (2 * ranks, 2 * ranks - 1):
        with room(times * second):
            found.append(resolved_on(settings))
    return found


def test_ranks_share_a_drive(tmp_path: Path, two_ranks: RankPool) -> None:
    assert two_ranks.run(room_counts_all_ranks, str(tmp_path)) == [["both", "forward"]] * 2


def no_path_on_one(rank: int, ranks: int, nvme: str) -> str:
    with pytest.raises(tz.TierZeroError) as refused:
        tz.shard(built(STACK), config(Path(nvme) / "missing" if rank else Path(nvme)), STACK.units)
    return str(refused.value)


def test_tiers_that_one_rank_cannot_open_end_all(tmp_path: Path, two_ranks: RankPool) -> None:
    other, own = two_ranks.run(no_path_on_one, str(tmp_path))
    assert "missing does not exist" in own
    assert other == f"rank 1 could not open its tiers: {own}"


def test_second_slots_of_an_open_store_come_and_go(tmp_path: Path) -> None:
    """What is in the files stays where it is."""
    with sharded(built(STACK), config(tmp_path, optimizer={"overlap": "forward"}), STACK.units) as model:
        store = running(model).store
        assert store.file is not None
        before, nbytes = tz.full_state_dict(model), store.file.nbytes
        store.add_second_slots()
        assert store.file.nbytes == store.bytes_by_tier()[Tier.NVME] > nbytes
        store.drop_second_slots()
        assert store.file.nbytes == nbytes == store.bytes_by_tier()[Tier.NVME]
        after = tz.full_state_dict(model)
    assert all((after[name] == tensor).all() for name, tensor in before.items())
