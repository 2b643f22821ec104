"""The sampler as an object: its state, refusals, resets, and that nothing breaks it."""

from __future__ import annotations

import gc
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.native.apart import run_apart

from paceline.errors import Closed, InvalidParams, InvalidType, SamplingError, Unsupported
from paceline.params import FIELDS, SamplingParams
from paceline.runtime import Model, Sampler
from paceline.runtime import sampler as sampler_module

N = 32000


def row(seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=N) * 3).astype(np.float32)


def works(sampler: Sampler) -> bool:
    """Return whether it still draws and accepts."""
    before = sampler.num_generated
    sampler.accept(sampler.sample(row(1)))
    return sampler.num_generated == before + 1


@pytest.fixture
def sampler(vocabulary: Model) -> Sampler:
    return Sampler(SamplingParams(seed=3), vocabulary)


def test_each_parameter_has_its_place() -> None:
    """A new parameter is drawn with in the core, or is listed here; else it would be accepted and have no effect."""
    by_output = {
        "max_tokens",
        "max_repetition",
        "stop",
        "n",
        "logprobs",
        "logprobs_mode",
        "prompt_logprobs",
        "prompt_logprobs_start",
        "echo",
    }
    by_grammar = {"grammar_root", "grammar_prefix", "grammar_lazy", "grammar_triggers", "disable_any_whitespace"}
    by_mask = {"json_schema", "regex", "lark", "constraint", "call_grammar", "thinking", "logits_processors"}
    in_core = {*sampler_module._SAME, *sampler_module._CONVERTED}
    assert set(FIELDS) - in_core == by_output | by_grammar | by_mask


def test_the_same_row_gives_the_same_token_until_one_is_accepted(sampler: Sampler) -> None:
    """Sampling changes nothing; each accepted token makes the next draw another one."""
    flat = np.zeros(N, dtype=np.float32)
    drawn = []
    for _ in range(20):
        tokens = {sampler.sample(flat) for _ in range(3)}
        assert len(tokens) == 1
        drawn.append(tokens.pop())
        sampler.accept(drawn[-1])
    assert len(set(drawn)) > 10


def test_sampling_leaves_the_row_alone(vocabulary: Model) -> None:
    """The logits that are handed in are the same afterwards, whatever is done with them."""
    logits = row()
    before = logits.copy()
    guided = Sampler(
        SamplingParams(grammar='root ::= "a"', logit_bias={1: 5.0}, repeat_penalty=1.5, seed=1), vocabulary
    )
    guided.accept_prompt([1, 2, 3])
    guided.sample(logits, np.full((N + 31) // 32, 0xFFFFFFFF, dtype=np.uint32))
    assert np.array_equal(logits, before)


def test_seeds_choices_and_positions_draw_differently(vocabulary: Model) -> None:
    """Another seed, another choice or another k gives another sequence; the same three give the same one."""
    flat = np.zeros(N, dtype=np.float32)

    def sequence(seed: int, choice: int) -> tuple[int, ...]:
        sampler = Sampler(SamplingParams(seed=seed, top_k=0), vocabulary, choice=choice)
        tokens = []
        for _ in range(8):
            tokens.append(sampler.sample(flat))
            sampler.accept(tokens[-1])
        return tuple(tokens)

    assert sequence(5, 0) == sequence(5, 0)
    assert len({sequence(seed, choice) for seed in (0, 5, 2**32 + 5, 2**64 - 1) for choice in (0, 1)}) == 8


def test_an_unseeded_sampler_has_the_seed_that_it_was_given(vocabulary: Model) -> None:
    """Two unseeded samplers differ, and either can be repeated by its seed."""
    one, two = (Sampler(SamplingParams(), vocabulary) for _ in range(2))
    assert one.seed != two.seed
    again = Sampler(one.params.replace(seed=one.seed), vocabulary)
    assert again.sample(row()) == one.sample(row())


def test_a_mask_limits_the_draw(sampler: Sampler) -> None:
    """Only tokens with a set bit are drawn, the last partial word included."""
    for allowed in ([31999], [0], [31, 32, 33], [5, 6000, 31968]):
        mask = np.zeros((N + 31) // 32, dtype=np.uint32)
        for token in allowed:
            mask[token // 32] |= np.uint32(1 << (token % 32))
        assert sampler.sample(row(), mask) in allowed


def test_nothing_allowed_is_an_error_and_no_end(sampler: Sampler) -> None:
    """A mask that leaves nothing, or a row of -inf, raises SamplingError; the sampler works on."""
    before = sampler.state()
    for logits, mask in (
        (row(), np.zeros((N + 31) // 32, dtype=np.uint32)),
        (np.full(N, -np.inf, dtype=np.float32), None),
    ):
        with pytest.raises(SamplingError, match="no token is allowed"):
            sampler.sample(logits, mask)
    assert sampler.state() == before
    assert works(sampler)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"top_k": 0}, {"mirostat": 1}, {"mirostat": 2}, {"typical_p": 0.5}]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_an_error_and_no_end(vocabulary: Model, value: float, options: dict[str, Any]) -> None:
    """A row with NaN or +inf raises SamplingError and names the token; the sampler works on."""
    sampler = Sampler(SamplingParams(seed=1, **options), vocabulary)
    for token in (0, 777, N - 1):
        logits = row()
        logits[token] = value
        with pytest.raises(SamplingError, match=f"logit of token {token} is"):
            sampler.sample(logits)
    assert works(sampler)


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (np.zeros(N - 1, dtype=np.float32), InvalidParams),
        (np.zeros(0, dtype=np.float32), InvalidParams),
        (np.zeros((1, N), dtype=np.float32), InvalidParams),
        (np.zeros(N, dtype=np.float64), InvalidType),
        (np.zeros(N, dtype=np.int32), InvalidType),
        ([0.0] * 4, InvalidType),
        (None, InvalidType),
    ],
)
def test_invalid_row_is_refused(sampler: Sampler, logits: Any, error: type[Exception]) -> None:
    """Another shape is InvalidParams, another type InvalidType; the sampler works on."""
    with pytest.raises(error, match="logits must"):
        sampler.sample(logits)
    assert works(sampler)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (np.zeros(3, dtype=np.uint32), InvalidParams),
        (np.ones(N, dtype=np.bool_), InvalidType),
        (np.ones(1000, dtype=np.int32), InvalidType),
    ],
)
def test_invalid_mask_is_refused(sampler: Sampler, mask: Any, error: type[Exception]) -> None:
    """A mask of another shape or type is refused; the sampler works on."""
    with pytest.raises(error, match="mask must"):
        sampler.sample(row(), mask)
    assert works(sampler)


