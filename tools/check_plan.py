#!/usr/bin/env python3
"""Step times and memory as `tierzero plan` predicts them, beside those of training runs, case by case.

python tools/check_plan.py --nvme /scratch --profile machine.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.profiling.plan_check import CASES, Checked, runnable, table, trained
from tierzero.training.plan_report import peak_bytes
from tierzero.training.planned import Planner, default_plan, site_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(), help="folder on the drive; default: here")
    parser.add_argument("--profile", required=True, help="of this machine, from tierzero bench all --save")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--skip", type=int, default=2, help="steps at the begin that do not count")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all; {', '.join(CASES)}")
    options = parser.parse_args()
    site = site_of(options.profile, None, 1)
    rows = []
    for name in options.cases or CASES:
        if name not in CASES:
            parser.error(f"no case {name!r}; there are {', '.join(CASES)}")
        plan = default_plan(Planner(runnable(CASES[name], options.nvme, options.steps), site))
        if plan is None:
            parser.error(f"the case {name!r} does not fit on this machine")
        measured = trained(CASES[name], options.nvme, options.steps, options.skip)
        memory = peak_bytes(plan)
        moved = round(plan.best.prediction.phases.nvme_bytes)
        predicted = memory | {"process": memory["device"] + memory["host"], "moved": moved}
        rows.append(Checked(name, plan.best.prediction.bound_by, plan.best.step_s, measured, predicted))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(rows))


if __name__ == "__main__":
    with reported():
        main()
