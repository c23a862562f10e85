"""Fused accumulation: the bits of PyTorch, and one sum of squares whatever the threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.optim import loops
from tierzero.optim.gradient import BLOCK, accumulate, sum_of_squares

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = list(product(DTYPES, DTYPES))


def vector(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of very different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-14, 8, (n,), generator=generator)
    return torch.ldexp(torch.randn(n, generator=generator), exponents).to(dtype)


def documented_sum(x: torch.Tensor) -> float:
    """The specified order of additions, written out in NumPy."""
    values = x.double().numpy()
    total = 0.0
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        lanes = np.zeros(loops.LANES)
        for row in range(0, block.size, loops.LANES):
            piece = block[row : row + loops.LANES]
            lanes[: piece.size] += piece * piece
        while lanes.size > 1:
            half = lanes.size // 2
            lanes = lanes[:half] + lanes[half:]
        total += float(lanes[0])
    return total


@pytest.mark.parametrize(("dst_dtype", "src_dtype"), PAIRS)
@pytest.mark.parametrize("overwrite", [True, False])
def test_result_has_torchs_bits(dst_dtype: torch.dtype, src_dtype: torch.dtype, overwrite: bool) -> None:
    for n in (*range(68), 1023, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77):
        dst, src = vector(n, dst_dtype, n), vector(n, src_dtype, n + 1)
        expected = dst.clone().copy_(src) if overwrite else dst.clone().add_(src)
        before = src.clone()
        total = accumulate(dst, src, overwrite=overwrite)
        assert torch.equal(dst, expected)
        assert torch.equal(src, before)
        assert total == sum_of_squares(expected) == documented_sum(expected)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 6 * BLOCK), st.sampled_from(PAIRS), st.integers(1, 9), st.booleans(), st.integers(0, 2**32))
def test_threads_change_no_bit(
    n: int, pair: tuple[torch.dtype, torch.dtype], threads: int, overwrite: bool, seed: int
) -> None:
    one, src = vector(n, pair[0], seed), vector(n, pair[1], seed + 1)
    many, pooled = one.clone(), one.clone()
    total = accumulate(one, src, overwrite=overwrite)
    assert accumulate(many, src, overwrite=overwrite, threads=threads) == total
    with ThreadPoolExecutor(2) as pool:
        assert accumulate(pooled, src, overwrite=overwrite, threads=threads, executor=pool) == total
        assert sum_of_squares(pooled, threads=threads, executor=pool) == total
    assert torch.equal(one, many)
    assert torch.equal(one, pooled)


def test_sum_is_close_to_the_exact_one_and_does_not_overflow_in_fp32() -> None:
    x = vector(100_003, torch.float32, 5)
    assert math.isclose(sum_of_squares(x), math.fsum((x.double() ** 2).tolist()), rel_tol=1e-14)
    assert sum_of_squares(torch.full((10,), 3e38)) == pytest.approx(10 * 3e38**2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 31, 5000, 9998])
def test_sum_is_not_finite_if_an_element_is_not(dtype: torch.dtype, bad: float, where: int) -> None:
    src = torch.ones(9999, dtype=dtype)
    dst = torch.zeros(9999, dtype=dtype)
    assert accumulate(dst, src, overwrite=False) == 9999.0
    src[where] = bad
    assert not math.isfinite(accumulate(dst, src, overwrite=False))
    assert not math.isfinite(sum_of_squares(dst))


def test_overflow_of_a_half_precision_sum_is_seen() -> None:
    dst = torch.full((7,), 60000.0, dtype=torch.float16)
    assert accumulate(dst, torch.full((7,), 60000.0, dtype=torch.float16), overwrite=False) == math.inf


@pytest.mark.parametrize(
    ("dst", "src", "named"),
    [
        (torch.zeros(4), torch.zeros(5), "src"),
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4), "dst"),
        (torch.zeros(4), torch.zeros(8)[::2], "src"),
        (torch.zeros(2, 2), torch.zeros(4), "dst"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "src"),
    ],
)
def test_bad_tensors_are_named(dst: torch.Tensor, src: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        accumulate(dst, src, overwrite=True)
