"""Ranks that are kept between tests: processes joined by gloo that run functions of the test modules.

The ranks are started once and given one job after another. A job that fails or does not end in time costs the
processes: a collective may be half done in them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import ForkServerProcess
from typing import Any

from .forked import fork

START_SECONDS = 120
JOB_SECONDS = 60


class RankError(AssertionError):
    """What the ranks of a failed job had to say."""


@dataclass
class _Rank:
    process: ForkServerProcess
    connection: Connection


class RankPool:
    """``size`` processes; `run` calls one function in all of them and returns what each returned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        """The rendezvous file in it serves as long as the ranks make process groups."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(rank, size, *args)`` on every rank. Raises RankError with every rank's traceback."""
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.connection.send_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        answers = [self._answer(rank.connection) for rank in self._ranks]
        failures = [f"rank {index}: {text}" for index, (good, text) in enumerate(answers) if not good]
        if failures:
            self._kill()
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    @staticmethod
    def _answer(connection: Connection) -> tuple[bool, Any]:
        try:
            if not connection.poll(JOB_SECONDS):
                return False, f"no answer in {JOB_SECONDS} s"
            answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
            return answer
        except (EOFError, ConnectionError):
            return False, "the process ended"

    def _start(self) -> None:
        folder = tempfile.mkdtemp(dir=self._folder.name)
        with Listener(f"{folder}/jobs", family="AF_UNIX") as listener:
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            processes = [self._spawn(folder, rank) for rank in range(self.size)]
            connections: dict[int, Connection] = {}
            for _ in processes:
                connection = listener.accept()
                connections[connection.recv()] = connection
            self._ranks = [_Rank(process, connections[rank]) for rank, process in enumerate(processes)]
            for rank in self._ranks:
                assert rank.connection.poll(START_SECONDS), "the ranks did not find each other"
                rank.connection.recv()

    def _spawn(self, folder: str, rank: int) -> ForkServerProcess:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "OMP_NUM_THREADS": "1",
        }
        return fork(serve, folder, environment=environment)

    def close(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
            rank.process.join()
        self._ranks = []


def serve(folder: str) -> None:
    """The life of a rank: jobs until the other end closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connection = Client(f"{folder}/jobs", family="AF_UNIX")
    connection.send(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    dist.barrier()
    connection.send("joined")
    while True:
        try:
            module, name, args = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(rank, size, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