def test_rows_that_are_not_contiguous_are_taken(sampler: Sampler) -> None:
    """A strided view of logits gives the same as its copy."""
    wide = np.stack([row(1), row(2)], axis=1)
    assert sampler.sample(wide[:, 1]) == sampler.sample(row(2))


@pytest.mark.parametrize("token", [-1, N, 2**31, 2**70, -(2**40)])
def test_ids_out_of_range_are_refused(sampler: Sampler, token: int) -> None:
    """A token id outside the vocabulary raises and names itself; the sampler works on."""
    for call in (
        sampler.accept,
        sampler.is_eog,
        lambda bad: sampler.accept_prompt([1, bad]),
        lambda bad: sampler.logprobs(row(), bad),
    ):
        with pytest.raises(InvalidParams, match="token"):
            call(token)
    assert works(sampler)


@pytest.mark.parametrize("token", [True, 1.0, "1", None, [1]])
def test_invalid_id_is_refused(sampler: Sampler, token: Any) -> None:
    """Bools, floats and strings are no token ids; the sampler works on."""
    with pytest.raises(InvalidType):
        sampler.accept(token)
    with pytest.raises(InvalidType):
        sampler.accept_prompt([token])
    assert works(sampler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {N: 1.0}}, "logit_bias: 32000"),
        ({"allowed_token_ids": (5, N)}, "allowed_token_ids: 32000"),
        ({"stop_token_ids": (N,)}, "stop_token_ids: 32000"),
        ({"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": (N,)}, "grammar_triggers: 32000"),
    ],
)
def test_ids_of_options_are_checked_against_the_vocabulary(
    vocabulary: Model, options: dict[str, Any], message: str
) -> None:
    """A token id in the params that this model has not is named with its field."""
    with pytest.raises(InvalidParams, match=message):
        Sampler(SamplingParams(**options), vocabulary)


def test_allowed_token_ids_are_the_only_tokens(vocabulary: Model) -> None:
    """With allowed_token_ids nothing else is ever drawn."""
    sampler = Sampler(SamplingParams(seed=1, allowed_token_ids=(7, 19, 31999)), vocabulary)
    for seed in range(10):
        token = sampler.sample(row(seed))
        assert token in (7, 19, 31999)
        sampler.accept(token)


