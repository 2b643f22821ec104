"""`LLM` on the demo model and on tiny models of every memory class: its texts, alone and together, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.running_engine import LONG_S, in_threads

import paceline
from paceline import LLM, AsyncLLM, Conversation, FinishReason, SamplingParams, StreamChannel, StreamChunk
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.engine.arguments import _DERIVED, _EMBEDDING_OPTIONS
from paceline.errors import (
    BatchError,
    EngineStopped,
    GrammarError,
    InvalidParams,
    InvalidType,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RequestError,
    Unsupported,
)
from paceline.observability.metrics import Instrument
from paceline.params import FIELDS
from paceline.request import OPTION_NAMES, RequestOptions
from paceline.runtime import Context, Embedder, Model, Sampler
from paceline.runtime.context_options import ContextOptions
from paceline.scheduling.records import TickRecord
from paceline.testing.models import KINDS, LlamaSpec, numbered, write_lora

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {**EXACT, "num_slots": 4, "n_ctx": 1024}
# Room for a completion that no test reads to its end, however long a busy machine lets a test wait.
ROOMY: dict[str, Any] = {**SMALL, "n_ctx": 32768, "rope_freq_scale": 1.0}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 30_000, "ignore_eos": True}
MEMORY_CLASSES = ("llama", "gemma3", "mamba", "falcon-h1", "lfm2")
PROMPTS = ["Hello", "The quick brown fox", "a", "and then the other one went on and on and on"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(num_slots=4, n_ctx=2048, **EXACT) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(tiny_models("llama"), **SMALL) as llm:
        yield llm


def works(llm: LLM) -> bool:
    """Return whether the engine still responds, with its slots free."""
    completion = llm.generate("still there?", temperature=0, max_tokens=4, ignore_eos=True)
    return len(completion.token_ids) == 4


def resident(llm: LLM) -> int:
    snapshot = llm.stats()
    return snapshot.resident + snapshot.queued


# ---- what it says


def test_the_demo_model_generates(demo: LLM) -> None:
    """Text, ids, reason and usage of a prompt; a list gives as many, in order."""
    one = demo.generate("Once upon a time", **GREEDY)
    assert one.text == demo.tokenizer.decode(list(one.token_ids))
    assert one.finish_reason is FinishReason.LENGTH
    assert one.usage.prompt_tokens == len(one.prompt_token_ids)
    assert one.usage.completion_tokens == 24
    assert one.usage.ttft_s is not None
    many = demo.generate(["Once upon a time", "A fox", [1, 2, 3]], **GREEDY)
    assert [completion.index for completion in many] == [0, 1, 2]
    assert many[2].prompt_token_ids == (1, 2, 3)
    assert demo.generate([], **GREEDY) == []


def test_none_is_the_default_of_every_keyword(demo: LLM) -> None:
    """The output is that of a call without them; so are the options of an engine, with and without a worker."""
    nothing = dict.fromkeys({*FIELDS, *OPTION_NAMES} - {"max_tokens"})
    params = SamplingParams(**GREEDY)
    expected = demo.generate("A fox", params).token_ids
    assert demo.generate("A fox", params, progress=None, **nothing).token_ids == expected
    assert [each.token_ids for each in demo.generate(["A fox"], params, progress=None, **nothing)] == [expected]
    with demo.stream("A fox", params, channel=None, request_index=None, **nothing) as stream:  # type: ignore[arg-type]
        assert tuple(token for chunk in stream for token in chunk.token_ids) == expected
    vectors = demo.embed("A fox", normalize=None, **dict.fromkeys(_EMBEDDING_OPTIONS))  # type: ignore[arg-type]
    assert np.array_equal(vectors, demo.embed("A fox"))
    engine = dict.fromkeys({*CONFIG_NAMES, *ContextOptions.names(), "n_gpu_layers", "lora", "offline"} - _DERIVED)
    for isolation in (None, "process"):
        with LLM(None, **engine | {"isolation": isolation}) as llm:
            assert llm.engine.config == EngineConfig(isolation=isolation)  # type: ignore[arg-type]


@pytest.mark.parametrize("front", [LLM, AsyncLLM])
@pytest.mark.parametrize("model", [5, 1.5, True, b"model.gguf", {}, [], [5]])
def test_a_model_of_the_wrong_type_is_refused(front: type[LLM | AsyncLLM], model: Any) -> None:
    """With the option, the value and the allowed values."""
    with pytest.raises(InvalidType, match=r"^model must be the path of a GGUF file, a name .*, not ") as caught:
        front(model)
    assert repr(model) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "num_slots", "sizes"),
    [
        ("llama", 1, "5 sequence ids, 33 rows of logits"),
        ("llama", 6, "12 sequence ids, 38 rows of logits"),
        ("llama", 200, "255 sequence ids, 256 rows of logits"),
        ("gemma3", 6, "6 sequence ids, 38 rows of logits"),
        ("mamba", 6, "6 sequence ids, 38 rows of logits"),
        ("falcon-h1", 6, "6 sequence ids, 38 rows of logits"),
        ("bert", 6, "0 sequence ids, 0 rows of logits"),
    ],
)
def test_sizes_follow_from_slots_and_memory_and_are_reported(
    tiny_models: TinyModels, caplog: pytest.LogCaptureFixture, kind: str, num_slots: int, sizes: str
) -> None:
    """Sequence ids for kept paths if parts can be shared, logits for every slot and some prompt tokens; INFO logs it."""
    with caplog.at_level("INFO", "paceline.engine"), LLM(tiny_models(kind), num_slots=num_slots, n_ctx=512):
        assert f": {num_slots} slots, {sizes}, " in caplog.text


def test_an_n_ctx_between_multiples_of_256_is_rounded_up(
    tiny_models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """The limits have the number of cells, and the log has both numbers."""
    with caplog.at_level("INFO", "paceline.engine"), LLM(tiny_models("llama"), num_slots=2, n_ctx=300) as llm:
        assert (llm.limits.num_cells, llm.limits.max_positions) == (512, 512)
        assert llm.generate([1] * 400, max_tokens=1).usage.prompt_tokens == 400
    assert (
        "KV cache: 512 cells (n_ctx=300, rounded up to a multiple of 256) shared by 2 slots, 512 tokens" in caplog.text
    )
    caplog.clear()
    with caplog.at_level("INFO", "paceline.engine"):
        LLM(tiny_models("llama"), num_slots=2, n_ctx=512).close()
    assert "KV cache: 512 cells shared by 2 slots" in caplog.text


@pytest.mark.parametrize(
    ("options", "level"), [({}, None), ({"n_ctx": 1024}, None), ({"n_ctx": 2048}, "INFO"), ({"n_ctx": 4096}, "WARNING")]
)
def test_an_n_ctx_beyond_what_one_sequence_may_have_is_noted(
    tiny_models: TinyModels, caplog: pytest.LogCaptureFixture, options: dict[str, int], level: str | None
) -> None:
    """The note has both numbers and the reason; it is a warning if all slots together cannot use the cells."""
    with caplog.at_level("INFO", "paceline.engine"):
        LLM(tiny_models("llama"), num_slots=2, **options).close()
    notes = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.getMessage().startswith("n_ctx=")
    ]
    a_request = "a request has at most 1024 tokens (the model was trained for no more)"
    messages = {
        "INFO": f"n_ctx=2048 is shared by 2 slots: {a_request}",
        "WARNING": f"n_ctx=4096 is larger than needed: {a_request}, and 2 slots use at most n_ctx=2048",
    }
    assert notes == ([(level, messages[level])] if level else [])


def test_the_note_about_n_ctx_names_one_slot(tiny_models: TinyModels, caplog: pytest.LogCaptureFixture) -> None:
    """In the singular."""
    with caplog.at_level("WARNING", "paceline.engine"):
        LLM(tiny_models("llama"), num_slots=1, n_ctx=2048).close()
    (note,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("n_ctx=")]
    assert note.endswith("(the model was trained for no more), and 1 slot uses at most n_ctx=1024")


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_its_output_is_that_of_a_bare_context(tiny_models: TinyModels, kind: str) -> None:
    """Token for token equal to `Context.generate`, with every class of memory."""
    with Model.load(tiny_models(kind)) as model:
        options = {"n_ctx": 1024, **EXACT}
        params = SamplingParams(**GREEDY)
        expected = []
        for prompt in PROMPTS:
            with Context(model, **options) as context:
                ids = model.tokenizer.encode(prompt, add_special=True)
                expected.append(tuple(context.generate(Sampler(params, model), ids, 24)))
        with LLM(model, **SMALL) as llm:
            assert [llm.generate(prompt, params).token_ids for prompt in PROMPTS] == expected
            assert [completion.token_ids for completion in llm.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_together_is_as_alone(tiny_models: TinyModels, kind: str) -> None:
    """Eight requests on four slots, in small chunks and together, write the same as alone."""
    prompts = [f"{prompt} {index}" for index in range(2) for prompt in PROMPTS]
    path = tiny_models(kind)
    with LLM(path, **SMALL, chunk_size=5, strategy="balanced") as llm:
        together = [completion.token_ids for completion in llm.generate(prompts, **GREEDY)]
        seeded = [completion.token_ids for completion in llm.generate(prompts, max_tokens=12, seed=5)]
    with LLM(path, **{**SMALL, "num_slots": 1}) as llm:
        assert [llm.generate(prompt, **GREEDY).token_ids for prompt in prompts] == together
        assert [llm.generate(prompt, max_tokens=12, seed=5).token_ids for prompt in prompts] == seeded


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_choices_share_a_prompt_and_match_a_single_slot(tiny_models: TinyModels, kind: str) -> None:
    """N choices differ from each other, and are the same if they share memory or come in sequence."""
    options: dict[str, Any] = {"n": 4, "seed": 3, "temperature": 1.0, "max_tokens": 12}
    with LLM(tiny_models(kind), **SMALL) as llm:
        shared = llm.generate(PROMPTS[3], **options)
        assert llm.stats().number("paceline_prefix_hit_tokens_total") > 0
    with LLM(tiny_models(kind), **{**SMALL, "num_slots": 1}) as llm:
        single = llm.generate(PROMPTS[3], **options)
    assert [choice.token_ids for choice in shared.choices] == [choice.token_ids for choice in single.choices]
    assert len({choice.token_ids for choice in shared.choices}) > 1


def test_streamed_is_as_blocking(demo: LLM) -> None:
    """Chunks joined are the completion, for several intervals, with and without stops."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "cache_prompt": False}
    whole = demo.generate("Once upon a time", **options)
    stop = whole.text[20:23]
    for interval in (1, 2, 5):
        for stops in ([], [stop]):
            blocking = demo.generate("Once upon a time", **options, stop=stops)
            with demo.stream("Once upon a time", **options, stop=stops, interval=interval) as stream:
                chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == blocking.text
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == blocking.token_ids
            assert chunks[-1].finish_reason is blocking.finish_reason
            assert dataclasses.replace(stream.collect(), usage=blocking.usage) == blocking
            assert blocking.stop == (stop if stops else None)
            assert not stops or blocking.text == whole.text[: whole.text.index(stop)]


