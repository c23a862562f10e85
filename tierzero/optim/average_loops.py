"""The compiled loops over averages of the weights. Importing this imports Numba; `tierzero.optim.average` does so on
first use.
"""

from __future__ import annotations

from typing import Any

from tierzero.optim.bits import bits_float, join_bits
from tierzero.optim.jit import loop


@loop
def average_split(hi: Any, lo: Any, ema: Any, rate: Any) -> None:
    """Move ema (float32) towards the master that hi (uint16) and lo (int16) hold."""
    for i in range(ema.size):
        ema[i] = ema[i] + rate * (bits_float(join_bits(hi[i], lo[i])) - ema[i])


@loop
def average_whole(master: Any, ema: Any, rate: Any) -> None:
    """Move ema (float32) towards master (float32)."""
    for i in range(ema.size):
        ema[i] = ema[i] + rate * (master[i] - ema[i])
