"""Numbers as a person reads them."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """Bytes in decimal units: ``1.23 GB``."""
    return f"{_scaled(nbytes)}B"


def count(number: float) -> str:
    """A count in decimal units: ``10.9 M``."""
    return _scaled(number).rstrip()


def _scaled(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 0.9995:
            value = number / limit
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{number:.0f} "


def duration(seconds: float) -> str:
    """``4.2 s``, ``42 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
