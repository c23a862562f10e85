#!/usr/bin/env python3
"""Compares TierZero with plain PyTorch, FSDP2's CPU offload and DeepSpeed ZeRO-3 on the same model, data and seed.

    python tools/compare.py --size 125m --nvme /scratch --rounds 3

Prints a Markdown table (medians over all rounds, ratios to the first system) on stdout; progress goes to stderr. The
bound of a step is the larger of the first system's step and the bytes moved at the rate that plain reads and writes
reach on the drive, measured in the same run. DeepSpeed takes part where it is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.profiling.compare import COMPARED, SIZES, bound, bytes_from, compare, parse_settings, table
from tierzero.profiling.systems import Workload
from tierzero.tiers.drive_rate import mixed_rate
from tierzero.training.stopping import StopSignals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "systems",
        nargs="*",
        default=["plain", "fsdp2", "tierzero-host", "tierzero-nvme"],
        help=f"of {', '.join(COMPARED)}",
    )
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--nvme", help="folder for tier files; default: a temporary one here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="per round, warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1, help="backwards per step, each of --batch sequences")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients; 0 does not clip")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="configuration for tierzero"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw step times and memory (needs matplotlib)")
    options = parser.parse_args()
    for name in options.systems:
        if name not in COMPARED:
            parser.error(f"unknown system {name!r}: choose from {', '.join(COMPARED)}")
    for package, needed in (("deepspeed", "deepspeed-nvme" in options.systems), ("matplotlib", options.plot)):
        if needed and find_spec(package) is None:
            parser.error(f"{package} is not installed here: pip install {package}")
    if options.nvme is not None and not Path(options.nvme).is_dir():
        parser.error(f"--nvme {options.nvme}: there is no such folder; create it or name another")
    if options.steps <= options.warmup:
        parser.error(f"--steps {options.steps}: must be more than the {options.warmup} of --warmup")
    if options.accumulate > 1 and "deepspeed-nvme" in options.systems:
        parser.error("--accumulate: deepspeed-nvme takes a step for every backward; leave one of them out")
    with tempfile.TemporaryDirectory(dir=options.nvme or ".") as folder:
        work = Workload(
            system="plain", steps=options.steps, warmup=options.warmup, batch=options.batch, seq_len=options.seq_len,
            accumulate=options.accumulate, clip=options.clip, nvme=folder, config=parse_settings(options.set),
            **SIZES[options.size],
        )  # fmt: skip
        bytes_from(work, options.systems)  # before anything is measured
        rates = [mixed_rate(folder)]
        rows = compare(
            work, options.systems, options.rounds, progress=lambda text: print(text, file=sys.stderr, flush=True)
        )
        rates.append(mixed_rate(folder))
    rate = statistics.mean(rates)
    if options.plot:
        from tierzero.profiling.plot import draw_comparison

        draw_comparison(rows, options.plot)
    if options.json:
        bounds = {row.name: bound(row, rows[0].step_s, rate) for row in rows}
        print(json.dumps({"disk_bytes_per_s": rate, "bound_s": bounds, "rows": [asdict(row) for row in rows]}))
        return
    print(table(rows, rate))
    shown = ", ".join(f"{value / 1e9:.2f}" for value in rates)
    print(f"\ndrive, plain reads and writes at once, before and after: {shown} GB/s")


if __name__ == "__main__":
    # Asked to stop, it ends the run that it waits for, and removes the folder.
    with reported(), StopSignals(quiet=True) as signals, signals.at_once():
        main()