def test_objects_print_as_a_line() -> None:
    """Texts are cut, token ids are counted; after close() and for an engine that never came as well."""
    demo_path = Path(paceline.demo_model_path())
    options: dict[str, Any] = {"seed": 1, "ignore_eos": True}
    said = [{"role": "user", "content": "Hello"}]
    with LLM(demo_path, num_slots=2, n_ctx=2048) as llm:
        assert repr(llm) == f"LLM('{demo_path.name}', num_slots=2, n_ctx=2048)"
        whole = llm.generate("Once upon a time", max_tokens=100, n=2, **options)
        text = repr(whole.text[:79] + "\u2026")
        assert repr(whole) == f"Completion(text={text}, tokens=200, finish_reason='length', choices=2)"
        assert repr(whole.choices[0]) == f"Choice(text={text}, tokens=100, finish_reason='length')"
        assert repr(whole.usage).startswith("Usage(prompt_tokens=4, completion_tokens=200, ")
        stream = llm.stream("A fox", max_tokens=9, **options)
        assert repr(stream).startswith("Stream(running") or stream.is_finished
        stream.collect()
        assert repr(stream) == "Stream(finish_reason='length')"
        batch = llm.stream(["A", "B"], max_tokens=2)
        batch.collect()
        assert repr(batch) == "BatchStream(2 streams, 0 running)"
        talk = Conversation(llm, system="Be brief.")
        reply = talk.say("Hello", max_tokens=40, temperature=0)
        assert repr(reply).startswith(f"ChatReply(content={reply.content!r}, ")
        assert repr(talk) == f"Conversation(messages=3, last={'assistant: ' + reply.content!r})"
        chat = llm.stream_chat(said, max_tokens=4, temperature=0)
        chat.collect()
    assert repr(llm) == f"LLM('{demo_path.name}', num_slots=2, n_ctx=2048, closed)"
    assert repr(chat) == "ChatStream(finish_reason='length')"
    assert all("\n" not in repr(item) and len(repr(item)) < 300 for item in (whole, reply, talk, stream, whole.usage))
    later = AsyncLLM(demo_path, num_slots=2, n_ctx=2048)
    assert repr(later).endswith(", not loaded)")

    async def main() -> None:
        async with later:
            assert repr(later) == f"AsyncLLM('{demo_path.name}', num_slots=2, n_ctx=2048)"
            assert repr(later.stream("A", max_tokens=2)) == "AsyncStream(running)"

    asyncio.run(main())
    assert repr(later).endswith(", closed)")
    failed = object.__new__(LLM)
    assert repr(failed) == "LLM(not loaded)"


