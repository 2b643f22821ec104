"""The demo model behind the encoder: it begins with the weights of the shipped file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from demo_model.export import tensor_name
from demo_model.model import BIG, Attention, Llama, rotate
from demo_vision.encoder import Encoder, EncoderConfig


class SeeingLlama(nn.Module):
    """A language model that reads embeddings of a picture among its tokens."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.llama = Llama(BIG)
        self._compiled = torch.compile(self._read, dynamic=False)

    def forward(self, pixels: Tensor, tokens: Tensor, learned: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Return the scores of the next tokens and the right next tokens, for the learned tokens alone.

        The picture comes after the first `head` tokens; its embeddings are read causally, as llama.cpp reads them.
        """
        text = self.llama.embed(tokens)
        image = self.encoder(pixels).to(text.dtype)
        x = torch.cat((text[:, :head], image, text[:, head:]), 1)
        wanted = learned[:, head + 1 :]
        behind = self._compiled(x)[:, head + image.shape[1] : -1][wanted]  # the rows before the learned ones
        return self.llama.logits(behind), tokens[:, head + 1 :][wanted]

    def _read(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in (self.llama.cos, self.llama.sin))
        unseen = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=torch.bfloat16).triu(1)
        for block in self.llama.block_list():
            x = x + _attention(block.attn, block.attn_norm(x), cos, sin, unseen)
            x = x + block.feed(block.ffn_norm(x))
        y: Tensor = self.llama.norm(x)
        return y


def _attention(layer: Attention, x: Tensor, cos: Tensor, sin: Tensor, unseen: Tensor) -> Tensor:
    """`Attention.forward` written out: backwards and for heads this small, PyTorch's own takes a third of a step."""
    c, (batch, time, _) = layer.config, x.shape
    q, k, v = (part(x).view(batch, time, -1, c.head_dim).transpose(1, 2) for part in (layer.q, layer.k, layer.v))
    q, k = rotate(q, cos, sin) * c.head_dim**-0.5, rotate(k, cos, sin)
    k, v = (item.repeat_interleave(c.heads // c.kv_heads, dim=1) for item in (k, v))
    seen = (q @ k.transpose(-1, -2) + unseen).softmax(-1).to(v.dtype)
    y: Tensor = layer.o((seen @ v).transpose(1, 2).reshape(batch, time, -1))
    return y


def shipped_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of the demo model's file by PyTorch's names."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name, parameter in Llama(BIG).state_dict().items():
        tensor = found[tensor_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = torch.from_numpy(np.array(values, np.float32).reshape(parameter.shape))
    return weights
