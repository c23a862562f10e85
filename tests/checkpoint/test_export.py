"""Exports hold the checkpoint's values to the last bit, appear whole, go on after an interruption, in little memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import tierzero as tz
from tierzero.checkpoint import output
from tierzero.checkpoint.dcp_writing import blocks
from tierzero.cli.app import app

from ..support.hf_models import MODELS
from ..support.models import batch, net
from ..support.oracle import config
from ..support.rank_pool import RankPool
from ..support.resuming import Dropping, running

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """A checkpoint and what the model held when it was written."""

    path: Path
    weights: Values
    """Under all names, buffers too."""
    masters: Values
    """Of trained parameters, by canonical name."""


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Saved:
    tz.save_checkpoint(model, optimizer, path)
    masters = {n: tz.read_state(p, "master") for n, p in model.named_parameters() if p.requires_grad}
    return Saved(path, tz.full_state_dict(model), masters)


def dropping_saved(folder: Path, precision: str, rank: int = 0) -> Saved:
    with running(config(folder, "host", train={"precision": precision})) as run:
        run.train(2, rank)
        return save(run.model, run.optimizer, folder / "saved")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {precision: dropping_saved(tmp_path_factory.mktemp(precision), precision) for precision in PRECISIONS}


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


def expected(saved: Saved, dtype: str | None) -> Values:
    """By the rule: the weight where it has the dtype, else the master (a frozen weight is its own)."""
    wanted = {}
    for name, weight in saved.weights.items():
        wanted[name] = weight
        is_buffer = "running" in name or "tracked" in name
        if dtype is not None and not is_buffer and weight.dtype != PRECISIONS[dtype]:
            canonical = "embed.weight" if name == "head.weight" else name
            wanted[name] = saved.masters.get(canonical, weight).to(PRECISIONS[dtype])
    return wanted


def read_folder(folder: Path) -> Values:
    found: Values = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("dtype", [None, *PRECISIONS])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_safetensors_round_trip(precision: str, dtype: str | None, saved: dict[str, Saved], tmp_path: Path) -> None:
    tz.export_safetensors(saved[precision].path, tmp_path / "out", dtype=dtype, max_file_bytes=20_000)
    wanted = expected(saved[precision], dtype)
    found = read_folder(tmp_path / "out")
    assert wanted.keys() - found.keys() == {"head.weight"}
    assert found.keys() <= wanted.keys()
    assert [name for name, value in found.items() if not same(value, wanted[name])] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", None), ("bf16", "fp32"), ("fp16", "bf16"), ("fp32", None)])
def test_dcp_loads_into_a_plain_model(
    precision: str, dtype: str | None, saved: dict[str, Saved], tmp_path: Path
) -> None:
    tz.export_dcp(saved[precision].path, tmp_path / "out", dtype=dtype)
    wanted = expected(saved[precision], dtype)
    state = {name: torch.empty_like(value) for name, value in Dropping().state_dict().items()}
    for name, value in state.items():
        state[name] = value.to(wanted[name].dtype)
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert [name for name, value in state.items() if not same(value, wanted[name])] == []
    model = Dropping()
    model.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_odd_parameters_and_tied_names(tmp_path: Path) -> None:
    """Parameters of no dimensions and of no elements, and no power of two among the sizes."""
    model = tz.shard(net(tied=True), config(tmp_path, train={"precision": "bf16"}))
    optimizer = tz.AdamW(model.parameters(), lr=0.1)
    model(*batch(0)).backward()
    optimizer.step()
    held = save(model, optimizer, tmp_path / "saved")
    tz.close(model)
    tz.export_safetensors(held.path, tmp_path / "one")
    tz.export_dcp(held.path, tmp_path / "dcp")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert held.weights.keys() - found.keys() == {"head.weight"}
    assert all(same(value, held.weights[name]) for name, value in found.items())
    state = net(tied=True).bfloat16().state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(same(value, held.weights[name]) for name, value in state.items())


def saved_by_rank(rank: int, size: int, folder: str) -> tuple[Values, Values]:
    held = dropping_saved(Path(folder), "bf16", rank)
    return held.weights, held.masters


def test_of_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    held = Saved(tmp_path / "saved", *two_ranks.run(saved_by_rank, str(tmp_path))[0])
    for dtype in (None, "fp32"):
        out = tmp_path / f"out-{dtype}"
        tz.export_safetensors(held.path, out, dtype=dtype)
        wanted = expected(held, dtype)
        assert all(same(value, wanted[name]) for name, value in read_folder(out).items())


def test_files_are_divided_and_described(saved: dict[str, Saved], tmp_path: Path) -> None:
    out = tmp_path / "out"
    tz.export_safetensors(saved["bf16"].path, out, dtype="fp32", max_file_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path for path in out.iterdir() if path.suffix == ".safetensors")
    assert [path.name for path in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    total = 0
    for path in files:
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            names = list(opened.keys())
            nbytes = sum(opened.get_tensor(name).nbytes for name in names)
        assert all(index["weight_map"][name] == path.name for name in names)
        assert nbytes <= 20_000 or len(names) == 1
        total += nbytes
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert header % 8 == 0
    assert index["metadata"]["total_size"] == total


class Interrupt(BaseException):
    pass


def after(calls: int, error: BaseException) -> Callable[[int, int], None]:
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        assert 0 < done <= total
        seen.append(done)
        if len(seen) == calls:
            raise error

    return progress


def test_an_interrupted_export_goes_on(saved: dict[str, Saved], tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(Interrupt):
        tz.export_safetensors(saved["bf16"].path, out, max_file_bytes=10_000, progress=after(12, Interrupt()))
    first = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert first
    assert all(name.startswith("model-") for name in first)
    (out / ".model-00003-of-00005.safetensors.partial").write_bytes(b"left by a process that was killed")
    (out / "config.json").write_text("{}")
    tz.export_safetensors(saved["bf16"].path, out, max_file_bytes=10_000)
    tz.export_safetensors(saved["bf16"].path, whole, max_file_bytes=10_000)
    assert {name: (out / name).stat().st_mtime_ns for name in first} == first
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files.pop("config.json") == b"{}"
    assert files == {path.name: path.read_bytes() for path in whole.iterdir()}


def test_files_of_another_export_are_not_taken_for_its_own(saved: dict[str, Saved], tmp_path: Path) -> None:
    out = tmp_path / "out"
    tz.export_safetensors(saved["bf16"].path, out)
    before = (out / "model.safetensors").read_bytes()
    for source, dtype in (("bf16", "bf16"), ("fp32", None)):
        with pytest.raises(tz.ConfigError, match=r"model\.safetensors: is of another checkpoint"):
            tz.export_safetensors(saved[source].path, out, dtype=dtype)
    with pytest.raises(tz.ConfigError, match=r"holds model\.safetensors"):
        tz.export_safetensors(saved["bf16"].path, out, max_file_bytes=20_000)
    (out / "model.safetensors").write_bytes(before[:-1])
    with pytest.raises(tz.ConfigError, match=r"model\.safetensors: is of another checkpoint"):
        tz.export_safetensors(saved["bf16"].path, out)


def export_either(form: str) -> Callable[..., None]:
    return tz.export_dcp if form == "dcp" else tz.export_safetensors


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_bad_input_is_refused_before_anything_is_written(
    form: str, saved: dict[str, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, source, out = export_either(form), saved["bf16"].path, tmp_path / "out"
    with pytest.raises(tz.ConfigError, match=r"none.*no such checkpoint"):
        export(tmp_path / "none", out)
    with pytest.raises(tz.ConfigError, match=r"manifest\.json"):
        export(tmp_path, out)
    with pytest.raises(tz.ConfigError, match=r"dtype is 'fp8'"):
        export(source, out, dtype="fp8")
    with monkeypatch.context() as patch:
        patch.setattr(output, "free_bytes", lambda path: 1000)
        with pytest.raises(tz.BudgetError, match=r"out: .* bytes are to be written and 1,000 are free") as caught:
            export(source, out)
        assert caught.value.missing > 40_000
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(tz.ConfigError, match=r"mine"):
        export(source, tmp_path / "mine")
    with pytest.raises(tz.ConfigError, match=r"notes\.txt"):
        export(source, tmp_path / "mine" / "notes.txt")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_damage_ends_an_export_and_leaves_nothing(form: str, saved: dict[str, Saved], tmp_path: Path) -> None:
    copy = tmp_path / "saved"
    shutil.copytree(saved["bf16"].path, copy)
    index = json.loads((copy / "rank-00000.json").read_text())
    harmed = next(e for e in index["extents"] if e["parameter"] == "blocks.1.up.weight" and e["segment"] == "weight")
    raw = bytearray((copy / "rank-00000.bin").read_bytes())
    raw[harmed["offset"]] ^= 1
    (copy / "rank-00000.bin").write_bytes(raw)
    with pytest.raises(tz.CheckpointError, match=r"rank-00000\.bin.*blocks\.1\.up\.weight.*checksum"):
        export_either(form)(copy, tmp_path / "out")
    assert list(tmp_path.glob("out/*")) == list(tmp_path.glob(".*")) == []


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint whose one tensor takes 400 kB."""
    (tmp_path / "source").mkdir()
    save_file({"w": torch.randn(1000, 100)}, tmp_path / "source" / "model.safetensors")
    tz.import_safetensors(tmp_path / "source", tmp_path / "saved", precision="fp32")
    return tmp_path / "saved"


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_full_disk(form: str, large: Path, no_large_files: Callable[[], None], tmp_path: Path) -> None:
    no_large_files()
    with pytest.raises(tz.CheckpointError, match=r"out: cannot be written.*File too large"):
        export_either(form)(large, tmp_path / "out")
    assert list(tmp_path.glob("out/*")) == list(tmp_path.glob(".*")) == []


