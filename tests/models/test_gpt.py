from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tierzero.models import GPT, Block, cross_entropy


def model(tied: bool = False, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(32, 2, 4, 50, 16, tied=tied, dropout=dropout)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(2, 60), st.integers(1, 2000), st.integers(0, 9))
def test_chunked_cross_entropy_is_cross_entropy(tokens: int, vocab: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 8, generator=generator, dtype=torch.float32)
    weight = torch.randn(vocab, 8, generator=generator)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    found, expected = [], []
    for into, loss_of in (
        (found, lambda a, b: cross_entropy(a, b, targets, chunk=chunk)),
        (expected, lambda a, b: F.cross_entropy(F.linear(a, b), targets)),
    ):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(a, b)
        (3 * loss).backward()
        into.extend([loss.detach(), a.grad, b.grad])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [10**9, 500])
def test_chunked_cross_entropy_in_bf16(chunk: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32).bfloat16().requires_grad_()
    weight = (torch.randn(300, 32) * 0.2).bfloat16().requires_grad_()
    targets = torch.randint(300, (64,))
    loss = cross_entropy(x, weight, targets, chunk=chunk)
    assert loss.dtype == torch.float32
    grad_x, grad_weight = torch.autograd.grad(loss, (x, weight))
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.cross_entropy(exact_x @ exact_weight.t(), targets)
    exact.backward()
    assert abs(float(loss.detach()) - float(exact.detach())) < 2e-3
    for grad, true in ((grad_x, exact_x.grad), (grad_weight, exact_weight.grad)):
        assert true is not None
        assert grad.dtype == torch.bfloat16
        assert float((grad.double() - true).norm() / true.norm()) < 0.01


def test_logits_never_exist_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab, chunk = 256, 512, 4096
    largest = []
    plain = torch.mm

    def watched(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        made = plain(*args, **kwargs)
        if made.shape[1] != 8:  # products back into the model's width are gradients, not logits
            largest.append(made.numel())
        return made

    monkeypatch.setattr(torch, "mm", watched)
    x, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    cross_entropy(x, weight, torch.randint(vocab, (tokens,)), chunk=chunk).backward()
    assert len(largest) == 2 * tokens * vocab // chunk
    assert max(largest) <= chunk


@pytest.mark.parametrize("tied", [False, True])
def test_loss_agrees_with_logits(tied: bool) -> None:
    made = model(tied)
    ids, targets = torch.randint(50, (2, 3, 16))[:, :2]
    logits = made(ids)
    assert logits.shape == (2, 16, 50)
    torch.testing.assert_close(made(ids, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert sum(p.numel() for p in made.parameters()) == 12 * 32 * 32 * 2 + 5 * 32 + 16 * 32 + 50 * 32 * (2 - tied)


def test_the_future_is_not_seen() -> None:
    made = model().eval()
    ids = torch.randint(50, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    before, after = made(ids), made(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_a_meta_model_can_be_filled_module_by_module() -> None:
    with torch.device("meta"):
        made = GPT(32, 2, 4, 50, 16)
    made.to_empty(device="cpu")
    for tensor in made.parameters():
        nn.init.constant_(tensor, float("nan"))
    for module in made.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()  # type: ignore[operator]
    assert all(tensor.isfinite().all() for tensor in made.parameters())
    assert 0.015 < float(made.token.weight.detach().std()) < 0.025
    assert isinstance(made.blocks[0], Block)
    assert 0.007 < float(made.blocks[0].down.weight.detach().std()) < 0.013


def test_it_learns() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    ids = torch.arange(17).repeat(4, 1)
    losses = []
    for _ in range(30):
        loss = made(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0]
    assert made.generate(torch.tensor([[0]]), 10, temperature=0)[0].tolist() == list(range(11))


def test_generate_is_reproducible_and_restores_the_mode() -> None:
    made = model(dropout=0.5).train()
    start = torch.tensor([[1, 2]])
    one, again = (made.generate(start, 20, 1.0, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, again)
    assert one.shape == (1, 22)
    assert made.training


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_len 16"):
        model()(torch.zeros(1, 17, dtype=torch.int64))


def test_dropout_acts_in_training_only() -> None:
    made = model(dropout=0.5)
    ids = torch.randint(50, (1, 16))
    assert not torch.equal(made(ids), made(ids))
    made.eval()
    assert torch.equal(made(ids), made(ids))