def test_logprobs_and_prompt_logprobs(llama: LLM) -> None:
    """One a token, the chosen one's among the top of a greedy completion; one a prompt token but the first; echo has its text."""
    one = llama.generate("The quick brown fox", **GREEDY, logprobs=3, prompt_logprobs=2, echo=True)
    assert one.logprobs is not None
    assert one.prompt_logprobs is not None
    assert len(one.logprobs) == len(one.token_ids) == 24
    for token, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert len(entry.token_ids) == 3
        assert entry.token_ids[0] == token
        assert entry.own == pytest.approx(entry.values[0])
        assert list(entry.values) == sorted(entry.values, reverse=True)
    assert len(one.prompt_logprobs) == len(one.prompt_token_ids) - 1
    assert one.text.startswith("The quick brown fox")
    pieces = llama.tokenizer.pieces(True)
    scored = [
        *zip(one.token_ids, one.logprobs, strict=True),
        *zip(one.prompt_token_ids[1:], one.prompt_logprobs, strict=True),
    ]
    for token_id, entry in scored:
        for token, number in ((entry.token, token_id), *zip(entry.tokens, entry.token_ids, strict=True)):
            assert (token.id, bytes(token.bytes)) == (number, pieces[number])
            assert token.text == pieces[number].decode("utf-8", "replace")
        assert entry.top == tuple(zip(entry.tokens, entry.values, strict=True))
    assert (
        json.loads(json.dumps(dataclasses.asdict(one)))["choices"][0]["logprobs"][0]["token"]["id"] == one.token_ids[0]
    )
    plain = llama.generate("The quick brown fox", **GREEDY)
    assert plain.logprobs is None
    assert plain.prompt_logprobs is None
    assert plain.token_ids == one.token_ids


def test_a_scored_prompt_agrees_with_what_was_generated(llama: LLM) -> None:
    """Scoring a prompt and its own greedy completion gives the logprobs that generating it gave."""
    one = llama.generate("Hello", **GREEDY, logprobs=0)
    assert one.logprobs is not None
    ids = [*one.prompt_token_ids, *one.token_ids]
    scored = llama.generate(ids, max_tokens=0, prompt_logprobs=0)
    assert scored.prompt_logprobs is not None
    assert scored.token_ids == ()
    tail = scored.prompt_logprobs[-len(one.token_ids) :]
    assert [entry.own for entry in tail] == pytest.approx([entry.own for entry in one.logprobs], abs=1e-3)


def test_a_grammar_holds_for_its_request_alone(llama: LLM) -> None:
    """Beside free requests, in one batch, the constrained requests obey; an unsupported regex is refused."""
    streams = [llama.stream("Answer:", max_tokens=8, choice=["yes", "no"]) for _ in range(2)]
    free = llama.stream("Once upon a time", **GREEDY)
    texts = ["".join(chunk.text for chunk in stream) for stream in streams]
    assert set(texts) <= {"yes", "no"}
    assert "".join(chunk.text for chunk in free) == llama.generate("Once upon a time", **GREEDY).text
    with pytest.raises(GrammarError):
        llama.generate("x", grammar="root ::= (")
    assert works(llama)


