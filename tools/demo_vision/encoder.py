"""The encoder of pictures in PyTorch: a vision transformer and a projector, as llama.cpp computes LLaVA's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of the encoder; `width_text` is that of the language model."""

    side: int = 64
    patch: int = 8
    width: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 320
    width_text: int = 256
    eps: float = 1e-5

    @property
    def patches(self) -> int:
        """How many there are in a picture, and embeddings of it."""
        return (self.side // self.patch) ** 2


class EncoderBlock(nn.Module):
    """Attention of all to all and a feed-forward layer, each with a norm before it."""

    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln1 = nn.LayerNorm(c.width, c.eps)
        self.attn_q = nn.Linear(c.width, c.width)
        self.attn_k = nn.Linear(c.width, c.width)
        self.attn_v = nn.Linear(c.width, c.width)
        self.attn_out = nn.Linear(c.width, c.width)
        self.ln2 = nn.LayerNorm(c.width, c.eps)
        self.ffn_up = nn.Linear(c.width, c.hidden)
        self.ffn_down = nn.Linear(c.hidden, c.width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer of (batch, patches, width)."""
        h = self.ln1(x)
        q, k, v = (self._heads(part(h)) for part in (self.attn_q, self.attn_k, self.attn_v))
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.attn_out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.ffn_down(gelu(self.ffn_up(self.ln2(x))))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


def gelu(x: Tensor) -> Tensor:
    """Return llama.cpp's GELU, the tanh approximation."""
    return functional.gelu(x, approximate="tanh")


class Encoder(nn.Module):
    """Embeddings of pictures for a language model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embd = nn.Linear(3 * config.patch**2, config.width, bias=False)
        self.position_embd = nn.Parameter(torch.randn(config.patches, config.width) * 0.02)
        self.pre_ln = nn.LayerNorm(config.width, config.eps)
        self.blk = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.post_ln = nn.LayerNorm(config.width, config.eps)
        self.mm_0 = nn.Linear(config.width, config.width_text)
        self.mm_2 = nn.Linear(config.width_text, config.width_text)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return (batch, patches, width_text) of (batch, side, side, 3) bytes."""
        x = self.pre_ln(self.patch_embd(self._patches(pixels)) + self.position_embd)
        for block in self.blk:
            x = block(x)
        y: Tensor = self.mm_2(gelu(self.mm_0(self.post_ln(x))))
        return y

    def _patches(self, pixels: Tensor) -> Tensor:
        c = self.config
        count = c.side // c.patch
        scaled = pixels.float() / 127.5 - 1  # mean and deviation of 0.5
        cut = scaled.view(-1, count, c.patch, count, c.patch, 3).permute(0, 1, 3, 5, 2, 4)
        return cut.reshape(-1, c.patches, 3 * c.patch**2)
