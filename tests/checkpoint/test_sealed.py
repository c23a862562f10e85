"""Durable tiers: a new process takes up the last sealed step from the tier files, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz

from ..support.oracle import Outcome, assert_bits, config
from ..support.rank_pool import RankPool
from ..support.resuming import running
from ..support.sealing import durable_settings, killed, records, sealed_steps

STEPS = 6


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Outcome]:
    """Without durable tiers."""
    with running(config(tmp_path_factory.mktemp("nvme"), "host", train={"precision": "bf16"})) as run:
        return run.train(STEPS), run.outcome()


OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {"overlap": "forward"},
    "none": {"overlap": "none"},
    "two drives": {"tiers": {"prefetch": 2}},
    "buffered": {"io": {"direct": False}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_killed_run_goes_on_from_its_last_sealed_step(
    name: str, wanted: tuple[list[float], Outcome], tmp_path: Path
) -> None:
    losses, end = wanted
    chosen = durable_settings(tmp_path, **OPTIONS[name])
    if name == "two drives":
        (tmp_path / "other").mkdir()
        chosen = chosen.override([f"tiers.nvme=['{tmp_path / 'nvme'}', '{tmp_path / 'other'}']"])
    found: list[float] = []
    for life in range(3):
        with killed(chosen, seed=life) as run:
            extra = tz.resume(run.model, run.optimizer)
            if life:
                run.take(extra)
            else:
                assert extra is None
            # The last step of a life is marked but not yet sealed when updates run beside the next forward.
            lost = 1 if life and name != "none" else 0
            assert run.step == 2 * life - lost
            part = sealed_steps(run, 2 + lost)
            assert found[len(found) - lost :] == part[:lost]
            found += part[lost:]
    assert found == losses
    with killed(chosen) as run:
        run.take(tz.resume(run.model, run.optimizer))
        sealed_steps(run, STEPS - run.step)
        assert_bits(run.outcome(), end)
    records(tmp_path)


def test_updates_in_the_backward(tmp_path: Path) -> None:
    """No clipping then; compared with the same run that is not stopped."""

    def run_for(root: Path, lives: list[int]) -> list[str]:
        chosen = durable_settings(root, "backward", train={"grad_clip": 0})
        losses: list[str] = []
        for life, steps in enumerate(lives):
            with killed(chosen, seed=life) as run:
                extra = tz.resume(run.model, run.optimizer)
                if extra is not None:
                    run.take(extra)
                for _ in range(steps):
                    ids = torch.arange(18).view(2, 9) * (run.step + 1) % 101
                    loss = run.model(ids).square().mean()
                    loss.backward()
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    run.step += 1
                    losses.append(loss.item().hex())
                    tz.seal(run.model, run.optimizer, run.extra())
        return losses

    assert run_for(tmp_path / "killed", [2, 3, 1]) == run_for(tmp_path / "whole", [6])


def test_the_end_of_a_run_seals_what_is_marked(wanted: tuple[list[float], Outcome], tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 3)
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3
        assert run.train(STEPS - 3) == wanted[0][3:]
        assert_bits(run.outcome(), wanted[1])


def test_steps_that_are_not_sealed_are_done_again(wanted: tuple[list[float], Outcome], tmp_path: Path) -> None:
    with killed(durable_settings(tmp_path)) as run:
        sealed_steps(run, 1)
        run.train(4)
    with killed(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 1
        assert run.train(STEPS - 1) == wanted[0][1:]


def test_a_seal_writes_its_record_and_nothing_else(tmp_path: Path) -> None:
    def written(chosen: tz.Config, seals: bool) -> int:
        with running(chosen) as run:
            for _ in range(3):
                run.train(1)
                if seals:
                    tz.seal(run.model, run.optimizer, run.extra())
            found: int = tz.stats(run.model)["nvme_write_bytes"]
            return found

    durable = written(durable_settings(tmp_path), True)
    (tmp_path / "plain").mkdir()
    plain = config(tmp_path / "plain", "nvme", train={"precision": "bf16"}, optimizer={"overlap": "forward"})
    assert durable == written(plain, False)


def test_other_runs_leave_it_alone(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
    other = durable_settings(tmp_path).override([f"checkpoint.dir={tmp_path / 'another'}"])
    with running(other) as run:  # the same drive, another run
        assert tz.resume(run.model, run.optimizer) is None
        sealed_steps(run, 1)
    with running(config(tmp_path / "nvme", "nvme", train={"precision": "bf16"})) as run:
        run.train(1)
    for chosen, step in ((durable_settings(tmp_path), 2), (other, 1)):
        with running(chosen) as run:
            run.take(tz.resume(run.model, run.optimizer))
            assert run.step == step


def as_rank(rank: int, size: int, folder: str) -> None:
    root = Path(folder)
    with running(config(root, "host", train={"precision": "bf16"})) as run:
        losses, end = run.train(4, rank), run.outcome()
    for life in range(2):
        with killed(durable_settings(root), seed=life) as run:
            extra = tz.resume(run.model, run.optimizer)
            if life:
                run.take(extra)
                assert run.step == 1
            assert sealed_steps(run, 2 + life, rank) == losses[run.step - 2 - life : run.step]
    with killed(durable_settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        run.train(4 - run.step, rank)
        assert_bits(run.outcome(), end)
    torch.distributed.barrier()
    if rank == 1:  # of which the newest record is lost
        folder_of = next((root / "nvme" / "tierzero").glob("lasting-*-rank-1"))
        for path in folder_of.glob("sealed-*.json"):
            path.unlink()
    torch.distributed.barrier()
    with (
        pytest.raises(tz.ConfigError, match="records of the last sealed step are missing"),
        running(durable_settings(root)),
    ):
        pass


def test_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(as_rank, str(tmp_path))
    with pytest.raises(tz.ConfigError, match="sealed step of 2 ranks"), running(durable_settings(tmp_path)):
        pass


def test_the_same_folder_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("real/ck", "link/ck", "real/../real/ck"):
        with running(durable_settings(tmp_path).override([f"checkpoint.dir={tmp_path}/{name}"])) as run:
            if name != "real/ck":
                run.take(tz.resume(run.model, run.optimizer))
            sealed_steps(run, 1)
    assert run.step == 3


def test_between_an_early_update_and_its_step(tmp_path: Path) -> None:
    """The weights are half of the next step's then: no state to seal."""
    with running(durable_settings(tmp_path, "backward", train={"grad_clip": 0})) as run:
        run.model(torch.arange(18).view(2, 9)).square().mean().backward()
        with pytest.raises(tz.ConfigError, match=r"backward"):
            tz.seal(run.model, run.optimizer, {"step": 1})
        run.optimizer.step()
        tz.seal(run.model, run.optimizer, {"step": 1})


SCRIPT = """
import sys
from pathlib import Path
import tierzero as tz
from tests.support.sealing import durable_settings, sealed_steps
from tests.support.resuming import running
context = running(durable_settings(Path(sys.argv[1])))
run = context.__enter__()
sealed_steps(run, 2)
run.save(Path(sys.argv[1]) / "saved", background=True)
run.train(1)
tz.seal(run.model, run.optimizer, run.extra())
"""


def test_the_end_of_a_script_completes_both(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, timeout=120, check=False)
    assert done.returncode == 0
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3
        run.load(tmp_path / "saved")
        assert run.step == 2


def test_a_run_that_never_sealed_leaves_nothing(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        run.train(1)
    assert [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()] == []
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 1)
        tz.discard_sealed(run.model)
    assert [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()] == []