def test_adapters_hold_for_their_requests_alone(tiny_models: TinyModels, tmp_path: Path) -> None:
    """With and without, in one batch, each writes the same as alone."""
    paths = {
        name: write_lora(tmp_path / f"{name}.gguf", KINDS["llama"], seed=seed) for seed, name in enumerate("ab", 1)
    }
    sets: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"a": 0.5, "b": 0.5}]
    with LLM(tiny_models("llama"), **SMALL, lora=paths) as llm:
        alone = [llm.generate("Hello", **GREEDY, lora=adapters).token_ids for adapters in sets]
        assert len(set(alone)) == 4
        streams = [llm.stream("Hello", **GREEDY, lora=adapters) for adapters in sets]
        together = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        assert together == alone
        with pytest.raises(InvalidParams, match="no adapter 'c'"):
            llm.generate("Hello", lora={"c": 1.0})


# ---- embeddings


def test_embeddings_are_an_embedders(tiny_models: TinyModels) -> None:
    """A vector for each text, in order, of length 1; the same beside generation, which they do not disturb."""
    texts = [f"text number {index}" for index in range(10)]
    with Model.load(tiny_models("embedding-llama")) as model:
        with Embedder(model, n_threads=1, flash_attn="off") as embedder:
            expected = embedder.embed(texts)
        with LLM(model, **SMALL) as llm:
            before = llm.generate("Hello", **GREEDY).token_ids
            stream = llm.stream("Hello", **GREEDY)
            found = llm.embed(texts)
            assert tuple(token for chunk in stream for token in chunk.token_ids) == before
            assert found.shape == (10, 64)
            assert np.allclose(found, expected, atol=1e-4)
            assert llm.embed(texts[0]).shape == (64,)
            assert np.allclose(np.linalg.norm(found, axis=1), 1)
            assert llm.embed([]).shape == (0, 64)
            for case in (b"bytes", None):
                with pytest.raises(InvalidType, match="texts must be a list of texts"):
                    llm.embed(case)  # type: ignore[call-overload,arg-type]


def test_an_encoder_embeds_and_does_not_generate(tiny_models: TinyModels) -> None:
    """A request for text gets an error with the model's abilities; it goes on embedding."""
    with LLM(tiny_models("bert"), n_threads=1) as llm:
        with pytest.raises(Unsupported, match="embeds texts"):
            llm.generate("Hello")
        assert llm.embed(["Hello", "Bye"], pooling="mean").shape == (2, 64)


def test_a_reranker_scores_documents(tiny_models: TinyModels) -> None:
    """Best first, each with its place; the same one by one; other models say that they cannot."""
    documents = ["one text", "another", "a third text", "one"]
    with LLM(tiny_models("reranker"), n_threads=1) as llm:
        scores = llm.rerank("a query", documents)
        assert sorted(score.index for score in scores) == [0, 1, 2, 3]
        assert [score.score for score in scores] == sorted((score.score for score in scores), reverse=True)
        for score in scores:
            (alone,) = llm.rerank("a query", [documents[score.index]])
            assert alone.score == pytest.approx(score.score, abs=1e-4)
        assert llm.rerank("a query", []) == []
        for case in ("a text", b"bytes", None):
            with pytest.raises(InvalidType, match="documents must be a list of texts"):
                llm.rerank("a query", case)  # type: ignore[arg-type]
    with LLM(tiny_models("llama"), **SMALL) as llm:
        with pytest.raises(Unsupported):
            llm.rerank("a query", documents)
        assert works(llm)


# ---- memory


@pytest.mark.parametrize("kind", ["llama", "gemma3", "falcon-h1"])
def test_eight_requests_that_each_need_half_of_the_memory_all_finish(tiny_models: TinyModels, kind: str) -> None:
    """Under pressure a sequence is preempted and goes on later; all outputs are the same as alone."""
    prompts = [[(7 * index + place) % 250 for place in range(60)] for index in range(8)]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with LLM(tiny_models(kind), **{**EXACT, "num_slots": 8, "n_ctx": 256}) as llm:
        together = llm.generate(prompts, **options)
        assert llm.stats().number("paceline_preemptions_total") > 0 or kind == "falcon-h1"
        assert resident(llm) == 0
    with LLM(tiny_models(kind), **{**EXACT, "num_slots": 1, "n_ctx": 256}) as llm:
        alone = [llm.generate(prompt, **options) for prompt in prompts]
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]
    assert {completion.finish_reason for completion in together} == {FinishReason.LENGTH}


def test_a_prompt_that_is_too_long_is_refused_or_cut(tiny_models: TinyModels) -> None:
    """With both numbers at submit, or truncated if the request allows it; others are not touched."""
    with LLM(tiny_models("llama"), **{**SMALL, "n_ctx": 256}) as llm:
        ids = [65 + index % 20 for index in range(300)]
        with pytest.raises(PromptTooLong, match=r"300 tokens\) exceeds the available context size \(256"):
            llm.generate(ids)
        cut = llm.generate(ids, truncate="left", max_tokens=10)
        assert cut.prompt_token_ids == tuple(ids[-246:])
        full = llm.generate(ids[:256], temperature=0, ignore_eos=True)
        assert (len(full.token_ids), full.finish_reason) == (1, FinishReason.LENGTH)
        assert works(llm)


# ---- endings


def test_leaving_a_stream_frees_its_slot(tiny_models: TinyModels) -> None:
    """Closing, breaking, forgetting: the slot is free one tick later, and the rest was not generated."""
    with LLM(tiny_models("llama"), **ROOMY) as llm:
        leave(llm)


def leave(llm: LLM) -> None:
    with llm.stream("Hello", **ENDLESS) as stream:
        stream.get()
    assert stream.wait_released(LONG_S)
    assert stream.finish_reason is FinishReason.CANCELLED
    assert stream.usage is not None
    assert stream.usage.completion_tokens < 30_000
    broken = llm.stream("Hello", **ENDLESS)
    for _ in broken:
        break
    assert broken.wait_released(LONG_S)
    forgotten = llm.stream("Hello", **ENDLESS)
    forgotten.get()
    channel = forgotten._attached
    sender = channel._sender
    del forgotten, channel
    gc.collect()
    assert sender.wait_released(LONG_S)
    assert resident(llm) == 0


