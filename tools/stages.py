#!/usr/bin/env python3
"""What each ZeRO stage holds and moves, measured on several ranks of this machine next to the formulas.

    python tools/stages.py --ranks 4 --plot stages.png

Prints a Markdown table: bytes per parameter and rank, and elements moved per parameter and step.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.profiling.stages import StageJob, draw, measure, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both (needs matplotlib)")
    options = parser.parse_args()
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed here: pip install matplotlib")
    jobs = [StageJob(stage, options.precision, options.dim, options.layers) for stage in options.stages]
    rows = measure(jobs, options.ranks, lambda text: print(text, file=sys.stderr))
    print(table(rows))
    if options.plot is not None:
        draw(rows, options.ranks, options.plot)


if __name__ == "__main__":
    with reported():
        main()
