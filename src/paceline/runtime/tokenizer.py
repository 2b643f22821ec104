"""Tokenizer: text to token ids and back, with the vocabulary of a model.

A tokenizer is constant once made and may be used from any thread. It keeps its model alive until it is closed, works with
models that were loaded with `vocab_only`, and applies no chat template and no prompt format.

Cost of encoding (measured on two cores, llama.cpp as pinned, one megabyte of a single letter): 0.1 to 6 seconds and
at most 130 bytes of memory a byte of text. Pre-tokenizers that fall back on `std::regex` also recurse once a character
within a run (320 bytes of stack each), so long runs are encoded on a native thread with a stack of their size.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline import _native, validation
from paceline.errors import Closed, InvalidType, NotEnoughMemory, Unsupported
from paceline.runtime.device import available_memory
from paceline.runtime.native_core import Closeable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]]"

_VOCAB_TYPES = ("none", "spm", "bpe", "wpm", "ugm", "rwkv", "plamo2", "test")
_KMER_BYTES = 6  # of text for each token of DNA, in vocabularies of the kind "hybriddna"
_BLANKS = b" \t\n\v\f\r"
_BYTES_PER_BYTE = 144  # of memory for each byte of text that is encoded
_UNCHECKED_BYTES = 1 << 20  # of a text for which free memory is not looked up


class TokenAttribute(enum.IntFlag):
    """Attributes of a token in a vocabulary; the values are llama.cpp's."""

    UNKNOWN = 1 << 0
    UNUSED = 1 << 1
    NORMAL = 1 << 2
    CONTROL = 1 << 3
    USER_DEFINED = 1 << 4
    BYTE = 1 << 5
    NORMALIZED = 1 << 6
    LSTRIP = 1 << 7
    RSTRIP = 1 << 8
    SINGLE_WORD = 1 << 9


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the tokens for fill-in-the-middle; None if the vocabulary lacks a token.

    A prompt is made of prefix, suffix and middle; other files come before it with rep (repository) and sep (file).
    """

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    pad: int | None = None
    rep: int | None = None
    sep: int | None = None

    @property
    def can_fill(self) -> bool:
        """Whether the vocabulary has the three tokens that fill-in-the-middle needs."""
        return None not in (self.prefix, self.suffix, self.middle)

    def required(self) -> tuple[int, int, int]:
        """Return prefix, suffix and middle. Raises `Unsupported` if the vocabulary lacks any."""
        if self.prefix is None or self.suffix is None or self.middle is None:
            missing = [name for name in ("prefix", "suffix", "middle") if getattr(self, name) is None]
            raise Unsupported(
                f"Infill is not supported by this model: it has no token for the {' and the '.join(missing)}; use a model "
                "that was trained to fill in the middle, or leave suffix out"
            )
        return self.prefix, self.suffix, self.middle


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Limits of a vocabulary.

    Attributes:
        longest: The most bytes of text that a token has.
        dropped: Bytes that may become no token.
        strippers: Texts of tokens that remove the blanks next to them.
    """

    longest: int
    dropped: bytes
    strippers: tuple[bytes, ...]


def _special(role: str) -> Any:
    return property(lambda self: self.special_tokens.get(role))


