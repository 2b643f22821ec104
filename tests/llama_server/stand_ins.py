"""Tiny models in place of the downloads of llama-server's tests: the same kinds, written when they are needed.

Each is found by the name of the repository and the file that a test gives. Their vocabularies cut the prompts of the tests into
as many tokens as the real models' do, and their texts have the words that the tests look for: the server is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import cast

from paceline.testing.models import (
    BertSpec,
    Gemma3Spec,
    LlamaSpec,
    SpecVocabulary,
    Value,
    word_pieces,
    write_lora,
    write_model,
    write_split_model,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What llama-server takes for a model without a chat template of its own."""

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # token types of GGUF
_CONTROLS = ("<unk>", "<s>", "</s>")
_INFILL = ("<PRE>", "<SUF>", "<MID>", "<EOT>")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:;'\"(){}[]<>|_-+*/=#\n"

# The tests count the tokens of their prompts, so texts have to be cut as the model's vocabulary cuts them, or at least into
# as many pieces: these pieces, with all that begin one of them, were found by a search for those numbers.
_PIECES = (
    "++", ".<", "<|", "He", "Te", "Wha", "Yo", "as", "im", "sy", "th", "|>\n", "▁AI", "▁F", "▁Ger", "▁Hel", "▁Write",
    "▁abo", "▁ar", "▁bes", "▁bo", "▁capit", "▁co", "▁fib", "▁fro", "▁functi", "▁how", "▁i", "▁jo", "▁life", "▁meanin",
    "▁no", "▁p", "▁templa", "▁the", "▁tr", "▁ve", "▁w", "▁yo",
)  # fmt: skip

# What the tests expect their model to tell, all of it in every token that is generated.
_TOLD = (
    "▁blue▁Suddenly▁going▁bed▁everyone▁Ann▁small▁Dad▁little▁girl▁Whiskers▁Jack▁said▁very▁Aside▁Whillicter▁bright▁special"
    "▁far▁eye"
)
_NUM_TOLD = 128
_WORD_PIECES = (
    "▁i", "▁believe", "▁meaning", "▁life", "▁this", "▁test", "▁hello", "▁world", "▁machine", "▁learn", "▁which", "▁cit",
    "▁par", "is", "▁cap", "ital", "▁de", "▁la",
)  # fmt: skip


@lru_cache
def sentence_piece(*extra: str) -> SpecVocabulary:
    """Return a vocabulary like Llama's: `<s>` is token 1, bytes, letters, pieces of words, and the generated words.

    All other tokens are hardly ever generated. extra: more control tokens: of prefix, suffix, middle, and the end of a turn.
    """
    parts = (text[:length] for text in _PIECES for length in range(2, len(text) + 1))
    pieces = list(dict.fromkeys(["▁", *_LETTERS, *parts]))
    told = [f"{_TOLD}▁n{number}" for number in range(_NUM_TOLD)]
    tokens = [*_CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *told, *extra]
    types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(pieces + told) + [_CONTROL] * len(extra)
    lengths = [float(len(text)) for text in tokens]  # as scores: longer pieces are joined first
    quiet = tuple(token for token, text in enumerate(tokens) if text not in told)
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": lengths,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": CHATML,
    }
    for name, text in zip(("prefix", "suffix", "middle"), extra, strict=False):
        metadata[f"tokenizer.ggml.{name}_token_id"] = tokens.index(text)
    return SpecVocabulary(len(tokens), quiet, tuple(metadata.items()))


@lru_cache
def word_piece() -> SpecVocabulary:
    """Return BERT's kind of vocabulary, with the words that the tests count."""
    base = word_pieces()
    metadata = dict(base.metadata)
    tokens = [*cast("list[str]", metadata["tokenizer.ggml.tokens"]), *_WORD_PIECES]
    tokens = list(dict.fromkeys(tokens))
    types = [_CONTROL] * len(base.control) + [_NORMAL] * (len(tokens) - len(base.control))
    scores = [0.0] * len(tokens)
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores}
    metadata |= {
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_sep_token": False,
    }  # between query and document
    return SpecVocabulary(len(tokens), base.control, tuple(metadata.items()))


