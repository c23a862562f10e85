#!/usr/bin/env python3
"""What recording a timeline costs: steps with and without it, in turns, on one model.

    python tools/timeline_overhead.py configs/quickstart.toml --rounds 20

Prints the step times, the ratio and its spread over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tierzero.cli.failures import reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="of each kind in a round")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="assignments")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 2:
        parser.error("--rounds must be at least 1, --steps at least 2")
    with reported():
        from tierzero.config import Config
        from tierzero.profiling.timeline_overhead import measure

        config = Config.load(options.config).override(options.assignments)
        config.check()
        found = measure(config, options.rounds, options.steps, lambda text: print(text, file=sys.stderr))
        print(json.dumps(found.as_json()) if options.json else "\n".join(found.lines()))


if __name__ == "__main__":
    main()
