"""How the package compiles its loops: one set of options, and a cache on disk where one can be written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

_log = logging.getLogger(__name__)
_compiling = threading.Lock()
_noticed = False


def loop(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first use for the types it is called with; it runs without the GIL.

    The compiled code is kept on disk, and a change of the CPU or of Numba renews it. No fastmath: results are specified
    to the bit.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # Numba found no directory for its cache: read-only package, no home
        _notice(error)
        return numba.njit(**options)(function)


def compile_for(function: Any, signature: tuple[Any, ...]) -> None:
    """Compile a ``loop`` for the argument types ``signature`` unless that is done. Any thread may call it."""
    with _compiling:
        if signature in function.overloads:
            return
        try:
            function.compile(signature)
        except OSError as error:  # a full disk, say: Numba has compiled by then and only failed to keep the result
            _notice(error)
            function.compile(signature)


def tuple_type(named_tuple: type, dtype: type[np.generic]) -> Any:
    """Numba's type of a NamedTuple whose fields are all of ``dtype``."""
    make: Any = types.NamedUniTuple
    return make(numba.from_dtype(np.dtype(dtype)), len(named_tuple._fields), named_tuple)  # type: ignore[attr-defined]


def array_type(dtype: np.dtype[Any]) -> Any:
    """Numba's type of a contiguous 1-D array."""
    return types.Array(numba.from_dtype(dtype), 1, "C")


def _notice(error: Exception) -> None:
    global _noticed
    if not _noticed:
        _noticed = True
        _log.warning(
            "compiled kernels cannot be cached (%s): every process compiles them again; "
            "set NUMBA_CACHE_DIR to a writable folder",
            error,
        )
