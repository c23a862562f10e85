#!/usr/bin/env python3
"""The largest model that trains within a cap on memory, which the kernel enforces.

    python tools/scale.py --cap 4GiB --nvme /scratch --sizes 350m 1.3b 3b

Trains each size for a few steps in a process of its own, the smallest first, until one does not fit; prints a Markdown
table with the kernel's count of memory. The cap is a memory control group (as root) or else RLIMIT_DATA.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.config.rules import parse_size
from tierzero.profiling.compare import SIZES, VARIANTS, parse_settings
from tierzero.profiling.memory_cap import enforced_by
from tierzero.profiling.scale import climb, table
from tierzero.profiling.systems import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", default="4GiB", help='memory of a run, such as "4GiB" or "4GB"')
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["350m", "1.3b", "3b"])
    parser.add_argument("--system", choices=VARIANTS, default="tierzero-nvme-gradients")
    parser.add_argument("--nvme", help="folder for tier files; default: a temporary one here")
    parser.add_argument("--steps", type=int, default=3, help="the first one is not counted")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients; 0 does not clip")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="configuration for tierzero"
    )
    options = parser.parse_args()
    cap = parse_size(options.cap)
    if cap is None or cap <= 0:
        parser.error(f'--cap {options.cap}: give a size such as "4GiB"')
    print(f"cap enforced by: {enforced_by()}", file=sys.stderr)
    if options.nvme is not None and not Path(options.nvme).is_dir():
        parser.error(f"--nvme {options.nvme}: there is no such folder; create it or name another")
    if options.steps <= 1:
        parser.error(f"--steps {options.steps}: must be more than the first one, which is not counted")
    with tempfile.TemporaryDirectory(dir=options.nvme or ".") as folder:
        work = Workload(
            system="tierzero", steps=options.steps, warmup=1, batch=options.batch, seq_len=options.seq_len,
            clip=options.clip, nvme=folder, config=parse_settings(options.set),
        )  # fmt: skip
        attempts = list(climb(work, options.sizes, options.system, cap, lambda text: print(text, file=sys.stderr)))
    print(table(attempts, cap))
    if not any(attempt.trained for attempt in attempts):
        sys.exit(1)


if __name__ == "__main__":
    with reported():
        main()
