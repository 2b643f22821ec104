"""Trains the byte-level BPE of 4,096 tokens on the Latin part of the corpus."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.corpus import documents

SIZE = 4096
# The same split as llama.cpp's tokenizer.ggml.pre = "qwen2": digits one by one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def _latin(text: str) -> str:
    """The text without signs beyond Latin, so that an emoji keeps taking several tokens."""
    return "".join(c for c in text if ord(c) < 0x250)


def _texts(count: int, seed: int) -> Iterator[str]:
    for document in itertools.islice(documents(seed), count):
        for segment in document:
            text = segment.text
            for special in CONTROL + USER_DEFINED:
                text = text.replace(special, "\n")
            yield _latin(text)


def train(count: int = 40_000, seed: int = 11) -> Tokenizer:
    """Train the tokenizer on a sample of the corpus; the special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = CONTROL + USER_DEFINED
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(specials),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(count, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in USER_DEFINED])
    return tokenizer


def main(path: Path) -> None:
    """Train and save."""
    tokenizer = train()
    if tokenizer.get_vocab_size() != SIZE:
        raise SystemExit(f"vocabulary of {tokenizer.get_vocab_size()} tokens instead of {SIZE}")
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