def test_beyond_the_range_of_fp16(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.tensor([1.0, 1e6, float("inf")])}, tmp_path / "source" / "model.safetensors")
    tz.import_safetensors(tmp_path / "source", tmp_path / "saved")
    with pytest.raises(tz.ConfigError, match=r"'w'.*range of fp16"):
        tz.export_safetensors(tmp_path / "saved", tmp_path / "out", dtype="fp16")
    with pytest.raises(tz.ConfigError, match=r"'w'.*range of fp16"):
        tz.import_safetensors(tmp_path / "source", tmp_path / "other", precision="fp16")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (23,), (5, 3), (3, 5, 7), (1, 40), (2, 1, 30, 2), (40, 1)])
def test_blocks_divide_a_tensor_into_contiguous_parts(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = []
    for offsets, sizes in blocks(shape, 10):
        part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert part.shape == sizes
        assert part.numel() <= 10
        parts.append(part.reshape(-1))
    assert torch.equal(torch.cat(parts), whole.reshape(-1))


def test_memory_is_that_of_a_few_extents(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.convert_job", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    result: dict[str, Any] = json.loads(found.stdout)
    assert result["data"] > 200e6
    assert {name: grown for name, grown in result["grown"].items() if grown >= 80e6} == {}


def test_command(saved: dict[str, Saved], tmp_path: Path) -> None:
    source, out = str(saved["bf16"].path), tmp_path / "out"
    ran = CliRunner().invoke(app, ["export", source, str(out), "--dtype", "fp32", "--max-file", "20kB", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == {
        "path": str(out),
        "bytes": sum(path.stat().st_size for path in out.iterdir()),
        "format": "safetensors",
        "dtype": "fp32",
        "weights": "trained",
    }
    assert same(read_folder(out)["fixed.weight"], saved["bf16"].weights["fixed.weight"].float())
    ran = CliRunner().invoke(app, ["export", source, str(tmp_path / "dcp"), "--format", "dcp"])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "dcp" / ".metadata").exists()
    for wrong in (["--format", "onnx"], ["--format", "dcp", "--max-file", "1GB"], ["--dtype", "int4"]):
        ran = CliRunner().invoke(app, ["export", source, str(tmp_path / "no"), *wrong])
        assert (ran.exit_code, ran.stdout) == (2, "")
        assert ran.stderr.startswith("tierzero: error: ")
        assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["gpt2", "gemma", "t5", "mixtral"])
def test_transformers_load_what_was_trained(name: str, tmp_path: Path) -> None:
    """Tied embeddings once; experts as the model has them, not as the library saves them."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, out, batch = MODELS[name].build(), tmp_path / "out", MODELS[name].batch(0, 0)
    kept, described = type(model), model.config
    tz.shard(model, config(tmp_path, train={"precision": "bf16"}))
    try:
        optimizer = tz.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        with torch.no_grad():
            wanted = model.eval()(**batch).logits
    finally:
        tz.close(model)
    out.mkdir()
    described.save_pretrained(out)
    tz.export_safetensors(tmp_path / "saved", out, dtype="bf16", max_file_bytes=20_000)
    loaded, notes = kept.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, wanted)
