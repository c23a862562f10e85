"""Converts a large checkpoint to and from other formats, and prints what each conversion added to this process's peak
memory (bytes) as JSON.

``python -m tests.support.convert_job FOLDER``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import tierzero as tz

from .rss_job import forget_peak, memory

ROWS, COLUMNS = 17_000, 1024


def write_source(folder: Path, rows: int) -> Path:
    """A folder of one file with one large tensor and two of odd sizes."""
    folder.mkdir()
    shapes = {"large": (rows, COLUMNS), "flat": (rows * 3 + 1,), "one": ()}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def convert(source: Path, folder: Path) -> dict[str, Callable[[], None]]:
    saved = folder / "saved"
    return {
        "import": lambda: tz.import_safetensors(source, saved, precision="bf16"),
        "verify": lambda: assert_whole(saved),
        "safetensors": lambda: tz.export_safetensors(saved, folder / "safetensors", dtype="fp32"),
        "dcp": lambda: tz.export_dcp(saved, folder / "dcp", dtype="fp32"),
    }


def assert_whole(saved: Path) -> None:
    assert tz.verify_checkpoint(saved) == []


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    small, large = write_source(folder / "small", 4), write_source(folder / "large", ROWS)
    for work in convert(small, folder / "first").values():  # what is imported and allocated once
        work()
    grown, before = {}, memory("VmRSS")
    for name, work in convert(large, folder / "second").items():
        forget_peak()
        work()
        grown[name] = memory("VmHWM") - before
    data = (folder / "second" / "saved" / "rank-00000.bin").stat().st_size
    print(json.dumps({"grown": grown, "data": data}))


if __name__ == "__main__":
    main()
