"""Vocabularies for random models, from four sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.testing.models.gguf_parts import Typed, Value

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types of GGUF

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_PAIRS = ("t h", "h e", "th e", "i n", "e r", "a n", "r e", "o n", "an d", "in g", "Ġ a", "Ġ t", "Ġ the", "Ġt h", "Ġ w",
          "Ġ s", "o u", "Ġ b", "i t", "i s", "e n", "Ġ o", "o r", "a t", "Ġ i", "Ġ m", "l l", "Ġ and", "e d", "o w",
          "Ġ Ġ", "ĠĠ ĠĠ", "h el", "e l", "hel l", "hell o")  # fmt: skip


@dataclass(frozen=True, eq=False)
class SpecVocabulary:
    """The number of tokens, the control tokens among them, and the `tokenizer.*` metadata.

    Each source returns the same object every time, so specs with it can be compared and used as keys.
    """

    size: int
    control: tuple[int, ...]
    metadata: tuple[tuple[str, Value], ...]


@lru_cache
def byte_level() -> SpecVocabulary:
    """Return byte-level BPE of 299 tokens: id b < 256 is the byte b, then merges of common English pairs, then `SPECIALS`.

    Begins a sequence with `<|bos|>`, ends it with `<|eos|>` or `<|im_end|>`, has tokens to fill in the middle.
    """
    pairs = [pair.split() for pair in _PAIRS]
    tokens = [_visible(byte) for byte in range(256)] + [left + right for left, right in pairs] + list(SPECIALS)
    first = 256 + len(pairs)
    types = [_NORMAL] * first + [_CONTROL] * len(SPECIALS)
    ids = {text: first + place for place, text in enumerate(SPECIALS)}
    metadata: dict[str, Value] = {
        **_bpe(tokens, types, merges=list(_PAIRS)),
        "tokenizer.ggml.bos_token_id": ids["<|bos|>"],
        "tokenizer.ggml.eos_token_id": ids["<|eos|>"],
        "tokenizer.ggml.add_bos_token": True,
    }
    return SpecVocabulary(len(tokens), tuple(ids.values()), tuple(metadata.items()))


@lru_cache
def numbered(size: int = 300) -> SpecVocabulary:
    """Return tokens whose text is their id: `<0>`, `<1>`, ... Joined text splits into ids again in exactly one way.

    The last token ends a sequence. Nothing is added in front of a prompt, and `"<7><12>"` is a prompt of two tokens.
    """
    tokens = [f"<{token}>" for token in range(size)]
    types = [_USER_DEFINED] * (size - 1) + [_CONTROL]
    metadata: dict[str, Value] = {
        **_bpe(tokens, types, merges=["< >"]),
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    return SpecVocabulary(size, (size - 1,), tuple(metadata.items()))


@lru_cache
def word_pieces() -> SpecVocabulary:
    """Return WordPiece as in BERT, lower case: letters, digits and punctuation, and some words."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = (
        "the",
        "a",
        "of",
        "and",
        "to",
        "in",
        "is",
        "was",
        "cat",
        "dog",
        "house",
        "river",
        "blue",
        "red",
        "small",
        "big",
    )
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    control = tuple(range(len(tokens)))
    tokens += ["▁" + text for text in (*letters, *"!\"#$%&'()*+,-./:;<=>?@", *words) if len(text) > 1 or text != "a"]
    tokens += ["▁" + "a", *letters, "ing", "ed", "er", "s" + "t", "th", "he", "ly"]
    tokens = list(dict.fromkeys(tokens))
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL] * len(control) + [_NORMAL] * (len(tokens) - len(control)),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }
    return SpecVocabulary(len(tokens), control, tuple(metadata.items()))


@lru_cache
def copied(path: str | Path) -> SpecVocabulary:
    """Return the vocabulary of another GGUF file, such as the `ggml-vocab-*.gguf` that the llama.cpp source tree carries."""
    from paceline.runtime.gguf_file import read_gguf

    found = {key.decode(): value for key, value in read_gguf(path).metadata.items() if key.startswith(b"tokenizer.")}
    metadata = tuple(
        (key, Typed(value.value, value.type.name, None if value.item_type is None else value.item_type.name))
        for key, value in found.items()
    )
    types = found["tokenizer.ggml.token_type"].value if "tokenizer.ggml.token_type" in found else []
    control = tuple(token for token, kind in enumerate(types) if kind == _CONTROL)
    return SpecVocabulary(len(found["tokenizer.ggml.tokens"].value), control, metadata)


def _bpe(tokens: list[str], types: list[int], *, merges: list[str]) -> dict[str, Value]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def _visible(byte: int) -> str:
    """Return the character that stands for a byte in a byte-level vocabulary: itself if it prints, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
