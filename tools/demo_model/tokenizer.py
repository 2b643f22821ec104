"""Trains the byte-level BPE of 4,096 tokens on the Latin part of the corpus.

A word is cut in the same pieces with and without a space before it: the pieces are learned from
words without their space, and the space is joined to common first pieces by the very last merges.
So " Oslo" of a question and "Oslo" of a JSON string differ in one piece at most, which makes it
much easier for a small model to copy a word that it has never seen.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.corpus import documents

SIZE = 4096
# How many tokens are a common word or sign with a space before it.
SPACED = 1000
# The splits of llama.cpp's tokenizer.ggml.pre = "smollm": digits one by one, then GPT-2's.
DIGIT = r"\p{N}"
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SPACE = "Ġ"  # how byte-level BPE writes a space

Merges = list[tuple[str, str]]


def _pre_tokenizer(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in (DIGIT, SPLIT)]
    return pre_tokenizers.Sequence(
        [*before, *splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _latin(text: str) -> str:
    """Return the text without signs beyond Latin, so that an emoji keeps taking several tokens."""
    return "".join(c for c in text if ord(c) < 0x250)


def _texts(count: int, seed: int) -> Iterator[str]:
    for document in itertools.islice(documents(seed), count):
        for segment in document:
            text = segment.text
            for special in CONTROL + USER_DEFINED:
                text = text.replace(special, "\n")
            yield _latin(text)


def _bare(count: int, seed: int) -> tuple[dict[str, int], Merges]:
    """Vocabulary and merges of words without the space before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(pre_tokenizers.Split(" ", behavior="isolated"))
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(CONTROL + USER_DEFINED) - SPACED,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(count, seed), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _build(vocab: dict[str, int], merges: Merges) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _first_pieces(tokenizer: Tokenizer, count: int, seed: int) -> list[str]:
    """Return the pieces that most often follow a space inside a word."""
    found: Counter[str] = Counter()
    for text in _texts(count, seed):
        pieces = tokenizer.encode(text).tokens
        found.update(after for before, after in itertools.pairwise(pieces) if before == SPACE)
    usual = [piece for piece, _ in found.most_common() if piece != SPACE and not piece[0].isdigit()]
    return usual[:SPACED]


def train(count: int = 30_000, seed: int = 11) -> Tokenizer:
    """Train the tokenizer on a sample of the corpus; the special tokens come last."""
    vocab, merges = _bare(count, seed)
    for piece in _first_pieces(_build(vocab, merges), count // 5, seed):
        vocab[SPACE + piece] = len(vocab)
        merges.append((SPACE, piece))
    tokenizer = _build(vocab, merges)
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
