#!/usr/bin/env python3
"""Rates and latencies of tier files on drives, by block size and queue depth: `tierzero bench io` as a script.

python tools/swap_bench.py --nvme /scratch --fio
"""

from __future__ import annotations

import sys

from tierzero.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "io"]
    main()
