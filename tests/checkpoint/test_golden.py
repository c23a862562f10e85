"""Checkpoints byte for byte: files of every version load, and the files that are written are those of docs/formats.md.

``python -m tests.checkpoint.test_golden FOLDER VERSION`` writes the files of version 3 (fp32 moments) or 4 (int8).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import tierzero as tz

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"weight": "<u2", "lo": "<i2", "m": "<f4", "v": "<f4"}


class Small(nn.Module):
    """Values that bf16 cannot hold, so that their remainders are not zero; a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(1, 13, dtype=torch.float32).view(3, 4) / 7)
        self.vector = nn.Parameter(torch.arange(1, 6, dtype=torch.float32) / -3)
        self.fixed = nn.Parameter(torch.arange(4, dtype=torch.float32) / 2, requires_grad=False)
        self.register_buffer("count", torch.tensor([3, -4], dtype=torch.int64))


def write(folder: Path, version: int) -> None:
    torch.manual_seed(5)
    with tempfile.TemporaryDirectory() as nvme:
        sections: dict[str, Any] = {"tiers": {"nvme": [nvme]}}
        sections["placement"] = dict.fromkeys(("params", "optimizer"), "nvme")
        if version == 4:
            sections["optimizer"] = {"state_dtype": "int8"}
        model = tz.shard(Small(), tz.Config.from_dict(sections))
        optimizer = tz.AdamW([model.matrix, model.vector], lr=0.5)
        if version == 4:
            for kind, values in moments().items():
                tz.write_state(model.matrix, kind, values)
        tz.save_checkpoint(model, optimizer, folder, extra={"step": 0})
        tz.close(model)


def moments() -> dict[Any, torch.Tensor]:
    """v over many magnitudes, before m: where v is zero, m would give it a value."""
    root = torch.logspace(-5, 0, 12).view(3, 4)
    return {"v": root * root, "m": root * torch.linspace(-1, 0.9, 12).view(3, 4)}


def array(folder: Path, parameter: str, segment: str, dtype: str) -> np.ndarray:
    """As a reader that knows docs/formats.md and nothing else would read it."""
    index = json.loads((folder / "rank-00000.json").read_text())
    data = (folder / "rank-00000.bin").read_bytes()
    found = [e for e in index["extents"] if (e["parameter"], e["segment"]) == (parameter, segment)]
    parts = []
    for extent in sorted(found, key=lambda extent: extent["start"]):
        raw = data[extent["offset"] : extent["offset"] + extent["nbytes"]]
        if "checks" in index:
            check_whole(extent, index["checks"], data)
        else:  # before version 3
            assert xxhash.xxh3_64_hexdigest(raw) == extent["xxh3"]
        parts.append(np.frombuffer(raw, dtype))
        assert parts[-1].size == extent["stop"] - extent["start"]
    return np.concatenate(parts)


def check_whole(extent: dict[str, Any], checks: list[dict[str, Any]], data: bytes) -> None:
    start, stop = extent["offset"], extent["offset"] + extent["nbytes"]
    [check] = [c for c in checks if c["offset"] <= start and stop <= c["offset"] + c["nbytes"]]
    assert xxhash.xxh3_64_hexdigest(data[check["offset"] : check["offset"] + check["nbytes"]]) == check["digest"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_files_are_what_the_documentation_says(version: int) -> None:
    folder = GOLDEN / f"v{version}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("tierzero-checkpoint", version)
    checksum = manifest.pop("xxh3")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert checksum == xxhash.xxh3_64_hexdigest(text.encode())
    assert manifest["indexes"] == [json.loads((folder / "rank-00000.json").read_text())["xxh3"]]
    assert manifest["parameters"]["matrix"] == {
        "names": ["matrix"],
        "shape": [3, 4],
        "dtype": "bfloat16",
        "trainable": True,
        "step": 0,
    }
    for name, wanted in (("matrix", np.arange(1, 13) / 7), ("vector", np.arange(1, 6) / -3)):
        high, low = (array(folder, name, segment, DTYPES[segment]) for segment in ("weight", "lo"))
        master = ((high.astype(np.uint32) << 16) + low.astype(np.int32).view(np.uint32)).view(np.float32)
        assert master.tolist() == wanted.astype(np.float32).tolist()
        assert not array(folder, name, "m", "<f4").any()
        assert not array(folder, name, "v", "<f4").any()
    fixed = array(folder, "fixed", "weight", "<u2").astype(np.uint32) << 16
    assert fixed.view(np.float32).tolist() == [0, 0.5, 1, 1.5]
    assert array(folder, "count", "buffer", "<i8").tolist() == [3, -4]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_files_of_every_version_load(version: int, tmp_path: Path) -> None:
    model = Small()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    model = tz.shard(model, tz.Config.from_dict({"tiers": {"nvme": [str(tmp_path)]}}))
    optimizer = tz.AdamW([model.matrix, model.vector], lr=0.1)
    assert tz.load_checkpoint(model, optimizer, GOLDEN / f"v{version}") == {"step": 0}
    assert torch.equal(tz.read_state(model.matrix, "master"), Small().matrix)
    assert torch.equal(tz.read_state(model.fixed, "weight"), Small().fixed.bfloat16())
    assert model.count.tolist() == [3, -4]
    assert optimizer.param_groups[0]["lr"] == 0.5
    tz.close(model)


def test_int8_moments_are_what_the_documentation_says() -> None:
    folder = GOLDEN / "v4"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], manifest["parameters"]["matrix"]["moments"]) == (4, "int8")
    assert "moments" not in manifest["parameters"]["fixed"]
    code = {name: array(folder, "matrix", name, kind) for name, kind in (("m", "i1"), ("v", "u1"))}
    scale = {name: array(folder, "matrix", f"{name}_scale", "<f4") for name in "mv"}
    assert scale["m"].size == scale["v"].size == 1
    root = scale["v"] * (code["v"] / 255.0) ** 2
    m = root * scale["m"] * (code["m"] / 127.0)
    wanted = {kind: values.flatten().numpy() for kind, values in moments().items()}
    assert np.abs(root - np.sqrt(wanted["v"])).max() < 0.005
    assert np.abs(m - wanted["m"]).max() < 0.005
    assert code["v"].min() > 0
    assert not array(folder, "vector", "v", "u1").any()


@pytest.mark.parametrize("version", [3, 4])
def test_what_is_written_is_the_present_version(version: int, tmp_path: Path) -> None:
    written, golden = tmp_path / "written", GOLDEN / f"v{version}"
    write(written, version)
    assert (written / "rank-00000.bin").read_bytes() == (golden / "rank-00000.bin").read_bytes()
    for name in ("rank-00000.json", "manifest.json"):
        found, wanted = (json.loads((folder / name).read_text()) for folder in (written, golden))
        for varies in ("rng", "indexes", "xxh3"):  # with PyTorch's generator
            found.pop(varies, None), wanted.pop(varies, None)
        assert found == wanted, name


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
