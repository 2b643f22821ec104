"""The Llama architecture in PyTorch, with RoPE on interleaved pairs as llama.cpp has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    dim: int = 256
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 480
    vocab: int = 4096
    context: int = 1024
    eps: float = 1e-5
    rope_base: float = 10_000.0


BIG = Config()
DRAFT = Config(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=160)


class Norm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


def rope_table(config: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position and pair."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), config.rope_base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (0, 1), (2, 3), ... of each head; x is (batch, heads, time, head_dim)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.q = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend to earlier tokens."""
        c, (batch, time, _) = self.config, x.shape
        q = self.q(x).view(batch, time, c.heads, c.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, time, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, time, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = c.heads // c.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.o(out.transpose(1, 2).reshape(batch, time, -1))
        return y


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each with a norm before it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = Norm(c.dim, c.eps)
        self.attn = Attention(c)
        self.ffn_norm = Norm(c.dim, c.eps)
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.feed(self.ffn_norm(x))

    def feed(self, h: Tensor) -> Tensor:
        """Return the gated feed-forward layer."""
        y: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return y


class Llama(nn.Module):
    """The whole model; the output layer shares the embedding's weights."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.dim, config.eps)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.02)
        scale = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                std = parameter.shape[1] ** -0.5 * (scale if name.endswith(("o.weight", "down.weight")) else 0.6)
                nn.init.normal_(parameter, std=std)

    def block_list(self) -> list[Block]:
        """Return the layers with their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states of a batch of token numbers."""
        time = tokens.shape[1]
        x = self.embed(tokens)
        cos, sin = self.cos[:time].to(x.dtype), self.sin[:time].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        y: Tensor = self.norm(x)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens."""
        return functional.linear(hidden, self.embed.weight)
