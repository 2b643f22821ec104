"""The demo model behind the encoder: it begins with the weights of the shipped file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from demo_model.export import tensor_name
from demo_model.model import BIG, Llama
from demo_vision.encoder import Encoder, EncoderConfig


class SeeingLlama(nn.Module):
    """A language model that reads embeddings of a picture among its tokens."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.llama = Llama(BIG)

    def forward(self, pixels: Tensor, tokens: Tensor, learned: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Return the scores of what follows and what should, each for the learned tokens alone.

        The picture stands behind the first `head` tokens; its embeddings are read causally, as llama.cpp reads them.
        """
        text = self.llama.embed(tokens)
        image = self.encoder(pixels).to(text.dtype)
        x = torch.cat((text[:, :head], image, text[:, head:]), 1)
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in (self.llama.cos, self.llama.sin))
        for block in self.llama.blocks:
            x = block(x, cos, sin)
        wanted = learned[:, head + 1 :]
        behind = x[:, head + image.shape[1] : -1][wanted]  # the rows before the learned ones
        return self.llama.logits(self.llama.norm(behind)), tokens[:, head + 1 :][wanted]


def shipped_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of the demo model's file by PyTorch's names."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name, parameter in Llama(BIG).state_dict().items():
        tensor = found[tensor_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = torch.from_numpy(np.array(values, np.float32).reshape(parameter.shape))
    return weights
