"""What is imported from safetensors files is what they hold, to the last bit; what does not fit changes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import tierzero as tz
from tierzero.checkpoint import output
from tierzero.cli.app import app

from ..support.fake_device import FakeDevice
from ..support.models import batch, net
from ..support.oracle import Outcome, assert_bits, config, sharded
from ..support.rank_pool import RankPool
from ..support.resuming import Run, running
from ..train.test_command import CONFIG

PRECISIONS = ("bf16", "fp16", "fp32")


def settings(folder: Path, precision: str = "bf16", tier: object = "nvme") -> tz.Config:
    (folder / "nvme").mkdir(exist_ok=True)
    return config(folder / "nvme", tier, train={"precision": precision})


def masters(run: Run) -> dict[str, torch.Tensor]:
    return {name: tz.read_state(p, "master") for name, p in run.model.named_parameters() if p.requires_grad}


def assert_starts_from(run: Run, wanted: Outcome, wanted_masters: dict[str, torch.Tensor]) -> None:
    """Weights, buffers and masters as wanted, moments of zero, no updates."""
    found = run.outcome()
    assert [name for name, value in wanted.weights.items() if not torch.equal(found.weights[name], value)] == []
    assert set(found.updates.values()) == {0}
    for name, parameter in run.model.named_parameters():
        for kind in ("m", "v") if parameter.requires_grad else ():
            assert not tz.read_state(parameter, kind).any(), name  # type: ignore[arg-type]
    assert [name for name, value in masters(run).items() if not torch.equal(value, wanted_masters[name])] == []


def exported(folder: Path, precision: str) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Trains, and exports the masters to ``folder / "files"``."""
    with running(settings(folder, precision)) as run:
        run.train(2)
        run.save(folder / "saved")
        tz.export_safetensors(folder / "saved", folder / "files", dtype="fp32", max_file_bytes=20_000)
        return run.outcome(), masters(run)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_to_start_from(precision: str, tmp_path: Path) -> None:
    wanted, wanted_masters = exported(tmp_path, precision)
    tz.import_safetensors(tmp_path / "files", tmp_path / "imported", precision=precision)
    assert tz.verify_checkpoint(tmp_path / "imported") == []
    with running(settings(tmp_path, precision), seed=5) as run:
        assert tz.load_checkpoint(run.model, run.optimizer, tmp_path / "imported")["step"] == 0
        assert_starts_from(run, wanted, wanted_masters)
        torch.manual_seed(7)
        losses, trained = run.train(2), run.outcome()
    with running(settings(tmp_path, precision), seed=6) as run:
        tz.load_safetensors(run.model, tmp_path / "files")
        torch.manual_seed(7)
        assert run.train(2) == losses
        assert_bits(run.outcome(), trained)


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_into_a_sharded_model(tier: str, tmp_path: Path) -> None:
    wanted, wanted_masters = exported(tmp_path, "bf16")
    with running(settings(tmp_path, "bf16", tier), seed=5) as run:
        run.train(2)
        tz.load_safetensors(run.model, tmp_path / "files")
        assert_starts_from(run, wanted, wanted_masters)


def test_into_device_memory(files: Path, tmp_path: Path) -> None:
    """Of a device with memory of its own, whose copies come late."""
    device, wanted = FakeDevice(), net(seed=3).state_dict()
    with sharded(net(), config(tmp_path, "device", train={"precision": "fp32"}), device=device) as model:
        model(*batch(0)).backward()
        tz.load_safetensors(model, files)
        assert all(torch.equal(value, wanted[name]) for name, value in tz.full_state_dict(model).items())
    device.close()


def load_as_rank(rank: int, size: int, folder: str) -> tuple[Outcome, dict[str, torch.Tensor]]:
    with running(config(Path(folder) / "nvme", train={"precision": "bf16"}), seed=rank) as run:
        run.train(1, rank)
        tz.load_safetensors(run.model, Path(folder) / "files")
        assert {slot.step for slot in tz.api.running(run.model).slots()} == {0}
        return run.outcome(), masters(run)


def test_into_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    wanted, wanted_masters = exported(tmp_path, "bf16")
    for found, found_masters in two_ranks.run(load_as_rank, str(tmp_path)):
        assert all(torch.equal(found.weights[name], value) for name, value in wanted.weights.items())
        assert all(torch.equal(found_masters[name], value) for name, value in wanted_masters.items())


