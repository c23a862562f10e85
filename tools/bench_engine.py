#!/usr/bin/env python3
"""Rates of the tile engine and of bare preadv/pwritev threads on one tier file, in alternating rounds.

python tools/bench_engine.py --nvme /scratch
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.config.rules import parse_size
from tierzero.profiling.engine_bench import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(), help="folder on the drive; default: here")
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--block", default="8MiB")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    size, block = parse_size(options.size), parse_size(options.block)
    if not size or not block or size % block:
        parser.error("--size must be a multiple of --block, both such as 8MiB")
    rates = measure(options.nvme, nbytes=size, block=block, depth=options.depth, rounds=options.rounds)
    print("| | bare GB/s | engine GB/s | engine / bare |\n| --- | --- | --- | --- |")
    for row in rates:
        print(f"| {row.op} | {row.bare / 1e9:.2f} | {row.engine / 1e9:.2f} | {row.ratio:.2f} |")


if __name__ == "__main__":
    with reported():
        main()
