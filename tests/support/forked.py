"""Processes that begin with PyTorch and TierZero imported: forks of a server that has imported them once.

The imports take seconds in every process, a fork takes milliseconds. The server makes no threads and runs nothing, so
that a fork of it is as good as a fresh process.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = "tests.support.preloaded"


def fork(function: Callable[..., Any], *args: Any, environment: Mapping[str, str]) -> ForkServerProcess:
    """Starts ``function(*args)``, of a module in tests.support, with ``environment`` and in the root folder.

    The process ends with the one that started it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    _ensure_server()
    process = context.Process(target=_begin, args=(dict(environment), function, args), daemon=True)
    process.start()
    return process


class Module:
    """``python -m MODULE ARGUMENTS`` as a fork in a session of its own, with what it prints in files.

    Or ``python SCRIPT ARGUMENTS``, where ``module`` is the path of a script.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path
    ) -> None:
        files = str(output), str(errors)
        self._process = fork(_run_module, module, tuple(arguments), *files, environment=environment)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked module", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()


def run_module(module: str, *arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGUMENTS`` as a fork, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        process = Module(module, arguments, os.environ, output, errors)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([module, *arguments], code, output.read_text(), errors.read_text())


def _ensure_server() -> None:
    """Its own environment is that of its imports: found here first, and one thread for each process."""
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _begin(environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    function(*args)


def _run_module(module: str, arguments: tuple[str, ...], output: str, errors: str) -> None:
    """As the interpreter does it, to the functions at its exit."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