class Tokenizer(Closeable):
    """Encodes text to token ids and decodes token ids to text, with the vocabulary of one model.

    Every token has fixed bytes, from a table that is made once, so that bytes of tokens concatenate:
    `decode_bytes(a) + decode_bytes(b) == decode_bytes(a + b)`. Streams rely on that. It also means that nothing is
    stripped: a vocabulary of the SentencePiece kind puts a space before a text when it encodes it, and decoding shows
    that space (`decode(encode("Hi")) == " Hi"`).

    An engine closes the tokenizer of its model when it closes. Decoding still works then, and so do the attributes; encoding
    and looking up tokens by their texts raise `Closed`.
    """

    def __init__(self, model: _native.Model) -> None:
        self._native: _native.Vocab | None = _native.Vocab(model)
        self._pre_tokenizer = dict(model.metadata).get("tokenizer.ggml.pre", "")
        self._n_vocab: int = self._vocab.size
        self._pieces: dict[bool, tuple[bytes, ...]] = {}
        self.vocab_type: str = _VOCAB_TYPES[self._vocab.type]
        """The kind of vocabulary: none, spm, bpe, wpm, ugm, rwkv, plamo2 or test."""
        self.add_bos: bool = self._vocab.add_bos
        """Whether `encode` puts the `bos` token first by default."""
        self.add_eos: bool = self._vocab.add_eos
        """Whether `encode` puts the `eos` token last by default."""
        self.add_sep: bool = self._vocab.add_sep
        """Whether the `sep` token stands between the two texts of a pair."""

    def close(self) -> None:
        """Free the vocabulary except the tables for decoding; idempotent."""
        if self._native is None:
            return
        for special in (True, False):
            self.pieces(special)
        _ = self.special_tokens, self.eog_ids, self.suppressed_ids  # cached
        self.__dict__.pop("_ids_by_text", None)
        self._native = None

    @property
    def _vocab(self) -> _native.Vocab:
        if self._native is None:
            raise Closed(
                "the tokenizer was closed with its model; Model.load(path, vocab_only=True).tokenizer needs no weights"
            )
        return self._native

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Encode a text to token ids.

        add_special: adds the special tokens that the model was trained with, usually one at the beginning.
        parse_special: encodes text like "<|im_end|>" as the control token of that name; leave it off for untrusted text,
        on for prompts rendered by a template.

        The GIL is released meanwhile.

        Raises:
            TextTooLong: Encoding might take more than half of the machine's memory or 8 GiB (on a machine with 16 GiB or more: a
                text of 32 MiB, or 8 Mi characters without a line break), or minutes of time (runs of ten thousand blanks or
                digits with three pre-tokenizers, hundreds of thousands of characters that a SentencePiece vocabulary has to
                encode as bytes).
            NotEnoughMemory: Memory is short, on the machine or within a container's limit.
            Unsupported: The vocabulary cannot encode.
            InvalidParams: The text has a lone surrogate.
        """
        validation.boolean("add_special", add_special)
        validation.boolean("parse_special", parse_special)
        encoded = validation.text("text", text).encode()
        _check_memory(len(encoded))
        result: list[int] = self._vocab.encode(encoded, add_special, parse_special)
        return result

    def encode_prompt(self, text: str, inputs: Sequence[tuple[int, int]]) -> list[int]:
        """Encode a prompt that a template rendered: as `encode` with add_special and parse_special, but for `inputs`.

        inputs: the parts of the text that came from the conversation, as (start, end) in characters, ascending and disjoint.
        The spelling of a control token in an input, or across its borders, stays text. Raises as `encode`.
        """
        encoded = validation.text("text", text).encode()
        _check_memory(len(encoded))
        spans = _checked_spans("inputs", inputs, len(text))
        if len(encoded) > len(text):
            spans = _byte_spans(text, spans)
        result: list[int] = self._vocab.encode_prompt(encoded, spans)
        return result

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens that a text is encoded to. It is cheap: the text is not encoded.

        The bound is the text's bytes that encoding cannot drop, divided by the length of the vocabulary's longest token.
        It is 0 for vocabularies that may drop or join any characters: WordPiece (wpm) and unigram (ugm). It assumes that
        the result of every BPE merge is a token, as in all vocabularies that were trained.
        """
        encoded = validation.text("text", text).encode()
        bounds = self._bounds
        if bounds is None:
            return 0
        dropped = bounds.dropped
        if any(token in encoded for token in bounds.strippers):
            dropped += _BLANKS
        return -(-len(encoded.translate(None, dropped)) // bounds.longest)

    def decode(self, ids: TokenIds, *, special: bool = False) -> str:
        """Decode token ids to text; invalid UTF-8 becomes U+FFFD, one per maximal invalid subpart.

        special: whether control and unknown tokens have their text, else they have none.
        """
        return self.decode_bytes(ids, special=special).decode("utf-8", "replace")

    def decode_bytes(self, ids: TokenIds, *, special: bool = False) -> bytes:
        """Return the concatenated bytes of token ids; they may end in the middle of a character."""
        pieces = self.pieces(special)
        return b"".join([pieces[token] for token in validation.token_ids("ids", ids, self._n_vocab)])

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes of one token; with `special` off, control and unknown tokens have none."""
        return self.pieces(special)[self._checked(token)]

    def pieces(self, special: bool) -> tuple[bytes, ...]:
        """Return the bytes of every token, by id. Made in one native call and then cached."""
        validation.boolean("special", special)
        table = self._pieces.get(special)
        if table is None:
            other = self._pieces.get(not special, ())  # most tokens have the same bytes in both
            table = self._pieces[special] = self._vocab.pieces(special, other)
        return table

    def token_text(self, token: int) -> str:
        """Return a token as the vocabulary spells it: escaped blanks, byte tokens as <0x0A>."""
        text: bytes = self._vocab.text(self._checked(token))
        return text.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Return the token that the vocabulary spells so, or None; for special tokens by their text, like "<|im_end|>"."""
        return self._ids_by_text.get(validation.text("text", text).encode())

    def attributes(self, token: int) -> TokenAttribute:
        """Return the attributes of a token."""
        return TokenAttribute(self._vocab.attributes(self._checked(token)))

    def is_control(self, token: int) -> bool:
        """Return whether a token is a control token and no text."""
        return bool(self._vocab.is_control(self._checked(token)))

    def is_eog(self, token: int) -> bool:
        """Return whether generation ends with this token."""
        return self._checked(token) in self.eog_ids

    @property
    def n_vocab(self) -> int:
        """Number of tokens; ids go from 0 to n_vocab - 1."""
        return self._n_vocab

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The special tokens this vocabulary has, by role.

        Roles: bos, eos, eot, sep, nl, pad, mask, fim_pre, fim_suf, fim_mid, fim_pad, fim_rep, fim_sep.
        """
        return MappingProxyType(dict(self._vocab.special_tokens()))

    @cached_property
    def fim(self) -> FimTokens:
        """The tokens for fill-in-the-middle; all None if the model was not trained for it."""
        roles = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid", "pad": "fim_pad", "rep": "fim_rep"}
        return FimTokens(**{name: self.special_tokens.get(role) for name, role in (roles | {"sep": "fim_sep"}).items()})

    bos: int | None = _special("bos")
    """The token at the beginning of a text, if there is one."""
    eos: int | None = _special("eos")
    """The token at the end of a text, if there is one."""
    eot: int | None = _special("eot")
    """The token at the end of a turn, if there is one."""
    nl: int | None = _special("nl")
    """The token of a line break, if there is one."""

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """The tokens that end generation: end of text, of turn, and others of the vocabulary."""
        return frozenset(self._vocab.eog())

    @cached_property
    def suppressed_ids(self) -> frozenset[int]:
        """The tokens that the model's file says are never to be generated."""
        return frozenset(self._vocab.suppressed())

    def __repr__(self) -> str:
        return f"<Tokenizer {self.vocab_type}, {self._n_vocab} tokens>"

    @cached_property
    def _bounds(self) -> _Bounds | None:
        """Limits of the text of a token; None without a limit."""
        texts = self._vocab.texts()
        longest, dropped = max(_KMER_BYTES, *map(len, texts)), b""
        if self.vocab_type == "bpe":
            kept = self._kept_bytes(texts)
            if not kept:
                return None
            dropped = bytes(byte for byte in range(256) if byte not in kept)
        elif self.vocab_type == "plamo2":
            longest += len("\ufeff".encode())  # a byte order mark is dropped
        elif self.vocab_type not in ("spm", "rwkv"):
            return None
        stripping = TokenAttribute.LSTRIP | TokenAttribute.RSTRIP
        strippers = (text for token, text in enumerate(texts) if text and self._vocab.attributes(token) & stripping)
        return _Bounds(longest, dropped, tuple(strippers))

    def _kept_bytes(self, texts: Sequence[bytes]) -> frozenset[int]:
        """Return the bytes that have a token of their own in a BPE vocabulary. Encoding drops others that no merge takes in.

        Empty if the vocabulary's texts are of no known kind.
        """
        pieces = dict(zip(texts, self.pieces(True), strict=True))
        mapped = {byte: pieces[name] for byte, name in enumerate(_mapped_bytes()) if name in pieces}
        shown = {byte for byte, piece in mapped.items() if piece == bytes([byte])}
        literal = {
            byte for byte, piece in mapped.items() if piece == _mapped_bytes()[byte]
        }  # also tokens that users add
        if any(byte >= 128 for byte in shown) and shown | literal == set(mapped):
            return frozenset(mapped) if self._pre_tokenizer != "whitespace" else frozenset()
        if pieces.get("▁".encode()) != b" ":
            return frozenset()
        return frozenset(byte for byte in range(256) if pieces.get(b"<0x%02X>" % byte) == bytes([byte]))

    @cached_property
    def _ids_by_text(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self._vocab.texts())}

    def _checked(self, token: int) -> int:
        hint = f"the vocabulary has {self._n_vocab} tokens"
        return validation.integer("token", token, 0, self._n_vocab - 1, hint)


