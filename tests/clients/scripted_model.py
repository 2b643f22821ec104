"""A tiny model as a GGUF file. Its next token is a function of the last token alone, and its turns always end.

It begins each message with a tool call and otherwise prefers tokens that close a string, a list or an object. A grammar of tool
calls decides the rest, so a call has the shortest arguments that its schema allows. The endless variant writes text until it is
stopped.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from paceline.runtime import Model
from paceline.testing.models import LlamaSpec, copied, write_model

N_CTX_TRAIN = 131_072
N_EMBD = 64
# What follows a token, in place of the preferences.
FOLLOWS = {"\n": "<", "<": "tool", "tool": "_call", "_call": ">\n"}
# Preferences of tokens, highest first.
PREFERRED = ("<|im_end|>", '"', ":", "}", "]", "{", "0", "</", ",", "Read", "read", "exec")
_CLEAR = 40.0  # logits that decide


def write_scripted_model(path: Path, source: Path, *, is_endless: bool = False) -> Path:
    """Write the model; return its path. source: the llama.cpp source tree, for a vocabulary and a chat template."""
    vocabulary = source / "models" / "ggml-vocab-qwen2.gguf"
    template = (source / "models" / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    spec = LlamaSpec(
        n_layer=1, layer_gain=0.0, n_embd=N_EMBD, n_ctx_train=N_CTX_TRAIN, vocabulary=copied(vocabulary)
    )  # layers add nothing, so the last token alone decides
    write_model(path, spec, metadata={"tokenizer.chat_template": template})
    with Model.load(vocabulary, vocab_only=True) as model:
        ids = {text: _token_of(model, text) for text in (*FOLLOWS, *FOLLOWS.values(), *PREFERRED, "a")}
    tensors = {tensor.name: tensor for tensor in GGUFReader(path, "r+").tensors}
    _fill(tensors["token_embd.weight"].data, tensors["output.weight"].data, ids, is_endless=is_endless)
    tensors["output_norm.weight"].data[:] = 1
    return path


def _fill(
    embeddings: npt.NDArray[np.float32], outputs: npt.NDArray[np.float32], ids: dict[str, int], *, is_endless: bool
) -> None:
    """Set the values: dimension 0 holds preferences, one more dimension each rule of `FOLLOWS`."""
    embeddings[:] = outputs[:] = 0
    embeddings[:, 0] = 1
    if is_endless:
        outputs[ids["a"], 0] = _CLEAR
        return
    for place, text in enumerate(PREFERRED):
        outputs[ids[text], 0] = len(PREFERRED) - place
    for dimension, (text, following) in enumerate(FOLLOWS.items(), 1):
        embeddings[ids[text], dimension] = 1
        outputs[ids[following], dimension] = _CLEAR


def _token_of(model: Model, text: str) -> int:
    (token,) = model.tokenizer.encode(text, add_special=False, parse_special=True)
    return token
