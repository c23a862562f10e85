"""The split fp32 master and the half precision conversions, against NumPy and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierzero.optim import bits, formats
from tierzero.optim.gradient import accumulate

WORDS = hnp.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1))
EDGES = np.array(
    [
        *(0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x00800000),  # zero, denormals
        *(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3FFF8000),  # ties below odd and even hi, carry
        *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000),  # the last that round to finite, past it, infinity
        *(0x7F800001, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF),  # NaN
    ],
    dtype=np.uint32,
)
EDGES = np.concatenate([EDGES, EDGES | np.uint32(0x80000000)])


def split(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hi, lo and the joined bits."""
    master = words.view(np.float32)
    hi, lo, back = np.empty(words.size, np.uint16), np.empty(words.size, np.int16), np.empty_like(master)
    bits.split(master, hi, lo)
    bits.join(hi, lo, back)
    return hi, lo, back.view(np.uint32)


def check_split(words: np.ndarray) -> None:
    hi, lo, back = split(words)
    nan = np.isnan(words.view(np.float32))
    assert np.array_equal(back[~nan], words[~nan])
    wide = words[~nan].astype(np.int64)
    assert np.array_equal(hi[~nan], (wide + 0x8000) >> 16), "hi is not the nearest with ties away from zero"
    assert np.array_equal((hi[~nan].astype(np.int64) << 16) + lo[~nan], wide)
    for result in (back[nan], hi[nan].astype(np.uint32) << 16):
        assert np.isnan(result.view(np.float32)).all()
        assert np.array_equal(result >> 31, words[nan] >> 31), "a NaN changed its sign"


@settings(deadline=None)
@given(WORDS)
def test_split_is_exact(words: np.ndarray) -> None:
    check_split(words)


def test_split_of_edges_and_of_every_upper_half() -> None:
    check_split(EDGES)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check_split((np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(low))


def test_default_nans_are_exact() -> None:
    words = np.array([0x7FC00000, 0xFFC00000], np.uint32)
    assert np.array_equal(split(words)[2], words)


def test_value_beyond_the_largest_bf16_has_infinite_hi_and_joins_exactly() -> None:
    words = np.array([0x7F7FFFFF, 0xFF7FFFFF], np.uint32)
    hi, _, back = split(words)
    assert hi.tolist() == [0x7F80, 0xFF80]
    assert np.array_equal(back, words)


@settings(deadline=None)
@given(WORDS)
def test_torch_split_and_join_have_the_same_bits(words: np.ndarray) -> None:
    words = np.concatenate([words, EDGES])
    hi, lo, back = split(words)
    weight, rest = torch.empty(words.size, dtype=torch.bfloat16), torch.empty(words.size, dtype=torch.int16)
    formats.split_master(torch.from_numpy(words.view(np.float32)), weight, rest)
    assert np.array_equal(weight.view(torch.uint16).numpy(), hi)
    assert np.array_equal(rest.numpy(), lo)
    assert np.array_equal(formats.join_master(weight, rest).numpy().view(np.uint32), back)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_widening_every_half_precision_value(dtype: torch.dtype) -> None:
    source = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    widened = torch.empty(source.numel())
    accumulate(widened, source, overwrite=True)
    expected = source.float()
    assert torch.equal(widened.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(widened.view(torch.int32)[keep], expected.view(torch.int32)[keep])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_rounds_as_torch_does_around_every_half_precision_value(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    sorted_values = every.unique()
    middle = (sorted_values[1:].double() + sorted_values[:-1].double()).div(2).float()
    beyond = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 3.4e38, 2.0**-25, 2.0**-26, 1e-45])
    source = torch.cat([every, middle, middle.nextafter(middle + 1), middle.nextafter(middle - 1), beyond, -beyond])
    source = torch.cat([source, torch.tensor([torch.inf, -torch.inf])])
    narrowed, expected = torch.empty(source.numel(), dtype=dtype), source.to(dtype)
    accumulate(narrowed, source, overwrite=True)
    assert torch.equal(narrowed.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_keeps_every_kind_of_nan(dtype: torch.dtype) -> None:
    words = np.array([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    words = np.concatenate([words, words | np.uint32(0x80000000)])
    narrowed = torch.empty(words.size, dtype=dtype)
    accumulate(narrowed, torch.from_numpy(words.view(np.float32)), overwrite=True)
    assert narrowed.isnan().all()
    assert (narrowed.view(torch.int16) < 0).tolist() == [False] * 4 + [True] * 4