def test_the_end_waits_for_min_tokens(vocabulary: Model) -> None:
    """Until min_tokens are generated neither the model's end nor a stop token comes, from then on they can."""
    eos = vocabulary.tokenizer.eos
    assert eos is not None
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9,)), vocabulary)
    logits = row()
    logits[[eos, 9]] = 100, 99
    for _ in range(2):
        token = sampler.sample(logits)
        assert token not in (eos, 9)
        sampler.accept(token)
    assert sampler.sample(logits) == eos


def test_ignore_eos_never_ends(vocabulary: Model) -> None:
    """With ignore_eos the model's end is not drawn, however likely."""
    sampler = Sampler(SamplingParams(temperature=0, ignore_eos=True), vocabulary)
    logits = row()
    logits[sorted(vocabulary.tokenizer.eog_ids)] = 100
    assert not sampler.is_eog(sampler.sample(logits))


def test_bad_words_of_one_token_never_come(vocabulary: Model) -> None:
    """A word that is one token is banned with and without a space before it."""
    hello = {vocabulary.tokenizer.encode(text, add_special=False)[-1] for text in ("hello", " hello")}
    sampler = Sampler(SamplingParams(temperature=0, bad_words=("hello",)), vocabulary)
    logits = row()
    logits[sorted(hello)] = 100
    assert sampler.sample(logits) not in hello


def test_bad_words_of_several_tokens_are_stopped_at_their_last(vocabulary: Model) -> None:
    """The last token of a banned sequence cannot come after the others, but elsewhere it can."""
    tokens = vocabulary.tokenizer.encode("antidisestablishment", add_special=False)
    assert len(tokens) > 2
    logits = row()
    logits[tokens[-1]] = 100
    sampler = Sampler(SamplingParams(temperature=0, bad_words=("antidisestablishment",)), vocabulary)
    assert sampler.sample(logits) == tokens[-1]
    sampler.accept_prompt(tokens[:-2])
    assert sampler.sample(logits) == tokens[-1]
    sampler.accept(tokens[-2])
    assert sampler.sample(logits) != tokens[-1]


def test_accepting_counts_once_for_penalties(vocabulary: Model) -> None:
    """One accepted token is one occurrence to the frequency penalty: the tokens take turns as they should."""
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=1.0), vocabulary)
    logits = np.full(N, -np.inf, dtype=np.float32)
    logits[[5, 6]] = [2.5, 1.0]
    drawn = []
    for _ in range(6):
        drawn.append(sampler.sample(logits))
        sampler.accept(drawn[-1])
    assert drawn == [5, 5, 6, 5, 6, 5]