def test_a_list_may_be_longer_than_the_queue(tiny_models: TinyModels) -> None:
    """`generate` feeds the engine as it takes them; with when_full="refuse" a stream too many is refused at once."""
    with LLM(tiny_models("llama"), **{**ROOMY, "num_slots": 1}, max_queue=1, when_full="refuse") as llm:
        many = llm.generate(PROMPTS * 3, **GREEDY)
        assert [completion.token_ids for completion in many[:4]] == [completion.token_ids for completion in many[8:]]
        assert {completion.finish_reason for completion in many} == {FinishReason.LENGTH}
        streams = [llm.stream("Hello", **ENDLESS) for _ in range(2)]
        for call in (llm.stream, llm.generate, llm.embed):
            with pytest.raises(QueueFull):
                call("Hello")
        for stream in streams:
            stream.close()


def test_threads_wait_for_room(tiny_models: TinyModels) -> None:
    """More of them than may be open, each with another kind of request; `engine` refuses as before."""
    with LLM(tiny_models("llama"), **{**ROOMY, "num_slots": 1}, max_queue=1) as llm:
        expected = llm.generate("Hello", **GREEDY).token_ids
        vector = llm.embed("Hello")
        streams = [llm.stream("Hello", **ENDLESS) for _ in range(2)]
        waiting = llm.stream("Hello", **GREEDY)
        with pytest.raises(QueueFull):
            llm.engine.accept(llm.engine.prepare("Hello", SamplingParams(**GREEDY), RequestOptions()))
        late = llm.generate("Hello", timeout_s=0.1)
        assert (late.finish_reason, late.text) == (FinishReason.DEADLINE, "")
        found: list[object] = []

        def work() -> None:
            found.append(llm.generate("Hello", **GREEDY).token_ids == expected)
            found.append(
                [completion.token_ids for completion in llm.generate(["Hello"] * 2, **GREEDY)] == [expected] * 2
            )
            found.append(np.allclose(llm.embed("Hello"), vector, atol=1e-4))
            with llm.stream("Hello", **GREEDY) as stream:
                found.append(tuple(token for chunk in stream for token in chunk.token_ids) == expected)

        threading.Timer(0.2, lambda: [stream.close() for stream in streams]).start()
        in_threads(*[work] * 20)
        assert found == [True] * 80
        assert tuple(token for chunk in waiting for token in chunk.token_ids) == expected


def test_a_suffix_makes_the_model_fill_in_the_middle(demo: LLM) -> None:
    """Prefix, suffix, middle, as the vocabulary's tokens mark them; control tokens in the texts stay text."""
    fim, encode = demo.tokenizer.fim, demo.tokenizer.encode
    before, after = "def add(a, b):<|im_end|>", "    return c"
    filled = demo.generate(before, suffix=after, **GREEDY)
    expected = [
        fim.prefix,
        *encode(before, add_special=False),
        fim.suffix,
        *encode(after, add_special=False),
        fim.middle,
    ]
    bos = [demo.tokenizer.bos] if demo.tokenizer.add_bos else []
    assert list(filled.prompt_token_ids) == bos + expected
    assert list(demo.generate(before, suffix=after, add_special=False, **GREEDY).prompt_token_ids) == expected
    assert filled.token_ids == demo.generate(bos + expected, **GREEDY).token_ids
    assert [completion.token_ids for completion in demo.generate([before] * 2, suffix=after, **GREEDY)] == [
        filled.token_ids
    ] * 2
    with demo.stream(before, suffix=after, parse_special=True, **GREEDY) as stream:
        assert "".join(chunk.text for chunk in stream) == filled.text
    ids = demo.generate([1, 2], suffix="", **GREEDY).prompt_token_ids
    assert list(ids) == [*bos, fim.prefix, 1, 2, fim.suffix, fim.middle]
    assert list(demo.generate("", suffix="x", **GREEDY).prompt_token_ids)[:-2] == [*bos, fim.prefix, fim.suffix]
    with pytest.raises(InvalidParams, match="echo and suffix exclude each other"):
        demo.generate(before, suffix=after, echo=True)
    with pytest.raises(InvalidParams, match="images or audio"):
        demo.generate([paceline.Image(np.zeros((8, 8, 3), np.uint8)), "a"], suffix=after)
    with pytest.raises(InvalidParams, match="suffix has no effect in a chat"):
        demo.chat([{"role": "user", "content": "a"}], suffix=after)  # type: ignore[call-overload]


def test_a_long_prompt_with_a_suffix_loses_its_beginning(demo: LLM) -> None:
    """With truncate="left"; the suffix stays, and one that is too long alone is refused, as are other sides."""
    most, fim = demo.limits.max_positions, demo.tokenizer.fim
    with pytest.raises(PromptTooLong):
        demo.generate([5] * most + [7], suffix="the end", max_tokens=3)
    ids = demo.generate([5] * most + [7], suffix="the end", max_tokens=3, truncate="left").prompt_token_ids
    end = [7, fim.suffix, *demo.tokenizer.encode("the end", add_special=False), fim.middle]
    assert len(ids) <= most - 3
    assert list(ids)[-len(end) :] == end
    assert fim.prefix in ids[:2]
    for side in ("right", "middle"):
        with pytest.raises(InvalidParams, match=f'truncate must be "left" with suffix, not "{side}"'):
            demo.generate("a", suffix="b", truncate=side)
    with pytest.raises(PromptTooLong, match="the suffix .* leaves the prompt no place"):
        demo.generate("a", suffix="the end " * most, truncate="left")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_that_cannot_fill_in_the_middle_says_so(tiny_models: TinyModels, isolation: str) -> None:
    """With the tokens that it lacks and the way out."""
    path = tiny_models(LlamaSpec(vocabulary=numbered(300)))
    with LLM(path, **SMALL, isolation=isolation) as llm:  # type: ignore[arg-type]
        with pytest.raises(
            Unsupported, match=r"no token for the prefix and the suffix and the middle; use a model that was"
        ):
            llm.generate("a", suffix="b")
        with pytest.raises(BatchError, match="Infill is not supported by this model"):
            llm.generate(["a", "b"], suffix="b")


