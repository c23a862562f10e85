"""The average of the weights: the loops against their reference (bit for bit) and PyTorch's own, and the exchange."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tierzero.optim.average import begin_average, exchange_average, move_average, move_average_reference, rate_of
from tierzero.optim.formats import StateFormat, load_master, state_format, store_master, with_average
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.kernel import update

from .test_kernel import copy_state, make_state, vector

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
FORMATS = [with_average(state_format(dtype)) for dtype in DTYPES]


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(FORMATS),
    st.integers(0, 70) | st.integers(1020, 1030),
    st.sampled_from([0.999, 0.9, 0.3, 1 - 1e-9, 1e-12]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_loops_have_the_bits_of_the_reference(
    fmt: StateFormat, n: int, decay: float, special: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = make_state(fmt, vector(n, generator, special=special))
    ours[1]["ema"].copy_(vector(n, generator, special=special))
    before, theirs = copy_state(ours), copy_state(ours)
    move_average(fmt, *ours, rate_of(decay))
    move_average_reference(fmt, *theirs, rate_of(decay))
    found, wanted = ours[1].pop("ema"), theirs[1].pop("ema")
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(words(found)[~found.isnan()], words(wanted)[~found.isnan()])
    for name, part in (("weight", ours[0]), *ours[1].items()):
        assert torch.equal(words(part), words(before[0] if name == "weight" else before[1][name])), name


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_exchanged_twice_every_bit_is_as_before(fmt: StateFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    master, average = (vector(5000, generator, special=True) for _ in range(2))
    state = make_state(fmt, master)
    begin_average(fmt, *state)
    assert torch.equal(words(load_master(fmt, *state)), words(state[1]["ema"]))
    state[1]["ema"].copy_(average)
    before = copy_state(state)
    exchange_average(fmt, *state)
    other = make_state(fmt, average)
    assert torch.equal(words(state[0]), words(other[0]))  # the weight is that of a master with these values
    assert torch.equal(words(load_master(fmt, *state)), words(load_master(fmt, *other)))
    exchange_average(fmt, *state)
    for name, part in (("weight", state[0]), *state[1].items()):
        assert torch.equal(words(part), words(before[0] if name == "weight" else before[1][name])), name


def test_it_is_the_average_of_pytorch() -> None:
    """Of `AveragedModel`, which takes over the weights at its first update."""
    fmt = FORMATS[DTYPES.index(torch.float32)]
    module = nn.Linear(40, 25, bias=False)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(module)
    weight, parts = make_state(fmt, module.weight.detach().reshape(-1).clone())
    begin_average(fmt, weight, parts)
    for step in range(1, 11):
        grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        update(fmt, weight, parts, grad, AdamHyper(1e-2, 0.9, 0.95, 1e-8, 0.1, True, step))
        move_average(fmt, weight, parts, rate_of(0.9))
        with torch.no_grad():
            module.weight.copy_(weight.view(25, 40))
        theirs.update_parameters(module)
    wanted = theirs.module.weight.detach().reshape(-1)
    assert float((parts["ema"] - wanted).abs().max()) < 1e-6
    assert float((weight - wanted).abs().max()) > 1e-3  # it lags behind


def test_an_update_leaves_it_alone_and_formats_without_have_none() -> None:
    plain = state_format(torch.bfloat16)
    fmt = with_average(plain)
    assert fmt.optimizer_bytes(100) == plain.optimizer_bytes(100) + 400
    assert fmt.updated == plain.optimizer == plain.updated
    assert (fmt.is_averaged, plain.is_averaged) == (True, False)
    state = make_state(fmt, torch.ones(70))
    state[1]["ema"].fill_(5.0)
    update(fmt, *state, torch.ones(70), AdamHyper(0.1, 0.9, 0.95, 1e-8, 0.0, True, 1))
    assert bool((state[1]["ema"] == 5.0).all())
    other = make_state(plain, torch.ones(70))
    begin_average(plain, *other)
    update(plain, *other, torch.ones(70), AdamHyper(0.1, 0.9, 0.95, 1e-8, 0.0, True, 1))
    assert torch.equal(words(other[0]), words(state[0]))
    with pytest.raises(ValueError, match="ema"):
        move_average(fmt, state[0], {**state[1], "ema": torch.zeros(69)}, 0.1)
    store_master(fmt, torch.zeros(70), *state)
    assert bool((state[1]["ema"] == 5.0).all())
