"""`Context.generate`: the direct path from a prompt to tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tests.native.conftest import TinyModels
from tests.native.contexts import DECODERS, goes_on

from paceline.errors import InvalidParams, PromptTooLong, Unsupported
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kind", DECODERS)
def test_generate_equals_a_loop_of_decode_and_argmax(tiny_models: TinyModels, kind: str) -> None:
    """Greedy generation equals decoding and taking the highest logit, token by token."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        sampler = Sampler(SamplingParams(temperature=0), model)
        prompt = [1, 2, 3, 4, 5]
        generated = list(context.generate(sampler, prompt, 20))
        expected, tokens = [], prompt
        for _ in range(20):
            context.decode(tokens, seq_ids=1)
            tokens = [int(np.argmax(context.logits(len(tokens) - 1)))]
            expected += tokens
        assert generated == expected


def test_generate_checks_at_the_call(llama: Model, context: Context) -> None:
    """A prompt that is empty or too long raises before anything is iterated."""
    sampler = Sampler(SamplingParams(temperature=0), llama)
    with pytest.raises(InvalidParams, match="empty"):
        context.generate(sampler, [])
    with pytest.raises(PromptTooLong, match="600 tokens"):
        context.generate(sampler, [1] * 600)
    with pytest.raises(InvalidParams, match="max_tokens"):
        context.generate(sampler, [1], -1)
    assert context.positions(0) is None
    goes_on(context)


def test_generate_ends_when_the_context_is_full(llama: Model) -> None:
    """Without a limit it goes on until no position is left: cells minus prompt, plus the token that needs none."""
    with Context(llama, n_ctx=256, n_batch=64, n_threads=1) as context:
        sampler = Sampler(SamplingParams(temperature=0, ignore_eos=True, max_tokens=None), llama)
        assert len(list(context.generate(sampler, [1] * 200))) == 57


def test_generate_ends_by_what_its_params_say(llama: Model) -> None:
    """Without a number of its own the params' max_tokens counts; a stop token ends it and is not yielded."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        tokens = list(context.generate(Sampler(SamplingParams(temperature=0, max_tokens=7), llama), [1, 2, 3]))
        assert len(tokens) == 7
        index = next(i for i, token in enumerate(tokens) if i > 0 and token not in tokens[:i])
        context.clear()
        stopping = Sampler(SamplingParams(temperature=0, stop_token_ids=[tokens[index]]), llama)
        assert list(context.generate(stopping, [1, 2, 3], 7)) == tokens[:index]


def test_generate_goes_on_from_what_the_sequence_holds(llama: Model) -> None:
    """A second call continues: the last token of the first is given as the next prompt."""
    with Context(llama, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        whole = list(context.generate(Sampler(SamplingParams(temperature=0), llama), [1, 2, 3], 10, seq_id=1))
        sampler = Sampler(SamplingParams(temperature=0), llama)
        first = list(context.generate(sampler, [1, 2, 3], 4))
        assert first + list(context.generate(sampler, [first[-1]], 6)) == whole


def test_an_end_token_ends_generation_and_is_not_yielded(llama: Model) -> None:
    """A model with its third greedy token declared the end yields two."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        tokens = list(context.generate(Sampler(SamplingParams(temperature=0), llama), [1, 2, 3], 10))
    index = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 0)
    path = llama.paths[0]
    with Model.load(path, kv_overrides={"tokenizer.ggml.eos_token_id": tokens[index]}) as ending:
        with Context(ending, n_ctx=256, n_threads=1) as context:
            assert (
                list(context.generate(Sampler(SamplingParams(temperature=0), ending), [1, 2, 3], 10)) == tokens[:index]
            )


def test_an_encoder_decoder_model_generates(tiny_models: TinyModels) -> None:
    """The encoder runs on the prompt, the decoder begins with its start token, and one sequence is all it takes."""
    with Model.load(tiny_models("t5")) as model:
        with pytest.raises(Unsupported, match="one sequence"):
            Context(model, n_ctx=256, n_seq_max=2)
        with Context(model, n_ctx=256, n_threads=1) as context:
            with pytest.raises(InvalidParams, match="encode"):
                context.decode([1])
            sampler = Sampler(SamplingParams(temperature=0, ignore_eos=True), model)
            first = list(context.generate(sampler, [5, 6, 7], 8))
            context.clear()
            assert first == list(
                context.generate(Sampler(SamplingParams(temperature=0, ignore_eos=True), model), [5, 6, 7], 8)
            )
            context.clear()
            assert first != list(
                context.generate(Sampler(SamplingParams(temperature=0, ignore_eos=True), model), [99, 6, 7], 8)
            )