def test_prompts_of_a_list_have_params_of_their_own(llama: LLM) -> None:
    """None: the defaults; keywords change all of them. A list of another length, or with another type, is refused before."""
    params = [SamplingParams(max_tokens=2), None, SamplingParams(max_tokens=4, n=2), SamplingParams(max_tokens=2)]
    many = llama.generate(PROMPTS, params, temperature=0, ignore_eos=True)
    assert [[len(choice.token_ids) for choice in completion.choices] for completion in many] == [
        [2],
        [256],
        [4, 4],
        [2],
    ]
    assert many[0].token_ids == llama.generate(PROMPTS[0], temperature=0, max_tokens=2, ignore_eos=True).token_ids
    assert llama.generate([], []) == []
    for wrong, message in (
        (params[:3], r"^params must have an entry for each of the 4 prompts, not 3$"),
        ([*params, None], r"^params must have an entry for each of the 4 prompts, not 5$"),
        ([*params[:3], {"n": 1}], r"^params\[3\] must be SamplingParams, not dict$"),
    ):
        with pytest.raises(InvalidParams, match=message):
            llama.generate(PROMPTS, wrong)  # type: ignore[call-overload]
    with pytest.raises(InvalidType, match="not list; a list of them goes with a list of prompts"):
        llama.generate("Hello", params)  # type: ignore[call-overload]


def test_each_of_a_list_has_its_own_outcome(llama: LLM) -> None:
    """A bad prompt among good prompts raises after the others ended, with all outcomes."""
    with pytest.raises(BatchError, match="2 of 4 prompts failed; the first is outcomes\\[1\\]: ") as caught:
        llama.generate(["Hello", [99999], "a", []], **GREEDY)
    good, bad, also_good, empty = caught.value.outcomes
    assert (good.text, also_good.text) == tuple(llama.generate(prompt, **GREEDY).text for prompt in ("Hello", "a"))
    assert isinstance(bad, InvalidParams)
    assert isinstance(empty, InvalidParams)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([-1], {}),
        ([10_000_000], {}),
        (b"bytes", {}),
        (None, {}),
        ("x", {"max_tokens": -1}),
        ("x", {"temperature": float("nan")}),
        ("x", {"max_token": 5}),
        ("x", {"grammar": "root ::= ("}),
        ("x", {"stop": [""]}),
        ("x", {"lora": {"none": 1.0}}),
        ("x", {"timeout_s": -1}),
        ("x", {"params": 5}),
        ("x\ud800", {}),
        ("x", {"stop_token_ids": [10**9]}),
        ("x", {"logit_bias": {10**9: 1.0}}),
    ],
)
def test_bad_input_is_refused_and_the_engine_goes_on(llama: LLM, prompt: Any, options: dict[str, Any]) -> None:
    """Whatever is wrong raises at the call."""
    for call in (llama.generate, llama.stream):
        with pytest.raises((InvalidParams, GrammarError)):
            call(prompt, **options)
    assert resident(llama) == 0
    assert works(llama)


@pytest.mark.parametrize("options", [{"interval": 2}, {"max_buffered_tokens": 5}, {"slow_reader": "cancel"}])
def test_stream_options_are_refused_where_the_output_is_collected(llama: LLM, options: dict[str, Any]) -> None:
    """For one prompt and for a list."""
    for prompt in ("Hello", ["Hello"]):
        with pytest.raises(InvalidParams, match="use stream"):
            llama.generate(prompt, **options)


def test_zero_tokens_are_no_tokens(llama: LLM) -> None:
    """max_tokens 0 gives an empty text, LENGTH and its usage."""
    one = llama.generate("Hello", max_tokens=0)
    assert (one.text, one.token_ids, one.finish_reason) == ("", (), FinishReason.LENGTH)
    assert one.usage.completion_tokens == 0


def test_deadlines_cut_off(llama: LLM) -> None:
    """timeout_s ends a stream with DEADLINE and its text until then."""
    one = llama.generate("Hello", max_tokens=1000, ignore_eos=True, timeout_s=0.05)
    assert one.finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH)
    assert one.usage.completion_tokens == len(one.token_ids)


def test_deadlines_begin_when_the_engine_takes_a_request(llama: LLM) -> None:
    """A prompt of a list that waits for a place loses no time by it."""
    engine = llama._engine
    request = engine.prepare("Hello", SamplingParams(max_tokens=1), RequestOptions(timeout_s=1000))
    prepared_s = request.submitted_s
    engine.accept(request).wait_released(LONG_S)
    assert request.submitted_s > prepared_s
    assert request.deadline_s() == request.submitted_s + 1000


def test_threads_share_an_engine(llama: LLM) -> None:
    """Eight threads at once, blocking, streaming and embedding, each with its own result."""
    expected = {prompt: llama.generate(prompt, **GREEDY).text for prompt in PROMPTS}

    def generate() -> None:
        for prompt in PROMPTS:
            assert llama.generate(prompt, **GREEDY).text == expected[prompt]

    def stream() -> None:
        for prompt in PROMPTS:
            assert "".join(chunk.text for chunk in llama.stream(prompt, **GREEDY)) == expected[prompt]

    in_threads(*[generate, stream] * 4)
    assert resident(llama) == 0