def test_logprobs_are_of_the_distribution_before_truncation_and_masks(vocabulary: Model) -> None:
    """Raw logprobs are the log-softmax of the row, whatever the samplers, penalties and masks do."""
    sampler = Sampler(SamplingParams(seed=1, top_k=2, temperature=0.1, repeat_penalty=2.0), vocabulary)
    sampler.accept_prompt(range(100))
    logits = row()
    wide = logits.astype(np.float64)
    wanted = wide - (np.log(np.sum(np.exp(wide - wide.max()))) + wide.max())
    mask = np.zeros((N + 31) // 32, dtype=np.uint32)
    mask[3] = 1
    token, found = sampler.sample_with_logprobs(logits, mask, k=7)
    assert token == 96
    assert found.chosen.logprob == pytest.approx(wanted[96], abs=1e-5)
    assert [entry.token_id for entry in found.top] == np.argsort(-logits, kind="stable")[:7].tolist()
    assert [entry.logprob for entry in found.top] == pytest.approx(np.sort(wanted)[::-1][:7].tolist(), abs=1e-5)
    assert found.chosen.bytes == vocabulary.tokenizer.token_bytes(96)
    assert sampler.logprobs(logits, 96, 7) == found


def test_logprobs_can_be_of_what_was_drawn_from(vocabulary: Model) -> None:
    """Sampled logprobs are of the distribution after all samplers; greedy is sure of itself."""
    options = SamplingParams(seed=1, top_k=2, temperature=1, top_p=1, min_p=0, logprobs_mode="sampled")
    _, found = Sampler(options, vocabulary).sample_with_logprobs(row(), k=5)
    assert sum(math.exp(entry.logprob) for entry in found.top) == pytest.approx(1.0)
    assert len(found.top) == 2
    _, sure = Sampler(options.replace(temperature=0), vocabulary).sample_with_logprobs(row(), k=5)
    assert [entry.logprob for entry in (sure.chosen, *sure.top)] == [0.0, 0.0]


def test_a_closed_sampler_raises_closed(vocabulary: Model) -> None:
    """After close every call raises Closed; closing again does nothing."""
    with Sampler(SamplingParams(), vocabulary) as sampler:
        assert works(sampler)
    sampler.close()
    for call in (lambda: sampler.sample(row()), lambda: sampler.accept(1), sampler.state, sampler.reset, sampler.clone):
        with pytest.raises(Closed):
            call()


def test_a_sampler_outlives_its_model_object(llama_cpp_source: Path) -> None:
    """The vocabulary stays as long as a sampler needs it."""
    model = Model.load(llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf", vocab_only=True)
    sampler = Sampler(SamplingParams(grammar='root ::= "a"+', seed=1), model)
    model.close()
    del model
    gc.collect()
    assert works(sampler)
    assert sampler.logprobs(row(), 5).chosen.bytes


def test_a_sampler_wants_params_and_a_model(vocabulary: Model) -> None:
    """Dicts are no params and strings are no models."""
    with pytest.raises(InvalidType, match="params must be SamplingParams"):
        Sampler({"temperature": 1}, vocabulary)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="model must be a Model"):
        Sampler(SamplingParams(), "model.gguf")  # type: ignore[arg-type]
    for choice in (-1, 2**32, True, 1.0):
        with pytest.raises(InvalidParams, match="choice"):
            Sampler(SamplingParams(), vocabulary, choice=choice)  # type: ignore[arg-type]


def test_calls_from_several_threads_wait_for_each_other(vocabulary: Model) -> None:
    """Four threads on one sampler lose no accept and damage nothing."""
    sampler = Sampler(
        SamplingParams(seed=1, grammar='root ::= "a"*', repeat_penalty=1.1, dry_multiplier=0.5), vocabulary
    )
    letter = vocabulary.tokenizer.token_id("a")
    assert letter is not None

    def work() -> None:
        for _ in range(50):
            sampler.sample(row(1))
            sampler.accept(letter)
            sampler.clone().state()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert sampler.num_generated == 200


@pytest.mark.parametrize("options", [{"grammar": 'root ::= "a"'}, {"bad_words": ("a",)}, {"dry_multiplier": 1.0}])
def test_models_without_text_say_what_they_cannot_do(tmp_path: Path, options: dict[str, Any]) -> None:
    """A vocabulary without any text can be sampled from, but not with samplers that look at text."""
    writer = gguf.GGUFWriter(tmp_path / "no-text.gguf", "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(100)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = Model.load(tmp_path / "no-text.gguf", vocab_only=True)
    plain = Sampler(SamplingParams(seed=1), model)
    plain.accept(plain.sample(np.zeros(plain.n_vocab, dtype=np.float32)))
    with pytest.raises(Unsupported, match=next(iter(options))):
        Sampler(SamplingParams(**options), model)


def test_a_row_that_another_thread_writes_to_breaks_nothing(llama_cpp_source: Path) -> None:
    """While NaN come and go in a row, each draw from it gives a token or SamplingError, whatever sorts it."""
    code = """
from paceline.errors import SamplingError
sys.setswitchinterval(1e-5)  # else each of many short calls may wait milliseconds for the other thread
model = Model.load(sys.argv[1], vocab_only=True)
sampler = Sampler(SamplingParams(top_k=0, top_p=0.99, min_p=0.0, typical_p=0.9, seed=1), model)
good = np.random.default_rng(1).normal(size=sampler.n_vocab).astype(np.float32)
row, over, outcomes = good.copy(), threading.Event(), set()
def spoil():
    while not over.is_set():
        for values in (np.nan, good):
            row[:] = values
            for _ in range(20_000):
                pass
thread = threading.Thread(target=spoil)
thread.start()
for _ in range(60):
    for draw in (lambda: sampler.sample_with_logprobs(row, k=2000)[1], lambda: sampler.logprobs(row, 5, 20000)):
        try:
            outcomes.add(all(np.isfinite(record.logprob) for record in draw().top))
        except SamplingError as error:
            outcomes.add(str(error).endswith("is nan: the model's output is not usable"))
over.set()
thread.join()
print(outcomes)
"""
    assert run_apart(code, llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf") == ["{True}"]
