"""Every failure as one line and an exit code: 2 for what the user can fix, 1 for a fault, 128 + n for signal n."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

import typer

_TRACEBACK = "TIERZERO_TRACEBACK"


@contextmanager
def reported(same_everywhere: bool = False) -> Iterator[None]:
    """Turns exceptions into one line on standard error and the exit code, and warnings into notes.

    ``same_everywhere``: every rank of a node finds the same, so that one of them says it.
    """
    from ..errors import TierZeroError
    from ..training.stopping import Stopped

    shown = warnings.showwarning
    warnings.showwarning = _note
    try:
        yield
    except Stopped as stopped:
        _exit(stopped.exit_code)
    except KeyboardInterrupt:
        _exit(130)
    except BrokenPipeError:
        # Whoever read the output has gone; nobody is left to tell, and the exit must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(1)
    except TierZeroError as error:
        _fail(str(error), error, same_everywhere)
    except Exception as error:
        _fail(f"{_about(error)} (set {_TRACEBACK}=1 for the traceback)", error, False)
    finally:
        warnings.showwarning = shown


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what the command-line parser refuses into one line and exit code 2."""
    try:
        yield
    except typer.Abort:
        _exit(130)
    except Exception as error:
        # The parser's base class has no public name in typer; its errors are those that can state themselves.
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(error.format_message().split())
        if message:  # there is none where the help was shown for want of arguments
            where = getattr(getattr(error, "ctx", None), "command_path", "tierzero")
            print(f"tierzero: error: {message} (see {where} --help)", file=sys.stderr)
        _exit(2)


def _about(error: Exception) -> str:
    """The error in words. A broken connection is only what another rank's failure looks like from here."""
    text = str(error)
    if "RANK" in os.environ and any(sign in text for sign in ("gloo", "Connection closed by peer", "remote process")):
        return "lost contact with another rank, which has ended; its own message says why"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_code(error: BaseException) -> int:
    """2 for what the user can fix, 1 for a fault."""
    from ..errors import ConfigError

    return 2 if isinstance(error, ConfigError) else 1


def _fail(message: str, error: Exception, once: bool) -> NoReturn:
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    rank = os.environ.get("RANK")
    if not once or os.environ.get("LOCAL_RANK", "0") == "0":
        where = f"rank {rank}: " if rank is not None and not once else ""
        print(f"tierzero: error: {where}{' '.join(message.split())}", file=sys.stderr, flush=True)
    _exit(exit_code(error))


def _exit(code: int) -> NoReturn:
    sys.exit(code)


def _note(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"tierzero: note: {' '.join(str(message).split())}", file=file or sys.stderr, flush=True)
