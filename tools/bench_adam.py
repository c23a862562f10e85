#!/usr/bin/env python3
"""Rates of the Adam kernel and of other implementations on the same amount of state, in alternating rounds.

    python tools/bench_adam.py --threads 2

The C++ reference (tools/adam_reference.cpp) takes part where there is a g++ and the kernel's moments are fp32, as its
own are; its results must be the kernel's to the bit. DeepSpeedCPUAdam takes part where DeepSpeed is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.profiling.adam_bench import measure

SOURCE = Path(__file__).with_name("adam_reference.cpp")
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20)
    parser.add_argument("--tile", type=int, default=1 << 20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--state-dtype", choices=("fp32", "bf16", "int8"), default="fp32", help="of the kernel's moments"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = None
        compiler = shutil.which("g++")
        if compiler is None:
            print("no g++ here: without the C++ reference", file=sys.stderr)
        else:
            library = Path(folder) / "adam.so"
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(library)], check=True)
        rates, same = measure(
            numel=options.numel,
            tile=options.tile,
            threads=options.threads,
            rounds=options.rounds,
            moments=options.state_dtype,
            compiled=library,
        )
    print("| implementation | Gparam/s | tierzero / it |\n| --- | --- | --- |")
    for row in rates:
        print(f"| {row.name} | {row.rate / 1e9:.2f} | {row.ours_over_it:.2f} |")
    if same is not None:
        print(f"\nC++ gives {'the same bits' if same else 'OTHER BITS'}")
    sys.exit(0 if same in (True, None) else 1)


if __name__ == "__main__":
    with reported():
        main()
