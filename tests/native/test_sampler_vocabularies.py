"""Samplers of vocabularies that llama.cpp would not survive encoding with, or that have no text at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.native.apart import run_apart
from tests.native.vocabularies import write_vocabulary

TRY = """
model = Model.load(sys.argv[1], vocab_only=True)
options = eval(sys.argv[2])
print(told(lambda: Sampler(SamplingParams(**options), model)))
plain = Sampler(SamplingParams(seed=1, bad_words=(), top_k=0), model)
plain.accept(plain.sample(np.zeros(plain.n_vocab, dtype=np.float32)))
print(plain.num_generated)
"""


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": ("a  b",)},
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ("b  a",)},
        {"grammar": "root ::= <a  b>"},
    ],
)
def test_a_vocabulary_that_would_abort_is_not_encoded_with(tmp_path: Path, options: dict[str, Any]) -> None:
    """Samplers that encode texts raise Unsupported if encoding them would abort; other samplers work."""
    path = write_vocabulary(
        tmp_path / "odd.gguf", "gpt2", ["a", "b", "ab", "<e>"], [1, 1, 1, 3],
        add_token_merges=["a b"], add_tokenizer_pre="whitespace", add_eos_token_id=3, add_bos_token_id=3,
    )  # fmt: skip
    refused, generated = run_apart(TRY, path, options)
    assert refused.startswith("Unsupported: the pre-tokenizer 'whitespace'")
    assert generated == "1"


@pytest.mark.parametrize(
    "options",
    [{"bad_words": ("ce",)}, {"dry_multiplier": 1.0, "dry_sequence_breakers": ("ace",)}, {"grammar": "root ::= <ce>"}],
)
def test_a_vocabulary_that_would_never_end_is_not_encoded_with(tmp_path: Path, options: dict[str, Any]) -> None:
    """Samplers that encode texts raise Unsupported if encoding would go on for ever; other samplers work."""
    path = write_vocabulary(tmp_path / "bad.gguf", "rwkv", ["<0>", "a", "ab", "<", "cd"], [3, 1, 1, 1, 1])
    refused, generated = run_apart(TRY, path, options, timeout_s=30)
    assert refused.startswith("Unsupported: this vocabulary has longer tokens")
    assert generated == "1"


@pytest.mark.parametrize(
    "options",
    [{"bad_words": ("é",)}, {"dry_multiplier": 1.0, "dry_sequence_breakers": ("aé",)}, {"grammar": "root ::= <é>"}],
)
def test_a_text_that_has_no_tokens_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """A character that a SentencePiece vocabulary has neither whole nor in bytes is a typed error."""
    path = write_vocabulary(tmp_path / "spm.gguf", "llama", ["<unk>", "<s>", "</s>", "a", "b"], [2, 3, 3, 1, 1])
    refused, generated = run_apart(TRY, path, options)
    assert refused.startswith("Unsupported: the vocabulary")
    assert generated == "1"


def test_tokens_of_a_model_without_text_have_no_bytes(tmp_path: Path) -> None:
    """Logprobs of a model that has numbers of tokens and no texts come with empty bytes."""
    path = write_vocabulary(tmp_path / "no-text.gguf", "no_vocab", [], [], add_vocab_size=100)
    code = """
sampler = Sampler(SamplingParams(seed=1), Model.load(sys.argv[1], vocab_only=True))
row = np.zeros(sampler.n_vocab, dtype=np.float32)
drawn, told = sampler.sample_with_logprobs(row, k=2)
print({record.bytes for record in (told.chosen, *told.top, sampler.logprobs(row, 3).chosen)})
"""
    assert run_apart(code, path) == ["{b''}"]