def _check_memory(num_bytes: int) -> None:
    """Raise `NotEnoughMemory` if encoding a text might take more memory than there is. The system would end the process."""
    if num_bytes > _UNCHECKED_BYTES:
        needed, free = _BYTES_PER_BYTE * num_bytes, available_memory()
        if free is not None and needed > free:
            raise NotEnoughMemory(
                f"encoding a text of {num_bytes} bytes may take {needed >> 20} MiB of memory, and {free >> 20} MiB are free; "
                "encode it in parts"
            )


@cache
def _mapped_bytes() -> tuple[bytes, ...]:
    """Return the character that stands for each byte in the texts of GPT-2's vocabulary and of most others with BPE."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in shown else next(others)).encode() for byte in range(256))


def _checked_spans(name: str, spans: object, length: int) -> list[tuple[int, int]]:
    """Check spans: ascending, disjoint, within the text; others could let a control token through."""
    if not isinstance(spans, Sequence) or isinstance(spans, (str, bytes)):
        raise InvalidType(f"{name} must be a list of (start, end), not {spans!r:.80}")
    result: list[tuple[int, int]] = []
    at = 0
    for index, span in enumerate(spans):
        if not isinstance(span, Sequence) or isinstance(span, (str, bytes)) or len(span) != 2:
            raise InvalidType(f"{name}[{index}] must be (start, end), not {span!r:.80}")
        start = validation.integer(f"{name}[{index}][0]", span[0], at, length)
        at = validation.integer(f"{name}[{index}][1]", span[1], start, length)
        result.append((start, at))
    return result


def _byte_spans(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    result = []
    position = num_bytes = 0
    for start, end in spans:
        begin = num_bytes + len(text[position:start].encode())
        num_bytes = begin + len(text[start:end].encode())
        result.append((begin, num_bytes))
        position = end
    return result
