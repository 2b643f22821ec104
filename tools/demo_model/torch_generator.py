"""A PyTorch engine that reads the GGUF files: slow, and good for comparing."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from demo_model.export import tensor_name
from demo_model.generator import GREEDY, Output, Sampling
from demo_model.model import Block, Config, Llama, rotate

STOPS = ("<|im_end|>", "<|endoftext|>")


def _field(reader: gguf.GGUFReader, key: str) -> float:
    return float(reader.fields[key].contents())


def _config(reader: gguf.GGUFReader) -> Config:
    heads = int(_field(reader, "llama.attention.head_count"))
    return Config(
        dim=int(_field(reader, "llama.embedding_length")),
        layers=int(_field(reader, "llama.block_count")),
        heads=heads,
        kv_heads=int(_field(reader, "llama.attention.head_count_kv")),
        head_dim=int(_field(reader, "llama.attention.key_length")),
        hidden=int(_field(reader, "llama.feed_forward_length")),
        context=int(_field(reader, "llama.context_length")),
    )


def load(path: Path) -> Llama:
    """Return the model of a GGUF file, with its weights turned back into numbers."""
    reader = gguf.GGUFReader(path)
    model = Llama(_config(reader))
    stored = {t.name: t for t in reader.tensors}
    weights = {}
    for name, old in model.state_dict().items():
        tensor = stored[tensor_name(name)]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = torch.from_numpy(array.astype(np.float32)).view_as(old)
    model.load_state_dict(weights)
    return model.eval()


class Cache:
    """Keys and values of the tokens so far, and the forward pass that uses them."""

    def __init__(self, model: Llama) -> None:
        c = model.config
        self.model = model
        self.length = 0
        self.keys = torch.zeros(c.layers, c.kv_heads, c.context, c.head_dim)
        self.values = torch.zeros_like(self.keys)

    def forward(self, tokens: list[int]) -> Tensor:
        """Scores after each of the new tokens."""
        first, last = self.length, self.length + len(tokens)
        cos, sin = self.model.cos[first:last], self.model.sin[first:last]
        mask = torch.ones(len(tokens), last, dtype=torch.bool).tril(first)
        x = self.model.embed(torch.tensor(tokens))
        for number, block in enumerate(self.model.block_list()):
            x = x + self._attend(block, number, x, cos, sin, mask)
            x = x + block.feed(block.ffn_norm(x))
        self.length = last
        return self.model.logits(self.model.norm(x))

    def _attend(self, block: Block, number: int, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        c, attn, h = self.model.config, block.attn, block.attn_norm(x)
        count, last = len(x), self.length + len(x)
        q = rotate(attn.q(h).view(count, c.heads, c.head_dim).transpose(0, 1), cos, sin)
        k = rotate(attn.k(h).view(count, c.kv_heads, c.head_dim).transpose(0, 1), cos, sin)
        self.keys[number, :, self.length : last] = k
        self.values[number, :, self.length : last] = attn.v(h).view(count, c.kv_heads, c.head_dim).transpose(0, 1)
        repeat = c.heads // c.kv_heads
        keys = self.keys[number, :, :last].repeat_interleave(repeat, dim=0)
        values = self.values[number, :, :last].repeat_interleave(repeat, dim=0)
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        y: Tensor = attn.o(out.transpose(0, 1).reshape(count, -1))
        return y


def choose(logits: Tensor, how: Sampling, random: torch.Generator) -> int:
    """Return the next token: top-k, top-p and min-p, then temperature, in llama.cpp's order."""
    if how.temperature == 0:
        return int(logits.argmax())
    values, index = logits.topk(how.top_k)
    p = values.softmax(-1)
    keep = (p.cumsum(-1) - p < how.top_p) & (p >= how.min_p * p[0])
    p = (values[keep] / how.temperature).softmax(-1)
    return int(index[keep][torch.multinomial(p, 1, generator=random)])


class TorchGenerator:
    """The engine of the training tools; slow, but without any other dependency."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.stops = {tokenizer.token_to_id(s) for s in STOPS}

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids

    @torch.inference_mode()
    def generate(self, prompt: str, limit: int, sampling: Sampling = GREEDY) -> Output:
        """Continue a prompt token by token."""
        random = torch.Generator().manual_seed(sampling.seed)
        cache = Cache(self.model)
        new = self.encode(prompt)
        room = min(limit, self.model.config.context - len(new))
        out: list[int] = []
        while len(out) < room:
            token = choose(cache.forward(new)[-1], sampling, random)
            if token in self.stops:
                return Output(self._text(out), out, True)
            out.append(token)
            new = [token]
        return Output(self._text(out), out, False)

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @torch.inference_mode()
    def next_tokens(self, tokens: list[int]) -> list[int]:
        """Return the greedy choice after each token of a sequence."""
        choices: list[int] = Cache(self.model).forward(tokens).argmax(-1).tolist()
        return choices
