"""The compiled update against its reference (bit for bit) and against torch.optim (to rounding)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.errors import ConfigError
from tierzero.optim import jit, loops, reference
from tierzero.optim.formats import StateFormat, load_master, state_format, store_master
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.kernel import GRAD_DTYPES, update, warm_up
from tierzero.optim.reference import update_reference

FORMATS = [state_format(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
SIZES = [*range(1, 68), 1023, 1024, 1025]
State = tuple[torch.Tensor, dict[str, torch.Tensor]]

hypers = st.builds(
    AdamHyper,
    lr=st.floats(0.0, 1.0),
    beta1=st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.5, 0.95, 0.999]),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    decoupled=st.booleans(),
    step=st.integers(1, 100_000),
)


def make_state(fmt: StateFormat, master: torch.Tensor) -> State:
    weight = torch.empty(master.numel(), dtype=fmt.weight_dtype)
    parts = {segment.name: torch.zeros(master.numel(), dtype=segment.dtype) for segment in fmt.optimizer}
    store_master(fmt, master, weight, parts)
    return weight, parts


def copy_state(state: State) -> State:
    return state[0].clone(), {name: part.clone() for name, part in state[1].items()}


def assert_same_bits(fmt: StateFormat, left: State, right: State) -> None:
    """Equal bits but for NaN, whose payload is not specified."""
    left_master, right_master = load_master(fmt, *left), load_master(fmt, *right)
    nan = left_master.isnan()
    assert torch.equal(nan, right_master.isnan())
    for name in ("weight", *left[1]):
        a = left[0] if name == "weight" else left[1][name]
        b = right[0] if name == "weight" else right[1][name]
        ignored = nan if name == "lo" else a.isnan()
        assert torch.equal(ignored, nan if name == "lo" else b.isnan()), name
        words = torch.int32 if a.element_size() == 4 else torch.int16
        assert torch.equal(a.view(words)[~ignored], b.view(words)[~ignored]), name


def vector(n: int, generator: torch.Generator, *, special: bool) -> torch.Tensor:
    """fp32 values over many magnitudes; with ``special`` some zeros, denormals, infinities and NaN."""
    x = torch.ldexp(torch.randn(n, generator=generator), torch.randint(-30, 4, (n,), generator=generator))
    if special and n:
        values = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3e38, torch.inf, -torch.inf, torch.nan])
        where = torch.rand(n, generator=generator) < 0.2
        x[where] = values[torch.randint(len(values), (int(where.sum()),), generator=generator)]
    return x


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(GRAD_DTYPES),
    st.integers(0, 70) | st.integers(1020, 1030),
    hypers,
    st.sampled_from([1.0, 0.3, 2.0**-16, 7.0]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_kernel_has_the_bits_of_the_reference(
    fmt: StateFormat, grad_dtype: torch.dtype, n: int, hyper: AdamHyper, scale: float, special: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = make_state(fmt, vector(n, generator, special=special))
    ours[1]["m"].copy_(vector(n, generator, special=special))
    ours[1]["v"].copy_(vector(n, generator, special=special).abs())
    theirs = copy_state(ours)
    grad = vector(n, generator, special=special).to(grad_dtype)
    before = grad.clone()
    update(fmt, *ours, grad, hyper, scale)
    update_reference(fmt, *theirs, grad, hyper, scale)
    assert_same_bits(fmt, ours, theirs)
    assert torch.equal(grad.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("fmt", "grad_dtype"), list(product(FORMATS, GRAD_DTYPES)))
def test_kernel_follows_the_reference_over_steps(fmt: StateFormat, grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = make_state(fmt, torch.randn(1025, generator=generator))
    theirs = copy_state(ours)
    for step in range(1, 31):
        grad = torch.randn(1025, generator=generator).to(grad_dtype)
        hyper = AdamHyper(1e-2 / step, 0.9, 0.95, 1e-8, 0.1, step % 2 == 0, step)
        update(fmt, *ours, grad, hyper, 0.37)
        update_reference(fmt, *theirs, grad, hyper, 0.37)
    assert_same_bits(fmt, ours, theirs)
    assert torch.equal(load_master(fmt, *ours).to(fmt.weight_dtype).float(), ours[0].float()) or fmt.name == "bf16"


@pytest.mark.parametrize(
    ("decoupled", "betas"),
    [
        (True, (0.9, 0.95)),
        (False, (0.3, 0.999)),
        pytest.param(True, (0.3, 0.999), marks=pytest.mark.long),
        pytest.param(False, (0.9, 0.95), marks=pytest.mark.long),
    ],
)
def test_fp32_follows_torch_optim_for_200_steps(decoupled: bool, betas: tuple[float, float]) -> None:
    fmt = state_format(torch.float32)
    generator = torch.Generator().manual_seed(2)
    states = [make_state(fmt, 1 + torch.rand(n, generator=generator)) for n in SIZES]
    theirs = [torch.nn.Parameter(weight.clone()) for weight, _ in states]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(theirs, lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(1, 201):
        hyper = AdamHyper(1e-3, *betas, 1e-8, 0.1, decoupled, step)
        for (weight, parts), parameter in zip(states, theirs, strict=True):
            grad = torch.randn(weight.numel(), generator=generator)
            parameter.grad = grad.clone()
            update(fmt, weight, parts, grad * 4, hyper, 0.25)
        optimizer.step()
    for (weight, parts), parameter in zip(states, theirs, strict=True):
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=0)
        moments = optimizer.state[parameter]
        torch.testing.assert_close(parts["m"], moments["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parts["v"], moments["exp_avg_sq"], rtol=1e-5, atol=0)


def test_split_master_follows_the_fp32_state_bit_for_bit() -> None:
    bf16, fp32 = state_format(torch.bfloat16), state_format(torch.float32)
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(1000, generator=generator)
    split, whole = make_state(bf16, start), make_state(fp32, start)
    for step in range(1, 51):
        grad = torch.randn(1000, generator=generator).bfloat16()
        hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, True, step)
        update(bf16, *split, grad, hyper, 1.0)
        update(fp32, *whole, grad.float(), hyper, 1.0)
    assert torch.equal(load_master(bf16, *split), whole[0])
    assert torch.equal(split[1]["v"], whole[1]["v"])
    assert (split[0].float() - whole[0]).abs().le(whole[0].abs() / 256).all()


def test_fp16_weight_is_the_rounded_master_and_overflows_to_infinity() -> None:
    fmt = state_format(torch.float16)
    state = make_state(fmt, torch.tensor([1.0, 65504.0, -65504.0, 1e-8]))
    update(fmt, *state, torch.tensor([1.0, -1.0, 1.0, 1.0]), AdamHyper(100.0, 0.0, 0.0, 0.0, 0.0, True, 1))
    assert state[1]["master"].tolist() == [-99.0, 65604.0, -65604.0, -100.0]
    assert state[0].tolist() == [-99.0, torch.inf, -torch.inf, -100.0]


def test_beta1_zero_forgets_the_moment_exactly() -> None:
    fmt = state_format(torch.float32)
    weight, parts = make_state(fmt, torch.zeros(3))
    parts["m"].fill_(1e8)
    grad = torch.tensor([1.0, 0.3, -7.0])
    update(fmt, weight, parts, grad, AdamHyper(1e-3, 0.0, 0.9, 1e-8, 0.0, True, 1))
    assert torch.equal(parts["m"], grad)


def test_moments_without_a_gradient_decay_to_zero_and_not_to_subnormals() -> None:
    fmt = state_format(torch.float32)
    weight, parts = make_state(fmt, torch.ones(4))
    parts["m"].copy_(torch.tensor([2e-38, -2e-38, 3e-45, -1e-30]))
    parts["v"].copy_(torch.tensor([2e-38, 1e-40, 1.0, 0.0]))
    for step in range(1, 21):
        update(fmt, weight, parts, torch.zeros(4), AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.0, True, step))
    assert (parts["m"] == 0).tolist() == [True, True, True, False]
    assert (parts["v"] == 0).tolist() == [True, True, False, True]


def test_infinite_weight_does_not_spoil_the_moments_without_l2() -> None:
    fmt = state_format(torch.float32)
    for hyper in (AdamHyper(1e-3, 0.9, 0.9, 1e-8, 0.1, True, 1), AdamHyper(1e-3, 0.2, 0.9, 1e-8, 0.0, False, 1)):
        weight, parts = make_state(fmt, torch.tensor([torch.inf]))
        update(fmt, weight, parts, torch.ones(1), hyper)
        assert parts["m"].isfinite().all()
        assert weight.isinf().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_threads_on_disjoint_slices_and_tiles_of_any_size_change_no_bit(fmt: StateFormat) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = make_state(fmt, torch.randn(200_001, generator=generator))
    sliced = copy_state(whole)
    grad = torch.randn(200_001, generator=generator).bfloat16()
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 3)
    update(fmt, *whole, grad, hyper, 0.5)

    def work(start: int) -> None:
        piece = slice(start, start + 777)
        update(fmt, sliced[0][piece], {k: part[piece] for k, part in sliced[1].items()}, grad[piece], hyper, 0.5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, 200_001, 777)))
    assert_same_bits(fmt, whole, sliced)
    assert loops.adam_bf16.targetoptions["nogil"]


def test_segments_at_odd_addresses_are_updated() -> None:
    fmt = state_format(torch.bfloat16)
    n = 51
    generator = torch.Generator().manual_seed(5)
    ours = make_state(fmt, torch.randn(n, generator=generator))
    expected = copy_state(ours)
    raw = bytearray(n * 4 + 1)
    unaligned = torch.frombuffer(raw, dtype=torch.float32, offset=1, count=n)
    unaligned.copy_(ours[1]["m"])
    grad = torch.randn(n, generator=generator)
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1)
    update(fmt, ours[0], {**ours[1], "m": unaligned}, grad, hyper)
    update(fmt, *expected, grad, hyper)
    assert torch.equal(unaligned, expected[1]["m"])
    assert torch.equal(ours[0], expected[0])


def test_reference_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = state_format(torch.bfloat16)
    ours = make_state(fmt, torch.linspace(-3, 3, 100))
    theirs = copy_state(ours)
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, False, 2)
    update_reference(fmt, *ours, torch.ones(100), hyper)
    monkeypatch.setattr(reference, "_CHUNK", 7)
    update_reference(fmt, *theirs, torch.ones(100), hyper)
    assert_same_bits(fmt, ours, theirs)


def test_bad_state_is_refused_before_it_is_touched() -> None:
    fmt = state_format(torch.bfloat16)
    weight, parts = make_state(fmt, torch.ones(8))
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1)
    bad: list[tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, str]] = [
        (weight, parts, torch.ones(7), "grad"),
        (weight, parts, torch.ones(8, dtype=torch.float64), "gradients of dtype"),
        (weight.float(), parts, torch.ones(8), "weight"),
        (weight, {"lo": parts["lo"], "m": parts["m"]}, torch.ones(8), "'v'"),
        (weight, {**parts, "m": torch.zeros(16)[::2]}, torch.ones(8), "m must be"),
        (weight, {**parts, "v": torch.zeros(8, device="meta")}, torch.ones(8), "v is on meta"),
    ]
    for w, p, grad, message in bad:
        with pytest.raises(ValueError, match=message):
            update(fmt, w, p, grad, hyper)
    assert torch.equal(weight, torch.ones(8).bfloat16())
    assert not parts["m"].any()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", np.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", np.inf),
        ("weight_decay", -1.0),
        ("step", 0),
    ],
)
def test_undefined_hyperparameters_are_refused(key: str, value: float) -> None:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True, "step": 1}
    with pytest.raises(ConfigError, match=key):
        AdamHyper(**{**values, key: value})  # type: ignore[arg-type]


def test_warm_up_compiles_what_update_needs() -> None:
    fmt = state_format(torch.float16)
    for hyper in (AdamHyper(1e-3, 0.9, 0.9, 1e-8, 0.1, True, 1), AdamHyper(1e-3, 0.9, 0.9, 1e-8, 0.1, False, 1)):
        warm_up(fmt, torch.float16, hyper)
        compiled = set(loops.adam_fp16.overloads)
        weight, parts = make_state(fmt, torch.ones(8))
        update(fmt, weight, parts, torch.ones(8, dtype=torch.float16), hyper)
        assert set(loops.adam_fp16.overloads) == compiled


def test_without_a_writable_cache_loops_compile_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    njit = jit.numba.njit

    def no_cache(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(jit.numba, "njit", no_cache)
    monkeypatch.setattr(jit, "_noticed", False)
    double = jit.loop(lambda x: x * 2)
    assert jit.loop(lambda x: x + 1)(1) == 2
    assert double(21) == 42
    assert sum("NUMBA_CACHE_DIR" in record.message for record in caplog.records) == 1


def test_a_cache_that_cannot_be_written_does_not_stop_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        """Compiles like Numba's dispatcher on a full disk: fails to keep the first result, but has it."""

        overloads: dict[object, object]

        def __init__(self) -> None:
            self.overloads = {}

        def compile(self, signature: object) -> None:
            if signature in self.overloads:
                return
            self.overloads[signature] = True
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit, "_noticed", False)
    loop = FullDisk()
    jit.compile_for(loop, (1, 2))
    assert (1, 2) in loop.overloads
    assert jit._noticed
