"""Cross entropy of a linear output layer whose logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# fp32 logits alive at a time, in elements (8 MiB).
CHUNK = 2 * 2**20


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean over tokens of ``logsumexp(x @ weight.T) - (x @ weight.T)[target]``.

    The forward goes through the tokens in chunks and keeps one number per token. The backward makes the logits again,
    in chunks of the vocabulary: each row of the weight's gradient is then one product over all tokens, rounded once,
    where chunks of tokens would need an fp32 sum as large as the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        rows = max(1, chunk // weight.shape[0])
        log_sum = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        total = torch.zeros((), dtype=torch.float64 if x.device.type == "cpu" else torch.float32, device=x.device)
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            logits = torch.mm(x[part], weight.t()).float()
            torch.logsumexp(logits, dim=1, out=log_sum[part])
            chosen = logits.gather(1, targets[part, None])[:, 0]
            total += (log_sum[part] - chosen).sum(dtype=total.dtype)
        ctx.save_for_backward(x, weight, targets, log_sum)
        ctx.chunk = chunk
        return (total / x.shape[0]).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, targets, log_sum = ctx.saved_tensors
        scale = grads[0].float() / x.shape[0]
        columns = max(1, ctx.chunk // x.shape[0])
        whole = columns >= weight.shape[0]
        grad_x = torch.zeros(x.shape, dtype=x.dtype if whole else torch.float32, device=x.device)
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        for start in range(0, weight.shape[0], columns):
            block = weight[start : start + columns]
            slope = torch.mm(x, block.t()).float()
            slope.sub_(log_sum[:, None]).exp_()
            inside = (targets >= start) & (targets < start + block.shape[0])
            column = (targets - start).clamp_(0, block.shape[0] - 1)
            slope.scatter_add_(1, column[:, None], inside.float().neg_()[:, None])
            rounded = slope.mul_(scale).to(x.dtype)
            torch.mm(rounded.t(), x, out=grad_weight[start : start + block.shape[0]])
            if whole:
                torch.mm(rounded, block, out=grad_x)
            else:
                grad_x += torch.mm(rounded, block)
        return grad_x.to(x.dtype), grad_weight, None, None


def cross_entropy(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, chunk: int = CHUNK) -> torch.Tensor:
    """Mean cross entropy of ``x @ weight.T`` against ``targets``, a scalar in fp32.

    ``x`` [tokens, dim] and ``weight`` [vocab, dim] share a dtype; ``targets`` int64 [tokens] in [0, vocab). At most
    about ``chunk`` fp32 logits are alive at a time, in the forward and in the backward. Differentiable once, in ``x``
    and ``weight``.
    """
    weight = weight.view_as(weight)  # a weight that has to be fetched is fetched here, and not once per chunk
    found: torch.Tensor = _LinearCrossEntropy.apply(x, weight, targets, chunk)  # type: ignore[no-untyped-call]
    return found
