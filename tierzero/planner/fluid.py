"""A small simulator of work that flows through shared resources.

A resource has two queues, as a drive has reads and writes. The head of each is served; how fast depends on whether the
other one is served too, so a resource is a `Shared` of four rates. Time goes from one end of a job to the next, and
callbacks that an end sets off submit further work.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
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

    jobs: list[_Job] = field(default_factory=list)
    rate: float = 0.0


class Resource:
    """``first`` and ``second``: its queues."""

    def __init__(self, rates: Shared) -> None:
        self._rates = rates
        self.first, self.second = Queue(), Queue()
        self.busy = 0.0
        """Seconds in which either was served."""

    @property
    def is_busy(self) -> bool:
        return bool(self.first.jobs or self.second.jobs)

    def set_rates(self) -> None:
        """After queues became empty or not."""
        both = bool(self.first.jobs and self.second.jobs)
        self.first.rate = self._rates.first_beside if both else self._rates.first
        self.second.rate = self._rates.second_beside if both else self._rates.second


class Simulation:
    """Time and work of named ``resources``."""

    def __init__(self, resources: dict[str, Shared]) -> None:
        self.resources = {name: Resource(rates) for name, rates in resources.items()}
        self.now = 0.0
        self._queues = [queue for resource in self.resources.values() for queue in (resource.first, resource.second)]
        self._numbers = itertools.count()

    def submit(self, queue: Queue, work: float, done: Done, priority: int = 0) -> None:
        """``done`` is called when ``work`` has been served, at once when there is none."""
        if work <= 0:
            done()
            return
        # What is being served goes on: a more urgent job is next.
        if queue.jobs and queue.jobs[0].priority > priority:
            queue.jobs[0].priority = priority
        heapq.heappush(queue.jobs, _Job(priority, next(self._numbers), work, done))

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Goes on until ``reached``. Raises RuntimeError when nothing is left to do before."""
        while not reached():
            for resource in self.resources.values():
                resource.set_rates()
            serving = [queue for queue in self._queues if queue.jobs]
            if not serving:
                raise RuntimeError("the simulated step waits for something that nothing will bring")
            passed = min(queue.jobs[0].left / queue.rate for queue in serving)
            self.now += passed
            for resource in self.resources.values():
                resource.busy += passed if resource.is_busy else 0.0
            ended = []
            for queue in serving:
                job = queue.jobs[0]
                job.left -= passed * queue.rate
                if job.left <= 1e-9 * queue.rate:
                    ended.append(heapq.heappop(queue.jobs))
            for job in ended:
                job.done()
