#!/usr/bin/env python3
"""Trains a configuration with moments in fp32, bf16 and int8, and prints what each moves, takes and comes to.

    python tools/compare_moments.py configs/quickstart.toml --steps 200 --seeds 0 1

With --margin it ends with 1 where a loss is farther from that of fp32 with the same seed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.profiling.moments import compare, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--margin", type=float)
    options = parser.parse_args()
    runs = []
    for run in compare(options.config, options.steps, options.seeds, options.changes):
        runs.append(run)
        print(f"{run.state_dtype} seed {run.seed}: loss {run.loss:.4f}", file=sys.stderr)
    print("\n".join(table(runs)))
    exact = {run.seed: run.loss for run in runs if run.state_dtype == "fp32"}
    far = [run for run in runs if options.margin is not None and abs(run.loss - exact[run.seed]) > options.margin]
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    with reported():
        main()