# ---- the engine's own end


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "paceline-engine" and thread.is_alive()}


def test_a_closed_engine_refuses(tiny_models: TinyModels) -> None:
    """After close, requests raise, streams have ended, closing again does nothing."""
    before = engine_threads()
    llm = LLM(tiny_models("llama"), **ROOMY)
    stream = llm.stream("Hello", **ENDLESS)
    stream.get()
    llm.close()
    llm.close(drain=True)
    *_, last = stream
    assert last.finish_reason is FinishReason.SHUTDOWN
    for call in (llm.generate, llm.stream, llm.embed):
        with pytest.raises(EngineStopped):
            call("Hello")
    assert engine_threads() <= before


def test_closing_may_let_requests_finish(tiny_models: TinyModels) -> None:
    """With drain accepted requests complete."""
    llm = LLM(tiny_models("llama"), **SMALL)
    streams = [llm.stream("Hello", **GREEDY, ignore_eos=True) for _ in range(6)]
    llm.close(drain=True)
    assert [sum(len(chunk.token_ids) for chunk in stream) for stream in streams] == [24] * 6


def test_a_forgotten_engine_ends_its_thread(tiny_models: TinyModels) -> None:
    """Without close or with, nothing is left of it when it is collected."""
    before = set(threading.enumerate())
    llm = LLM(tiny_models("llama"), **SMALL)
    (thread,) = (entry for entry in set(threading.enumerate()) - before if entry.name == "paceline-engine")
    gone = weakref.ref(llm)
    assert works(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_stream_keeps_its_engine_alive(tiny_models: TinyModels) -> None:
    """A caller that holds only the stream can read it to its end."""
    stream = LLM(tiny_models("llama"), **SMALL).stream("Hello", **GREEDY, ignore_eos=True)
    gc.collect()
    assert sum(len(chunk.token_ids) for chunk in stream) == 24


def test_an_engine_may_be_collected_on_its_own_thread(tiny_models: TinyModels) -> None:
    """An engine in a cycle that its own thread finds dead ends without waiting for itself."""

    class Collector(Instrument):
        def __init__(self) -> None:
            self.is_on = threading.Event()

        def tick_finished(self, record: TickRecord) -> None:
            if self.is_on.is_set():
                gc.collect()

    collector = Collector()
    before = set(threading.enumerate())
    llm = LLM(tiny_models("llama"), **SMALL, instruments=[collector])
    (thread,) = (entry for entry in set(threading.enumerate()) - before if entry.name == "paceline-engine")
    gc.disable()
    try:
        cycle: list[Any] = [llm]
        cycle.append(cycle)
        stream = llm.stream("Hello", temperature=0, max_tokens=500, ignore_eos=True)
        stream.get()
        stream._keep_alive = None
        channel = stream._attached
        collector.is_on.set()
        del cycle, llm
        *_, last = channel
    finally:
        gc.enable()
    assert last.finish_reason in (FinishReason.SHUTDOWN, FinishReason.LENGTH)
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_forked_child_gets_an_error(llama: LLM) -> None:
    """A child has no engine thread: its calls raise at once, instead of waiting for ever, and the parent goes on."""
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        code = 1
        try:
            llama.generate("Hello")
        except EngineStopped:
            llama.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert works(llama)


def test_a_model_that_cannot_be_loaded_raises(tmp_path: Path, tiny_models: TinyModels) -> None:
    """No thread, no half of an engine is left."""
    before = engine_threads()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing")
    with pytest.raises(ModelLoadError):
        LLM(bad)
    for options in ({"n_ctx": 0}, {"num_slots": 0}, {"n_batch": 0}, {"lora": ["missing.gguf"]}, {"strategy": "none"}):
        with pytest.raises(paceline.PacelineError):
            LLM(tiny_models("llama"), **options)
    with pytest.raises(InvalidType, match="did you mean 'n_ctx'"):
        LLM(tiny_models("llama"), nctx=5)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        LLM(tiny_models("t5"))
    assert engine_threads() <= before


@pytest.mark.parametrize("options", [{"n_ctx": 8}, {"n_batch": 1}, {"num_slots": 1, "n_batch": 2}, {"chunk_size": 1}])
def test_the_smallest_engines_work(tiny_models: TinyModels, options: dict[str, Any]) -> None:
    """A context of a few cells, a batch of one token, one slot: slow, and right."""
    with LLM(tiny_models("llama"), **{**SMALL, "n_ctx": 256}) as llm:
        expected = llm.generate(["abc", "b"], temperature=0, max_tokens=3)
    with LLM(tiny_models("llama"), **{**SMALL, "n_ctx": 256, **options}) as llm:
        found = llm.generate(["abc", "b"], temperature=0, max_tokens=3)
        scored = llm.generate("abc", max_tokens=0, prompt_logprobs=0).prompt_logprobs
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert scored is not None
    assert len(scored) == 3


# ---- channels of the caller's, and intervals


def test_a_channel_made_before_the_request_is_read_on_another_thread(llama: LLM) -> None:
    """The thread may begin to read before there is a request; it gets the result of `generate`."""
    channel, texts = StreamChannel.create(), []
    channel.interval = 4
    reader = threading.Thread(target=lambda: channel.consume(lambda chunk: texts.append(chunk.text)))
    reader.start()
    stream = llama.stream("Hello", channel=channel, request_index=2, **GREEDY)
    reader.join(LONG_S)
    assert "".join(texts) == llama.generate("Hello", **GREEDY).text
    assert (stream.interval, stream.request_index, channel.request_index) == (4, 2, 2)
    assert len(texts) <= GREEDY["max_tokens"] // 4 + 1


def test_a_used_channel_is_refused_before_any_work(llama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its request runs and after the end, nothing is tokenised for another one; the engine takes the next request."""
    channel = StreamChannel.create()
    llama.stream("Hello", channel=channel, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llama._engine, "prepare", lambda *_: pytest.fail("a request was prepared"))
        for state in ("attached", "finished"):
            with pytest.raises(InvalidParams, match=f"{state}.*one request in its life"):
                llama.stream("Hello", channel=channel)
            channel.wait_finished(LONG_S)
    with pytest.raises(InvalidType, match="StreamChannel, not str"):
        llama.stream("Hello", channel="mine")  # type: ignore[arg-type]
    assert len(list(llama.stream("Hello", channel=StreamChannel.create(), **GREEDY))) > 0


def test_a_channel_of_a_refused_request_serves_another_one(llama: LLM) -> None:
    """A prompt that is too long, or an option that makes no sense, leaves the channel new."""
    channel = StreamChannel.create()
    channel.interval = 6
    for wrong in ({"prompt": [5] * 5000}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "request_index": -1}):
        with pytest.raises(RequestError):
            llama.stream(channel=channel, **wrong)
    with pytest.raises(InvalidParams, match="interval is 2 among the request's options and 6 on its channel"):
        llama.stream("a", channel=channel, interval=2)
    stream = llama.stream("a", channel=channel, interval=6, **GREEDY)
    assert sum(len(chunk.token_ids) for chunk in stream) == len(llama.generate("a", **GREEDY).token_ids)


def test_the_interval_may_change_while_a_stream_is_read(demo: LLM) -> None:
    """Chunks have as many tokens as it says from then on, and together they are the same completion."""
    stream = demo.stream("A fox", temperature=0, max_tokens=120, ignore_eos=True, logprobs=0, interval=100)
    stream.interval = 30
    first = stream.get(LONG_S)
    assert isinstance(first, StreamChunk)
    assert len(first.token_ids) >= 30
    stream.interval = 1
    rest = list(stream)
    assert stream.interval == 1
    tokens = [*first.token_ids, *(token for chunk in rest for token in chunk.token_ids)]
    # Another completion may differ at a near tie, so the chunks are held to the words that the model said in this one.
    assert len(tokens) == 120
    assert [entry.token.id for chunk in (first, *rest) for entry in chunk.logprobs] == tokens
    assert demo.tokenizer.decode(tokens).lstrip() == "".join(chunk.text for chunk in (first, *rest)).lstrip()


def prompts() -> Iterator[str]:
    """Yield two."""
    yield "A fox"
    yield "An owl"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (None, "NoneType"),
        (prompts(), "generator; make a list of it"),
        ({"A fox"}, "set; make a list of it"),
        ({"prompt_token_ids": [1]}, "dict; pass its text or its token ids"),
        (b"A fox", "bytes; decode it"),
        (3, "int"),
    ],
)
def test_a_prompt_of_another_type_says_what_to_pass(demo: LLM, prompt: Any, found: str) -> None:
    """By itself, in a list, and to be embedded."""
    wanted = f"must be a text, token ids or a list of these, not {found}"
    for name, call in (("prompt", demo.generate), ("prompt", demo.stream)):
        with pytest.raises(InvalidType) as refused:
            call(prompt)
        assert str(refused.value) == f"{name} {wanted}"
    with pytest.raises(InvalidType) as refused:
        demo.embed(["A fox", prompt])
    assert str(refused.value) == f"texts[1] {wanted}"
    with pytest.raises(BatchError, match="the first is outcomes"):
        demo.generate(["A fox", prompt], max_tokens=1)


def test_token_ids_are_one_text_to_embed(demo: LLM) -> None:
    """A flat list or array, as for `generate`."""
    ids = demo.tokenizer.encode("A fox")
    expected = demo.embed("A fox")
    assert np.array_equal(demo.embed(ids), expected)
    assert np.array_equal(demo.embed(np.array(ids)), expected)
    assert np.array_equal(demo.embed([ids])[0], expected)
    with pytest.raises(InvalidParams, match=r"^texts\[1\] is empty; a text needs at least one token to be embedded$"):
        demo.embed(["a", []])


def test_an_empty_name_of_a_model_is_refused() -> None:
    """A dot would be the folder that the program runs in."""
    with pytest.raises(InvalidParams, match=r"^the name of a model is empty; .* \(LLM\(\) loads the demo model\)$"):
        LLM("")


def test_limits_of_a_model_that_generates_have_no_reason_against_it(demo: LLM) -> None:
    """The reason belongs to models that embed alone."""
    assert demo.limits.cannot_generate == ""
    assert demo.limits.max_positions > 0


def test_a_list_reports_its_progress_while_it_runs(demo: LLM) -> None:
    """Prompts and conversations are counted one by one, each before all that follow have ended."""
    seen: list[tuple[int, int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total, demo.stats().completed))

    demo.generate(["A fox"] * 30, max_tokens=8, progress=progress)
    assert [numbers[:2] for numbers in seen] == [(done, 30) for done in range(1, 31)]
    assert seen[0][2] < seen[-1][2]
    seen.clear()
    demo.chat([[{"role": "user", "content": "Hello!"}]] * 30, max_tokens=8, progress=progress)
    assert [numbers[:2] for numbers in seen] == [(done, 30) for done in range(1, 31)]
    assert seen[0][2] < seen[-1][2]


def test_an_exception_of_a_progress_function_ends_the_call(demo: LLM) -> None:
    """The requests that run are cancelled, and the engine goes on."""
    with pytest.raises(ZeroDivisionError):
        demo.generate(["A fox"] * 30, max_tokens=300, progress=lambda done, _: 1 // (1 - done))
    assert demo.generate("A fox", max_tokens=2).usage.completion_tokens == 2
