#!/usr/bin/env python3
"""Compares TierZero with plain PyTorch and FSDP2's CPU offload on the same model, data and seed.

    python tools/compare.py --size 125m --nvme /scratch --rounds 3

Prints a Markdown table (medians over all rounds, ratios to the first system) on stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict

from tierzero.profiling.compare import SIZES, VARIANTS, compare, table
from tierzero.profiling.systems import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "systems",
        nargs="*",
        default=["plain", "fsdp2", "tierzero-host", "tierzero-nvme"],
        help=f"of {', '.join(VARIANTS)}",
    )
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--nvme", help="folder for tier files; default: a temporary one here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="per round, warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=JSON", help="configuration for tierzero"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    for name in options.systems:
        if name not in VARIANTS:
            parser.error(f"unknown system {name!r}: choose from {', '.join(VARIANTS)}")
    config: dict[str, dict[str, object]] = {}
    for item in options.set:
        key, _, value = item.partition("=")
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = json.loads(value)
    with tempfile.TemporaryDirectory(dir=options.nvme or ".") as folder:
        work = Workload(
            system="plain", steps=options.steps, warmup=options.warmup, batch=options.batch, seq_len=options.seq_len,
            nvme=folder, config=config, **SIZES[options.size],
        )  # fmt: skip
        rows = compare(
            work, options.systems, options.rounds, progress=lambda text: print(text, file=sys.stderr, flush=True)
        )
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if options.json else table(rows))


if __name__ == "__main__":
    main()
