"""One search from a configuration to its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierzero.config import Config
from tierzero.profiling.tune import report
from tierzero.profiling.tune.candidates import Candidate, combinations, left_alone, open_candidates
from tierzero.profiling.tune.halving import DefaultFailedError, Failed, Limits, Measured, Outcome, Search, Trial
from tierzero.profiling.tune.runs import Runs, checked
from tierzero.training.stopping import Stopped


@dataclass(frozen=True)
class Tuned:
    """``alone``: keys that could matter but were set. ``stopped``: the signal that ended it, if one did."""

    found: Outcome[Candidate]
    alone: Sequence[str]
    stopped: Stopped | None = None


def tuned(
    config: Config, ranks: int, limits: Limits, begin: Callable[[str], None], note: Callable[[str], None]
) -> Tuned:
    """Searches within ``limits``. ``begin`` is told of each run before it, ``note`` after it.

    Raises ConfigError for what the user must change, before any run where that is known then.
    """
    facts = checked(config, ranks)
    alone = left_alone(config, facts)
    runs = Runs(config, ranks, limits)

    def measure(candidate: Candidate, steps: int) -> Measured | Failed:
        begin(str(candidate))
        return runs.measure(candidate, steps)

    def told(trial: Trial[Candidate]) -> None:
        note(report.trial_line(trial))

    candidates = open_candidates(config, facts)
    search = Search(Candidate(), candidates, measure, combinations, limits, time.monotonic, told)
    if not candidates:
        return Tuned(search.outcome, alone)
    try:
        return Tuned(search.run(), alone)
    except DefaultFailedError as error:
        raise runs.failure(str(error)) from None
    except Stopped as stopped:
        search.outcome.ended = "it was stopped"
        return Tuned(search.outcome, alone, stopped)