def fails_on_one_rank(rank: int, size: int, folder: str) -> None:
    """What does not fit on one rank changes nothing on any."""
    with running(config(Path(folder) / "nvme", train={"precision": "bf16"})) as run:
        before = run.outcome()
        with pytest.raises(tz.TierZeroError, match="is not a folder" if rank else "another rank"):
            tz.load_safetensors(run.model, Path(folder) / ("none" if rank else "files"))
        assert_bits(run.outcome(), before)
        run.train(1, rank)


def test_failure_on_one_rank(tmp_path: Path, two_ranks: RankPool) -> None:
    exported(tmp_path, "bf16")
    two_ranks.run(fails_on_one_rank, str(tmp_path))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The weights of a small model, scalar and empty ones among them, in one file."""
    (tmp_path / "files").mkdir()
    tensors = {name: value.clone() for name, value in net(seed=3).state_dict().items()}
    save_file(tensors, tmp_path / "files" / "anything.safetensors")
    return tmp_path / "files"


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    found = tz.shard(net(), settings(tmp_path, "fp32"))
    yield found
    tz.close(found)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "anything.safetensors")
    change(tensors)
    save_file(tensors, folder / "anything.safetensors")


def test_odd_parameters_pieces_and_tied_names(
    files: Path, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierzero.checkpoint.load_weights._PIECE", 100)
    monkeypatch.setattr(sys.modules["tierzero.checkpoint.import_safetensors"], "_PIECE", 77)
    wanted = net(seed=3).state_dict()
    tz.load_safetensors(model, files)
    assert all(torch.equal(value, wanted[name]) for name, value in tz.full_state_dict(model).items())
    tz.import_safetensors(files, tmp_path / "imported", precision="fp32")
    model(*batch(0)).backward()
    tz.load_checkpoint(model, None, tmp_path / "imported")
    assert all(torch.equal(value, wanted[name]) for name, value in tz.full_state_dict(model).items())
    tied = tz.shard(net(tied=True), settings(tmp_path, "fp32"))
    try:
        changed(files, lambda tensors: tensors.pop("embed.weight"))  # the other name counts as well
        tz.load_safetensors(tied, files)
        found = tz.full_state_dict(tied)
        assert torch.equal(found["embed.weight"], wanted["head.weight"])
    finally:
        tz.close(tied)


MISFITS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "missing": (r"no tensor 'norm\.weight'", lambda t: t.pop("norm.weight")),
    "shape": (r"'norm\.weight'.*\(34,\).*\(33,\)", lambda t: t.update({"norm.weight": torch.zeros(34)})),
    "integers": (r"'norm\.weight'.*int64", lambda t: t.update({"norm.weight": torch.zeros(33, dtype=torch.int64)})),
    "unknown": (r"'more'.*lacks.*strict=False", lambda t: t.update(more=torch.zeros(1))),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_changes_nothing(what: str, files: Path, model: nn.Module) -> None:
    message, change = MISFITS[what]
    changed(files, change)
    before = tz.full_state_dict(model)
    with pytest.raises(tz.ConfigError, match=message):
        tz.load_safetensors(model, files)
    assert all(torch.equal(value, before[name]) for name, value in tz.full_state_dict(model).items())
    if what == "unknown":
        tz.load_safetensors(model, files, strict=False)
        wanted = net(seed=3).state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in tz.full_state_dict(model).items())


def test_files_that_go_while_they_are_read(files: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierzero.checkpoint.safetensors_files import SafetensorsSource

    original, calls = SafetensorsSource.read, []

    def read(self: SafetensorsSource, name: str, start: int, stop: int) -> torch.Tensor:
        calls.append(name)
        if len(calls) == 5:
            raise OSError(5, "Input/output error", name)
        return original(self, name, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", read)
        with pytest.raises(tz.CheckpointError, match="Input/output error"):
            tz.load_safetensors(model, files)
    with pytest.raises(tz.CheckpointError, match="half of"):
        model(*batch(0))
    tz.load_safetensors(model, files)
    model(*batch(0))


def test_buffers_and_skipped_tensors(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    tensors = {
        "norm.weight": torch.ones(3, dtype=torch.bfloat16),
        "norm.running_mean": torch.ones(3),
        "norm.num_batches_tracked": torch.tensor(4),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "table": torch.ones(5),
        "old.bias": torch.ones(5),
        "w": torch.ones(2, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "files" / "model.safetensors")
    ran = CliRunner().invoke(
        app,
        ["import", str(tmp_path / "files"), str(tmp_path / "out"), "--buffer", "tab*", "--skip", "*.bias", "--json"],
    )
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["precision"] == "bf16"
    found = {tensor.name: tensor for tensor in tz.inspect_checkpoint(tmp_path / "out").tensors}
    assert {name: tensor.dtype for name, tensor in found.items() if tensor.step is not None} == {
        "norm.weight": "float32",
        "w": "bfloat16",
    }
    assert found.keys() == tensors.keys() - {"old.bias"}
    tz.export_safetensors(tmp_path / "out", tmp_path / "again")
    for name, value in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(value.double(), tensors[name].double()), name


def test_bad_input_is_refused_before_anything_is_written(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(tz.ConfigError, match=r"import: precision is 'int8'"):
        tz.import_safetensors(files, out, precision="int8")
    with pytest.raises(tz.ConfigError, match=r"import: .*none is not a folder"):
        tz.import_safetensors(tmp_path / "none", out)
    with pytest.raises(tz.ConfigError, match=r"files: something stands there"):
        tz.import_safetensors(files, files)
    with pytest.raises(tz.ConfigError, match=r"no tensor of the folder is a parameter"):
        tz.import_safetensors(files, out, skip=("*",))
    with monkeypatch.context() as patch:
        patch.setattr(output, "free_bytes", lambda path: 1000)
        with pytest.raises(tz.BudgetError, match=r"1,000 are free"):
            tz.import_safetensors(files, out)
    raw = (files / "anything.safetensors").read_bytes()
    (files / "anything.safetensors").write_bytes(raw[:-4])
    with pytest.raises(tz.ConfigError, match=r"import: .*anything\.safetensors cannot be read"):
        tz.import_safetensors(files, out)
    (files / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(tz.ConfigError, match=r"import: .*gone\.safetensors is missing"):
        tz.import_safetensors(files, out)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_full_disk_leaves_nothing(files: Path, no_large_files: Callable[[], None], tmp_path: Path) -> None:
    no_large_files()
    with pytest.raises(tz.CheckpointError, match=r"out: cannot be written.*File too large"):
        tz.import_safetensors(files, tmp_path / "out", precision="fp32")
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_an_interrupted_import_goes_on(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["tierzero.checkpoint.import_safetensors"]
    monkeypatch.setattr(module, "_PART", 1)  # a data file for each tensor
    tz.import_safetensors(files, tmp_path / "whole")
    seen: list[int] = []

    def interrupted(done: int, total: int) -> None:
        seen.append(done)
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tz.import_safetensors(files, tmp_path / "out", progress=interrupted)
    left = tmp_path / ".out.partial"
    kept = {path.name: path.stat().st_mtime_ns for path in left.glob("*.bin")}
    assert 0 < len(kept) < len(load_file(files / "anything.safetensors"))
    seen.clear()
    tz.import_safetensors(files, tmp_path / "out", progress=lambda done, total: seen.append(done))
    assert seen[0] > 0  # what was there is not read again
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept
    assert not left.exists()
    assert tz.verify_checkpoint(tmp_path / "out") == []
    for name in sorted(path.name for path in (tmp_path / "whole").glob("*.bin")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_interrupted_import_of_other_choices_starts_afresh(files: Path, tmp_path: Path) -> None:
    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tz.import_safetensors(files, tmp_path / "out", progress=interrupted)
    tz.import_safetensors(files, tmp_path / "out", precision="fp32")
    assert {tensor.dtype for tensor in tz.inspect_checkpoint(tmp_path / "out").tensors} == {"float32"}


def test_command_train_starts_from_an_import(tmp_path: Path) -> None:
    for name in ("text", "nvme"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text("to be or not to be, that is the question\n" * 200)
    (tmp_path / "run.toml").write_text(CONFIG)

    def command(*arguments: str) -> str:
        ran = CliRunner().invoke(app, list(arguments))
        assert ran.exit_code == 0, ran.output
        return ran.stdout

    run, checkpoint = str(tmp_path / "run.toml"), str(tmp_path / "checkpoints" / "step-00000003")
    command("train", run, "--steps", "3")
    command("export", checkpoint, str(tmp_path / "files"), "--dtype", "fp32")
    command("import", str(tmp_path / "files"), str(tmp_path / "imported"), "--precision", "bf16")
    shown = command("train", run, "--steps", "3", "--resume", str(tmp_path / "imported"))
    assert "step 1/3" in shown
    steps = [tensor.step for tensor in tz.inspect_checkpoint(checkpoint).tensors]
    assert set(steps) == {3}
