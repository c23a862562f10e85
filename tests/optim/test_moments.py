"""Moments in bf16 and int8: the compiled loops have the bits of the reference, and what is read back is near."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.optim.formats import BLOCK, Moments, StateFormat, load_master, state_format, store_master
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.kernel import GRAD_DTYPES, update
from tierzero.optim.moments import load_moments, store_moments
from tierzero.optim.reference import update_reference

from .test_kernel import State, copy_state, hypers, vector

FORMATS = [
    state_format(torch.bfloat16, "bf16"),
    state_format(torch.bfloat16, "int8"),
    state_format(torch.float32, "int8"),
    state_format(torch.float16, "int8"),
]
GRADIENT = {fmt: GRAD_DTYPES[at % 3] for at, fmt in enumerate(FORMATS)}
"""One each: every pair compiles a loop of its own."""
LENGTHS = st.integers(0, 5) | st.integers(BLOCK - 2, BLOCK + 2) | st.integers(2 * BLOCK, 5 * BLOCK)
USUAL = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1)


def make_state(fmt: StateFormat, master: torch.Tensor) -> State:
    weight = torch.empty(master.numel(), dtype=fmt.weight_dtype)
    parts = {part.name: torch.zeros(part.values(master.numel()), dtype=part.dtype) for part in fmt.optimizer}
    store_master(fmt, master, weight, parts)
    return weight, parts


def assert_same_bits(fmt: StateFormat, left: State, right: State) -> None:
    """Equal but for the payloads of NaN."""
    for a, b in ((load_master(fmt, *left), load_master(fmt, *right)), (left[0].float(), right[0].float())):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    for segment in fmt.moment_segments:
        a, b = left[1][segment.name].float(), right[1][segment.name].float()
        assert torch.equal(a.isnan(), b.isnan()), segment.name
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), segment.name


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FORMATS),
    LENGTHS,
    hypers.filter(lambda hyper: hyper.decoupled and hyper.beta1 > 0.5),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_kernel_has_the_bits_of_the_reference(
    fmt: StateFormat, n: int, hyper: AdamHyper, special: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = make_state(fmt, vector(n, generator, special=special))
    root = vector(n, generator, special=False).abs() * (torch.rand(n, generator=generator) < 0.9)
    m, v = root * torch.randn(n, generator=generator), (root * root).bfloat16().float()
    store_moments(fmt, m, v, ours[1])
    theirs = copy_state(ours)
    for step in range(3):
        grad = vector(n, generator, special=special and step == 1).to(GRADIENT[fmt])
        update(fmt, *ours, grad, hyper, 0.5)
        update_reference(fmt, *theirs, grad, hyper, 0.5)
        assert_same_bits(fmt, ours, theirs)


def test_unusual_hyperparameters_have_the_bits_too() -> None:
    """L2 weight decay and a small beta1 are other loops."""
    fmt = state_format(torch.bfloat16, "int8")
    ours = make_state(fmt, torch.randn(300))
    theirs = copy_state(ours)
    for step in range(1, 4):
        grad, hyper = torch.randn(300).bfloat16(), AdamHyper(1e-2, 0.3, 0.99, 1e-8, 0.5, False, step)
        update(fmt, *ours, grad, hyper)
        update_reference(fmt, *theirs, grad, hyper)
    assert_same_bits(fmt, ours, theirs)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_pieces_of_whole_blocks_change_no_bit(moments: Moments) -> None:
    fmt = state_format(torch.bfloat16, moments)
    n = 10 * BLOCK + 37
    whole = make_state(fmt, torch.randn(n))
    grad = torch.randn(n).bfloat16()
    for first in (1, 3, 7):
        pieces, expected = copy_state(whole), copy_state(whole)
        for start, stop in ((0, first * BLOCK), (first * BLOCK, 9 * BLOCK), (9 * BLOCK, n)):
            inside = slice(start, stop)
            update(fmt, pieces[0][inside], fmt.cut(pieces[1], inside), grad[inside], USUAL)
        update(fmt, *expected, grad, USUAL)
        assert_same_bits(fmt, pieces, expected)


def test_what_is_read_back_is_stored_again_as_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    root = vector(1000, generator, special=False).abs()
    m, v = root * torch.randn(1000, generator=generator), root * root
    for moments in ("bf16", "int8"):
        fmt = state_format(torch.float32, moments)
        _, first = make_state(fmt, torch.zeros(1000))
        store_moments(fmt, m, v, first)
        read = load_moments(fmt, first, 1000)
        _, again = make_state(fmt, torch.zeros(1000))
        store_moments(fmt, *read, again)
        once_more = load_moments(fmt, again, 1000)
        assert torch.equal(again["v"], first["v"])
        torch.testing.assert_close(once_more[1], read[1], rtol=1e-6, atol=0)
        torch.testing.assert_close(once_more[0], read[0], rtol=1e-5, atol=0)


def test_int8_keeps_m_over_the_root_of_v_and_no_root_becomes_zero() -> None:
    """Over elements whose gradients differ by ten orders of magnitude; the weight moves by that ratio."""
    generator = torch.Generator().manual_seed(4)
    root = torch.logspace(-12, -2, 4 * BLOCK)[torch.randperm(4 * BLOCK, generator=generator)]
    m = root * torch.empty(4 * BLOCK).uniform_(-1, 1, generator=generator)
    m[::5], v = 0, root * root
    v[::5] = 0
    fmt = state_format(torch.bfloat16, "int8")
    _, parts = make_state(fmt, torch.zeros(4 * BLOCK))
    store_moments(fmt, m, v, parts, step=7)
    m_read, v_read = load_moments(fmt, parts, 4 * BLOCK)
    assert torch.equal(v_read == 0, v == 0)
    assert not m_read[v == 0].any()
    some = v > 0
    ratio, wanted = m_read[some] / v_read[some].sqrt(), m[some] / root[some]
    large = root[some] > 1e-2 * root.max()
    assert (ratio.abs() <= 4.1).all(), "code 1 for almost 2 is the worst"
    assert (ratio - wanted)[large].abs().max() < 0.2
    assert (m_read[some] - m[some])[large].abs().div(root[some][large]).max() < 0.01


def test_no_m_stands_over_a_v_of_nothing() -> None:
    fmt = state_format(torch.float32, "int8")
    _, parts = make_state(fmt, torch.zeros(3))
    store_moments(fmt, torch.tensor([1.0, -1e-3, 0.0]), torch.zeros(3), parts)
    m, v = load_moments(fmt, parts, 3)
    torch.testing.assert_close(m, torch.tensor([1.0, -1e-3, 0.0]), rtol=5e-2, atol=0)
    torch.testing.assert_close(v.sqrt(), torch.tensor([2.0**-10, 1e-3 * 2.0**-10, 0]), rtol=0.15, atol=0)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_v_follows_gradients_that_shrink(moments: Moments) -> None:
    """Rounded to nearest it would stay where it is: an update moves it by less than half a step of its type."""
    fmt = state_format(torch.float32, moments)
    generator = torch.Generator().manual_seed(5)
    n = 4 * BLOCK
    state, exact = make_state(fmt, torch.zeros(n)), torch.zeros(n)
    shrinking = torch.arange(n) % 2 == 0
    for step in range(1, 1201):
        size = torch.where(shrinking, max(0.1, 10 ** (-step / 400)), 1.0)
        grad = size * torch.randn(n, generator=generator)
        update(fmt, *state, grad, AdamHyper(1e-3, 0.9, 0.99, 1e-8, 0.0, True, step))
        exact = exact * 0.99 + 0.01 * grad * grad
    ratio = load_moments(fmt, state[1], n)[1].sqrt() / exact.sqrt()
    for part in (ratio[shrinking], ratio[~shrinking]):
        assert 0.95 < part.median() < 1.05
        assert part.min() > 0.5
        assert part.max() < 1.6


def test_a_gradient_that_is_not_finite_spoils_its_block_only() -> None:
    fmt = state_format(torch.bfloat16, "int8")
    state = make_state(fmt, torch.ones(3 * BLOCK))
    grad = torch.ones(3 * BLOCK).bfloat16()
    grad[BLOCK + 5] = torch.inf
    update(fmt, *state, grad, USUAL)
    spoilt = load_moments(fmt, state[1], 3 * BLOCK)[1].isnan()
    assert spoilt[BLOCK : 2 * BLOCK].all()
    assert int(spoilt.sum()) == BLOCK


def test_bytes_per_parameter() -> None:
    found = {
        (fmt.name, fmt.moments): fmt.optimizer_bytes(BLOCK * 100) / (BLOCK * 100)
        for fmt in (*FORMATS, state_format(torch.float32, "bf16"), state_format(torch.float16, "bf16"))
    }
    assert found == {
        ("bf16", "bf16"): 6,
        ("fp32", "bf16"): 4,
        ("fp16", "bf16"): 8,
        ("bf16", "int8"): 4 + 8 / BLOCK,
        ("fp32", "int8"): 2 + 8 / BLOCK,
        ("fp16", "int8"): 6 + 8 / BLOCK,
    }
