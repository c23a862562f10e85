"""A plain decoder-only transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .loss import cross_entropy

_STD = 0.02
_LENGTH_STEP = 64


class Linear(nn.Linear):
    """A linear layer without bias whose weight is drawn from a normal distribution of deviation ``std``."""

    def __init__(self, inputs: int, outputs: int, std: float = _STD) -> None:
        self.std = std  # before the base class, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Fills the weight in place, from PyTorch's default generator."""
        nn.init.normal_(self.weight, std=self.std)


class Head(Linear):
    """The output layer: logits, or with ``targets`` the mean cross entropy, whose logits never exist as a whole."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., dim] -> logits [..., vocab], or with ``targets`` int64 [...] a scalar in fp32."""
        if targets is None:
            return super().forward(x)
        return cross_entropy(x.flatten(0, -2), self.weight, targets.flatten())


class Embedding(nn.Embedding):
    """An embedding with normally distributed rows of deviation 0.02."""

    def reset_parameters(self) -> None:
        """Fills the weight in place, from PyTorch's default generator."""
        nn.init.normal_(self.weight, std=_STD)


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, dim: int, heads: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        # Two branches per block add up in the residual stream: their output weights start smaller.
        branch = _STD / (2 * layers) ** 0.5
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim, branch)
        self.mlp_norm = nn.LayerNorm(dim, bias=False)
        self.up = Linear(dim, 4 * dim)
        self.down = Linear(4 * dim, dim, branch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, tokens, dim] -> the same shape."""
        batch, tokens, dim = x.shape
        drop = self.dropout if self.training else 0.0
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim)), drop)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), drop)


class GPT(nn.Module):
    """Token and position embeddings, ``layers`` blocks, a norm and an output layer over ``vocab`` token ids.

    ``seq_len`` is the longest sequence. ``tied`` uses the token embedding as the output layer. Modules follow PyTorch's
    convention of ``reset_parameters()``, so a model on the meta device can be filled module by module.
    """

    def __init__(
        self,
        dim: int,
        layers: int,
        heads: int,
        vocab: int,
        seq_len: int,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide dim {dim}")
        self.seq_len = seq_len
        self.dropout = dropout
        self.token = Embedding(vocab, dim)
        self.position = Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, layers, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = None if tied else Head(dim, vocab)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """``ids`` int64 [batch, tokens <= seq_len] -> logits [batch, tokens, vocab].

        With ``targets`` (int64, shape of ``ids``): the mean cross entropy, a scalar in fp32.
        """
        if ids.shape[1] > self.seq_len:
            raise ValueError(f"{ids.shape[1]} tokens do not fit the model's seq_len {self.seq_len}")
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is not None:
            out: torch.Tensor = self.head(x, targets)
            return out
        if targets is None:
            return F.linear(x, self.token.weight)
        return cross_entropy(x.flatten(0, 1), self.token.weight, targets.flatten())

    @torch.no_grad()
    def generate(
        self, ids: torch.Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Continues ``ids`` int64 [batch, tokens >= 1] by ``n`` sampled tokens; temperature 0 takes the likeliest.

        ``generator`` is a CPU generator, so that a seed gives the same text on every device.
        """
        was_training = self.training
        self.eval()
        try:
            for _ in range(n):
                window = ids[:, -self.seq_len :]
                last = window.shape[1] - 1
                # Few different lengths: CPU kernels are compiled and kept for every shape. What is padded comes after
                # the last token, which does not see it.
                padding = min(-window.shape[1] % _LENGTH_STEP, self.seq_len - window.shape[1])
                logits = self(F.pad(window, (0, padding)))[:, last].float().cpu()
                if temperature > 0:
                    chances = torch.softmax(logits / temperature, dim=-1)
                    following = torch.multinomial(chances, 1, generator=generator)
                else:
                    following = logits.argmax(dim=-1, keepdim=True)
                ids = torch.cat([ids, following.to(ids.device)], dim=1)
        finally:
            self.train(was_training)
        return ids
