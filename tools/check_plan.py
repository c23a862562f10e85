#!/usr/bin/env python3
"""Step times and memory as `tierzero plan` predicts them, beside those of training runs, case by case.

The drive is measured before and after each case, and the prediction is made with the mean.

python tools/check_plan.py --nvme /scratch --profile machine.json
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tierzero.cli.failures import reported
from tierzero.errors import ConfigError
from tierzero.profiling.plan_check import CASES, Checked, DriveNow, runnable, table, trained, with_drive
from tierzero.training.plan_report import peak_bytes
from tierzero.training.planned import Planner, Site, default_plan, site_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(), help="folder on the drive; default: here")
    parser.add_argument("--profile", required=True, help="of this machine, from tierzero bench all --save")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--skip", type=int, default=2, help="steps at the begin that do not count")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all; {', '.join(CASES)}")
    options = parser.parse_args()
    site = site_of(options.profile, None, 1)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    rows = []
    with DriveNow(options.nvme) as drive:
        for name in options.cases or CASES:
            rows.append(check(name, site, drive, options.nvme, options.steps, options.skip))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(rows))


def check(name: str, site: Site, drive: DriveNow, nvme: Path, steps: int, skip: int) -> Checked:
    before = drive.sample()
    measured = trained(CASES[name], nvme, steps, skip)
    samples = [before, drive.sample()]
    now = replace(site, machine=with_drive(site.machine, samples))
    plan = default_plan(Planner(runnable(CASES[name], nvme, steps), now))
    if plan is None:
        raise ConfigError(f"check_plan: the case {name!r} does not fit on this machine")
    prediction, memory = plan.best.prediction, plan.best.plan
    predicted = {
        "device": memory.device,
        "host": memory.host,
        "nvme": memory.nvme_state,
        "moved": round(prediction.phases.nvme_bytes),
        "process": sum(peak_bytes(plan)[tier] for tier in ("device", "host")),
    }
    mixed = now.machine.drives[0].mixed
    return Checked(name, prediction.bound_by, plan.best.step_s, measured, predicted, mixed)


if __name__ == "__main__":
    with reported():
        main()
