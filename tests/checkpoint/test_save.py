"""Saving: whole or not at all, over an old checkpoint or beside it, again and again in the same memory."""

from __future__ import annotations

import gc
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.checkpoint import save as saving

from ..support.oracle import assert_bits, config
from ..support.resuming import Run, running

STATE = {"train": {"precision": "bf16"}}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with running(config(nvme, **STATE)) as found:
        found.train(2)
        yield found


def fail_after(calls: int, original: Callable[..., Any], error: OSError) -> Callable[..., Any]:
    left = [calls]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            raise error
        left[0] -= 1
        return original(*args, **kwargs)

    return failing


def assert_previous_is_whole(run: Run, path: Path, settings: tz.Config) -> None:
    """What was saved before the failure loads, the model goes on, and a later save succeeds."""
    assert sorted(entry.name for entry in path.parent.iterdir() if entry.name != "nvme") == [path.name]
    with running(settings, seed=8) as other:
        other.load(path)
        assert other.step == 2
    run.train(1)
    run.save(path)
    wanted = run.outcome()
    with running(settings, seed=8) as other:
        other.load(path)
        assert_bits(other.outcome(), wanted)


PLACES: dict[str, tuple[str, int]] = {
    "first tile": ("RankWriter.receive", 0),
    "in the middle": ("RankWriter.receive", 4),
    "buffers": ("RankWriter.write_buffers", 0),
    "syncing the data": ("RankWriter.sync", 0),
    "index": ("write_json_flushed", 0),
    "manifest": ("write_json", 0),
    "syncing the manifest": ("sync_path", 0),
    "syncing the staging folder": ("sync_path", 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_failed_save_leaves_the_previous_one(
    place: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (name, calls) = tmp_path / "saved", PLACES[place]
    run.save(path)
    run.train(1)
    holder: Any = saving.RankWriter if name.startswith("RankWriter") else saving
    attribute = name.rsplit(".", 1)[-1]
    error = OSError(28, "No space left on device", str(path))
    with monkeypatch.context() as patch:
        patch.setattr(holder, attribute, fail_after(calls, getattr(holder, attribute), error))
        with pytest.raises(tz.CheckpointError, match=r"saved.*No space left on device"):
            run.save(path)
    assert_previous_is_whole(run, path, config(tmp_path / "nvme", **STATE))


@pytest.mark.parametrize("calls", [0, 1])
def test_failed_renames_leave_the_previous_one(
    calls: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    run.save(path)
    run.train(1)
    with monkeypatch.context() as patch:
        original = Path.rename
        count = [0]

        def rename(self: Path, target: Path) -> Path:
            count[0] += 1
            if count[0] == calls + 1:
                raise OSError(5, "Input/output error", str(self))
            return original(self, target)

        patch.setattr(Path, "rename", rename)
        with pytest.raises(tz.CheckpointError, match=r"Input/output error"):
            run.save(path)
    assert_previous_is_whole(run, path, config(tmp_path / "nvme", **STATE))


@pytest.mark.parametrize("again", [False, True])
def test_process_ended_between_the_renames(again: bool, run: Run, tmp_path: Path) -> None:
    """The old checkpoint was moved aside and the new one not yet in its place."""
    path, aside = tmp_path / "saved", tmp_path / ".saved.replaced"
    run.save(path)
    wanted = run.outcome()
    path.rename(aside)
    if again:
        run.train(1)
        wanted = run.outcome()
        run.save(path)
        assert not aside.exists()
    with running(config(tmp_path / "nvme", **STATE), seed=8) as other:
        other.load(path)
        assert_bits(other.outcome(), wanted)


def test_full_disk(no_large_files: Callable[[], None], tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with running(config(tmp_path, "host", **STATE)) as run:
        run.train(2)
        run.save(path)
        wanted = run.outcome()
        run.train(1)
        no_large_files()
        with pytest.raises(tz.CheckpointError, match=r"saved.*File too large"):
            run.save(path)
        run.load(path)
        assert_bits(run.outcome(), wanted)


def test_what_is_no_checkpoint_is_not_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(tz.CheckpointError, match=r"notes.*something else"):
        run.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"
    (tmp_path / "file").write_text("keep")
    with pytest.raises(tz.CheckpointError, match=r"file"):
        run.save(tmp_path / "file")
    with pytest.raises(tz.CheckpointError, match=r"file"):
        run.save(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "keep"


def test_extra_must_be_json(run: Run, tmp_path: Path) -> None:
    with pytest.raises(tz.ConfigError, match=r"extra"):
        tz.save_checkpoint(run.model, run.optimizer, tmp_path / "saved", extra={"tensor": torch.zeros(2)})
    assert not (tmp_path / "saved").exists()
    extra = {"text": "naïve", "list": [1, 2.5, None, True], "nested": {"0": {}}}
    tz.save_checkpoint(run.model, run.optimizer, tmp_path / "saved", extra=extra)
    assert tz.load_checkpoint(run.model, run.optimizer, tmp_path / "saved") == extra


def test_new_folders_are_made_and_files_are_plain(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a b" / "größe"
    run.save(path)
    found = {entry.name: entry.stat() for entry in path.iterdir()}
    assert found.keys() == {"manifest.json", "rank-00000.json", "rank-00000.bin"}
    assert all(stat.S_ISREG(entry.st_mode) for entry in found.values())
    run.load(path)


def test_saves_leave_memory_and_descriptors_flat(tmp_path: Path) -> None:
    """24 MiB of state, ten saves and loads: a leak of one copy would show."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    settings = config(tmp_path, tiers={"nvme": [str(tmp_path)], "tile": 65536})
    tz.shard(model, settings, units=(nn.Linear,))
    optimizer = tz.AdamW(model.parameters())
    process = psutil.Process()
    try:
        for round_ in range(13):
            model(torch.randn(4, 512)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tz.save_checkpoint(model, optimizer, tmp_path / "saved")
            tz.load_checkpoint(model, optimizer, tmp_path / "saved")
            if round_ == 2:
                gc.collect()
                before = (process.memory_info().rss, process.num_fds(), process.num_threads())
        gc.collect()
        after = (process.memory_info().rss, process.num_fds(), process.num_threads())
    finally:
        tz.close(model)
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 12 << 20


def test_a_link_to_a_checkpoint_is_written_through(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "saved")
    (tmp_path / "last").symlink_to("saved")
    for _ in range(2):
        run.train(1)
        run.save(tmp_path / "last")
        assert (tmp_path / "last").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "nvme", "saved"]


def test_an_optimizer_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(tz.ConfigError, match="not this model's"):
        tz.save_checkpoint(run.model, others, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
