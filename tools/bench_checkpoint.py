#!/usr/bin/env python3
"""Rates of saving and loading a checkpoint beside fio's on the same drive, in alternating rounds (needs fio).

python tools/bench_checkpoint.py --folder /scratch --size 350m --tier host
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.profiling.checkpoint_bench import measure
from tierzero.profiling.compare import SIZES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the drive; default: here")
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--tier", choices=("host", "nvme"), default="host", help="where the state is")
    parser.add_argument("--host", default="8GB", help="budget of host memory")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    rates = measure(options.folder, SIZES[options.size], options.tier, options.host, options.rounds)
    print("| | GB | GB/s | fio GB/s | ratio | memory, MB |\n| --- | --- | --- | --- | --- | --- |")
    for rate in rates:
        fio = rate.rate / rate.ratio
        print(
            f"| {rate.what} | {rate.nbytes / 1e9:.2f} | {rate.rate / 1e9:.2f} | {fio / 1e9:.2f} | {rate.ratio:.2f} "
            f"| {rate.grown / 1e6:.0f} |"
        )


if __name__ == "__main__":
    with reported():
        main()
