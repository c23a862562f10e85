#!/usr/bin/env python3
"""The placement that `tierzero plan` chooses, beside every other order of filling the tiers, in real training runs.

Each order of weights, gradients and optimizer states fills host memory first come, first served; orders that come to
the same placement run once. The runs alternate, and medians over the rounds are compared.

python tools/check_auto.py --nvme /scratch --profile machine.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierzero.cli.failures import reported
from tierzero.profiling.plan_check import case, runnable, trained
from tierzero.sharding.stages import KINDS
from tierzero.training.planned import Plan, Planner, placement_of, settings, site_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(), help="folder on the drive; default: here")
    parser.add_argument("--profile", required=True, help="of this machine, from tierzero bench all --save")
    parser.add_argument("--hosts", nargs="+", default=["500MB", "1GB", "1.4GB"], help="budgets, as tiers.host")
    parser.add_argument("--batches", nargs="+", type=int, default=[4], help="sequences of 256 tokens a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    site = site_of(options.profile, None, 1)
    print("| host | tokens | placement | predicted s | measured s | / best |\n|---|---|---|---|---|---|")
    for host, batch in itertools.product(options.hosts, options.batches):
        given = case("125m", batch, 256, tiers={"host": host})
        planner = Planner(runnable(given, options.nvme, options.steps), site)
        plans = _plans(planner)
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(options.rounds):
            for name in list(plans)[:: -1 if number % 2 else 1]:
                seconds[name].append(trained(_with(given, plans[name]), options.nvme, options.steps, 2).step_s)
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        best = min(medians.values())
        for name, plan in plans.items():
            shown = f"{plan.best.step_s:.2f} | {medians[name]:.2f} | {medians[name] / best:.2f}"
            print(f"| {host} | {batch * 256} | {name}: {_words(plan)} | {shown} |", flush=True)


def _plans(planner: Planner) -> dict[str, Plan]:
    """What is planned, first, and each order that comes to another placement."""
    found = {"planned": planner.plan()}
    options = planner.options()
    for order in itertools.permutations(KINDS):
        plan = planner.plan(replace(options, order=[order]))
        if all(plan.best.plan != other.best.plan for other in found.values()):
            found["-".join(kind[0] for kind in order)] = plan
    return found


def _with(given: Mapping[str, Mapping[str, Any]], plan: Plan) -> dict[str, dict[str, Any]]:
    chosen = settings(plan)
    return {name: {**given.get(name, {}), **chosen.get(name, {})} for name in {**given, **chosen}}


def _words(plan: Plan) -> str:
    return ", ".join(
        f"{kind} {'/'.join(f'{part:.0%} {tier}' for tier, part in tiers.items())}"
        for kind, tiers in placement_of(plan).items()
    )


if __name__ == "__main__":
    with reported():
        main()