_RANK_SEED = 25  # with which the documents of the tests come in the order that these expect
_STORIES_SEED = 8  # with which many tokens are about equally likely at the start


def _stories(path: Path) -> Path:
    return write_model(path, LlamaSpec(n_ctx_train=8192, vocabulary=sentence_piece()), seed=_STORIES_SEED)


def _infill(path: Path) -> Path:
    return write_model(path, LlamaSpec(n_ctx_train=8192, vocabulary=sentence_piece(*_INFILL)))


def _mixture() -> LlamaSpec:
    return LlamaSpec(n_ctx_train=2048, n_expert=4, vocabulary=sentence_piece())


def _split(path: Path) -> Path:
    return write_split_model(path.with_name("split.gguf"), LlamaSpec(n_ctx_train=2048, vocabulary=sentence_piece()))[0]


_MODELS: Mapping[tuple[str, str], Callable[[Path], Path]] = MappingProxyType(
    {
        ("ggml-org/test-model-stories260K", ""): _stories,
        ("ggml-org/test-model-stories260K-infill", ""): _infill,
        ("ggml-org/stories15M_MOE", "stories15M_MOE-F16.gguf"): lambda path: write_model(path, _mixture()),
        ("ggml-org/models", "tinyllamas/split/stories15M-q8_0-00001-of-00003.gguf"): _split,
        ("ggml-org/models", "bert-bge-small/ggml-model-f16.gguf"): lambda path: write_model(
            path, BertSpec(n_ctx_train=1024, pooling="cls", vocabulary=word_piece())
        ),
        ("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf"): lambda path: write_model(
            path, BertSpec(n_ctx_train=512, pooling="rank", vocabulary=word_piece()), seed=_RANK_SEED
        ),
        ("ggml-org/tinygemma3-GGUF:Q8_0", ""): lambda path: write_model(
            path, Gemma3Spec(n_ctx_train=2048, vocabulary=sentence_piece())
        ),
    }
)

_DOWNLOADS: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "moe_shakespeare15M.gguf": lambda path: write_lora(path, _mixture(), targets=("attn_q", "attn_v")),
        "stories15M-q4_0.gguf": lambda path: write_model(
            path, LlamaSpec(n_ctx_train=2048, vocabulary=sentence_piece())
        ),
    }
)


def write_all(folder: Path) -> dict[str, str]:
    """Write every model, and return their paths by `repository/file`; without a file, the name ends with a slash."""
    paths: dict[str, str] = {}
    for number, ((repository, file), write) in enumerate(_MODELS.items()):
        (folder / str(number)).mkdir(parents=True)
        paths[f"{repository}/{file}"] = str(write(folder / str(number) / "model.gguf"))
    return paths


_CACHED = {
    "ggml-org/tinygemma3-GGUF": ("tinygemma3-Q8_0.gguf", "ggml-org/tinygemma3-GGUF:Q8_0"),
    "ggml-org/test-model-stories260K": ("stories260K-F32.gguf", "ggml-org/test-model-stories260K"),
    "ggml-org/test-model-stories260K-infill": ("stories260K-infill-F32.gguf", "ggml-org/test-model-stories260K-infill"),
}


def write_cache(folder: Path) -> None:
    """Write the earlier downloads of the router's tests, in the form of huggingface_hub's cache."""
    for repository, (file, name) in _CACHED.items():
        repo = folder / f"models--{repository.replace('/', '--')}"
        commit = "0" * 40
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        _MODELS[name, ""](repo / "snapshots" / commit / file)


def write_download(url: str, path: Path) -> Path:
    """Write the stand-in for the file of a URL. Raises `KeyError` if there is none."""
    return _DOWNLOADS[url.rpartition("/")[2]](path)
