"""A small simulator of work that flows through shared resources.

A resource has two queues, as a drive has reads and writes. The first ``width`` jobs of each are served, in equal parts
of its rate, which depends on whether the other one is served too: so a resource is a `Shared` of four rates. Time goes
from one end of a job to the next, and callbacks that an end sets off submit further work.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Done = Callable[[], None]


@dataclass(frozen=True)
class Shared:
    """Work per second of a resource's two queues: each alone, and each beside the other."""

    first: float
    second: float
    first_beside: float
    second_beside: float

    @classmethod
    def halves(cls, first: float, second: float, both: float) -> Shared:
        """Where both together get ``both``, half each, whenever they meet."""
        return cls(first, second, both / 2, both / 2)


@dataclass(order=True)
class _Job:
    priority: int
    number: int
    left: float = field(compare=False)
    done: Done = field(compare=False)


@dataclass
class Queue:
    """One side of a resource: jobs in the order of their priority (smallest first), then of their arrival."""

    width: int = 1
    jobs: list[_Job] = field(default_factory=list)
    rate: float = 0.0
    """Of each job that is served."""

    @property
    def served(self) -> list[_Job]:
        return self.jobs[: self.width]


class Resource:
    """``first`` and ``second``: its queues."""

    def __init__(self, rates: Shared, width: int = 1) -> None:
        self._rates = rates
        self.first, self.second = Queue(width), Queue(width)
        self.busy = 0.0
        """Seconds in which either was served."""

    @property
    def is_busy(self) -> bool:
        return bool(self.first.jobs or self.second.jobs)

    def set_rates(self) -> None:
        """After queues became empty or not."""
        rates, both = self._rates, bool(self.first.jobs and self.second.jobs)
        self.first.rate = (rates.first_beside if both else rates.first) / max(1, len(self.first.served))
        self.second.rate = (rates.second_beside if both else rates.second) / max(1, len(self.second.served))


class Simulation:
    """Time and work of named ``resources``; ``widths``: of those that serve several jobs at once."""

    def __init__(self, resources: Mapping[str, Shared], widths: Mapping[str, int] | None = None) -> None:
        self.resources = {name: Resource(rates, (widths or {}).get(name, 1)) for name, rates in resources.items()}
        self.now = 0.0
        self._queues = [queue for resource in self.resources.values() for queue in (resource.first, resource.second)]
        self._numbers = itertools.count()

    def submit(self, queue: Queue, work: float, done: Done, priority: int = 0) -> None:
        """``done`` is called when ``work`` has been served, at once when there is none."""
        if work <= 0:
            done()
            return
        # What is being served goes on: a more urgent job is next.
        for job in queue.served:
            job.priority = min(job.priority, priority)
        bisect.insort(queue.jobs, _Job(priority, next(self._numbers), work, done))

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Goes on until ``reached``. Raises RuntimeError when nothing is left to do before."""
        while not reached():
            for resource in self.resources.values():
                resource.set_rates()
            serving = [queue for queue in self._queues if queue.jobs]
            if not serving:
                raise RuntimeError("the simulated step waits for something that nothing will bring")
            passed = min(min(job.left for job in queue.served) / queue.rate for queue in serving)
            self.now += passed
            for resource in self.resources.values():
                resource.busy += passed if resource.is_busy else 0.0
            ended = []
            for queue in serving:
                for job in queue.served:
                    job.left -= passed * queue.rate
                    if job.left <= 1e-9 * queue.rate:
                        queue.jobs.remove(job)
                        ended.append(job)
            for job in ended:
                job.done()
