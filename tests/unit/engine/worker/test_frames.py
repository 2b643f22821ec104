"""Frames and messages: whole, cut, damaged, of another version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline import errors
from paceline.engine import questions
from paceline.engine.core import Cancel, EndSlow, SetInterval, SetPaused, Stop
from paceline.engine.questions import Call, Question, Reply, find_question
from paceline.engine.worker import messages
from paceline.engine.worker.messages import MAX_BYTES, FrameReader, framed
from paceline.errors import EngineDied, EngineError, PacelineError, PromptTooLong, QueueFull
from paceline.kv_cache import HashedPrefix, PrefixDigest
from paceline.observability.metric_table import Histogram, Sample
from paceline.scheduling.records import Delta, Embedded, Failed, Released, SlotsSnapshot, SlotView, Started
from paceline.sequence import GenerationState, Progress
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage

numbers = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
logprobs = st.builds(TokenLogprobs, own=numbers, token_ids=ids, values=st.lists(numbers, max_size=3).map(tuple))
some_logprobs = st.lists(logprobs, max_size=2).map(tuple)
usages = st.builds(
    Usage, prompt_tokens=st.integers(0, 99), cached_from=st.none() | st.text(), ttft_s=st.none() | numbers
)
texts = st.text(max_size=20)
chunks = st.builds(
    StreamChunk,
    index=st.integers(0, 2**31),
    token_ids=ids,
    text=texts,
    logprobs=some_logprobs,
    choice=st.integers(0, 255),
    prompt_logprobs=some_logprobs,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop=st.none() | texts | st.integers(0, 2**31),
    stop_token_ids=ids,
    usage=st.none() | usages,
)
progress = st.builds(Progress, st.none() | numbers, st.none() | numbers, st.integers(0, 9), st.none() | texts)
keys = st.integers(1, 2**62)
events = st.one_of(
    st.builds(
        Delta,
        key=keys,
        chunk=st.none() | chunks,
        is_last=st.booleans(),
        choice=st.integers(0, 255),
        drawn=ids,
        unsent_logprobs=some_logprobs,
        sampler_state=st.none() | st.binary(max_size=9),
        progress=st.none() | progress,
    ),
    st.builds(Started, keys, st.none() | progress),
    st.builds(Released, keys),
    st.builds(Embedded, keys, st.lists(st.binary(max_size=12), max_size=2), st.none()),
)
slots = st.builds(
    SlotView,
    id=st.integers(0, 9),
    state=st.sampled_from(["idle", "prefilling", "decoding", "paused"]),
    key=st.none() | st.integers(1, 9),
    request_id=st.none() | texts,
    max_tokens=st.none() | st.integers(0, 9),
    running_s=numbers,
)
snapshots = st.builds(SlotsSnapshot, st.lists(slots, max_size=3).map(tuple), st.integers(0, 9))
digests = st.builds(
    PrefixDigest, st.lists(st.builds(HashedPrefix, texts, st.integers(0, 9)), max_size=3).map(tuple), st.booleans()
)
ups = st.one_of(
    st.builds(messages.Happened, st.lists(events, max_size=4)),
    st.builds(messages.Logged, texts, st.integers(0, 50), texts),
    st.builds(Reply, keys, st.none() | st.binary(max_size=9)),
    st.builds(messages.Loading, st.floats(0, 1)),
    st.builds(
        messages.Ready, st.just(1), st.just({"num_slots": 3}), st.just({"desc": "x"}), st.lists(texts, max_size=2)
    ),
)
states = st.builds(
    GenerationState,
    token_ids=ids.map(list),
    num_sent=st.none() | st.integers(0, 9),
    unsent_logprobs=some_logprobs.map(list),
    num_scored=st.integers(0, 9),
    reason=st.none() | st.sampled_from(FinishReason),
    sampler_state=st.none() | st.binary(max_size=4),
)
downs = st.one_of(
    st.builds(
        messages.EngineRequest,
        key=keys,
        prompts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=2),
        params=st.just({"seed": 2**64 - 1, "stop": ["a"]}),
        options=st.just({"lora": {"x": 0.5}}),
        echo=texts,
        submitted_s=numbers,
        progress=progress,
        states=st.lists(st.none() | states, max_size=3),
    ),
    st.builds(Cancel, keys),
    st.builds(SetPaused, keys, st.booleans()),
    st.builds(SetInterval, keys, st.integers(1, 9)),
    st.builds(EndSlow, keys),
    st.builds(Stop),
    st.builds(Call, keys, texts, st.binary(max_size=9), numbers),
)


@given(sent=st.lists(st.one_of(ups, downs), max_size=5), data=st.data())
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(
    sent: list[messages.Up | messages.Down], data: st.DataObject
) -> None:
    """Any split of the stream gives the same messages, in order, and nothing is left."""
    stream = b"".join(framed(messages.encode(message)) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = FrameReader()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[begin:end])
    assert not reader._data
    decoded = [
        (messages.decode_up if isinstance(message, messages.Up) else messages.decode_down)(frame)
        for message, frame in zip(sent, found, strict=True)
    ]
    assert decoded == sent


@given(number=keys, snapshot=snapshots, found=digests, block_tokens=st.none() | st.integers(1, 99))
def test_questions_and_answers_come_out_as_they_went_in(
    number: int, snapshot: SlotsSnapshot, found: PrefixDigest, block_tokens: int | None
) -> None:
    """By the types of the functions, whatever process asks."""
    call = questions.digest.call(number, (9, block_tokens))
    assert (find_question(call), questions.digest.args(call)) == (questions.digest, (9, block_tokens))
    asked: list[tuple[Question[Any, *tuple[Any, ...]], object]] = [
        (questions.slots, snapshot),
        (questions.digest, found),
        (questions.erase_prefix, None),
        (questions.measure_media, (((1, 2), 0, 0, True), ((), 3, 2, False))),
    ]
    for question, answer in asked:
        assert question.result(question.reply(number, answer)) == answer
    with pytest.raises(EngineError, match="'digest' cannot be read"):
        questions.digest.result(Reply(number, b"\x91"))
    with pytest.raises(EngineError, match="no question 'size'; the questions are activity, "):
        find_question(Call(number, "size", b""))


@given(message=ups, cut=st.integers(1, 50))
def test_a_message_that_was_cut_off_is_never_handed_out(message: messages.Up, cut: int) -> None:
    """A worker that dies in the middle of a frame has sent nothing by it."""
    frame = framed(messages.encode(message))
    reader = FrameReader()
    assert reader.feed(frame[: max(0, len(frame) - cut)]) == []


def test_a_length_that_makes_no_sense_is_an_error() -> None:
    """Before anything of that size is waited for; a message of it is not sent either."""
    with pytest.raises(EngineError, match="bytes"):
        FrameReader().feed((MAX_BYTES + 1).to_bytes(4, "big"))


@given(st.binary(max_size=60))
@example(b"\x91\xa1\x80")
def test_bytes_that_are_no_message_are_an_error_of_ours(data: bytes) -> None:
    """Nothing else is ever raised."""
    for decode in (messages.decode_up, messages.decode_down):
        try:
            found: object = decode(data)
        except EngineError:
            continue
        else:
            assert type(found).__module__ == messages.__name__


def classes(base: type[PacelineError] = PacelineError) -> list[type[PacelineError]]:
    """Classes with a code of their own; some of a server have their base's code."""
    own = [base] if "code" in vars(base) else []
    return [*own, *(each for child in base.__subclasses__() for each in classes(child))]


@pytest.mark.parametrize("kind", classes())
def test_every_error_keeps_its_class_and_message(kind: type[PacelineError]) -> None:
    """The code selects the class."""
    sent = messages.Happened([Failed(3, kind("why, and the way out"))])
    (part,) = messages.decode_up(messages.encode(sent)).events  # type: ignore[union-attr]
    assert isinstance(part, Failed)
    assert type(part.error) is kind
    assert str(part.error) == "why, and the way out"


def test_an_error_without_a_code_of_its_own_comes_over_as_its_base() -> None:
    """However it is made, and whichever class was defined last."""

    class Narrower(PromptTooLong):
        def __init__(self, num_tokens: int, max_tokens: int) -> None:
            super().__init__(f"{num_tokens} of {max_tokens}")

    sent = messages.Happened([Failed(3, Narrower(7, 5))])
    (part,) = messages.decode_up(messages.encode(sent)).events  # type: ignore[union-attr]
    assert (type(part.error), str(part.error)) == (PromptTooLong, "7 of 5")


def test_a_prompt_that_is_too_long_keeps_its_numbers() -> None:
    """The error has the prompt's length and the limit."""
    sent = messages.Happened([Failed(3, PromptTooLong("too long", 7, 5))])
    (part,) = messages.decode_up(messages.encode(sent)).events  # type: ignore[union-attr]
    assert (part.error.num_tokens, part.error.max_tokens) == (7, 5)


def test_an_error_of_a_later_version_is_still_an_error_of_ours() -> None:
    """An unknown code does not hide the message."""
    data = messages.encode(messages.Refused(1, QueueFull("why"))).replace(b"queue_full", b"queue_flat")
    found = messages.decode_up(data)
    assert isinstance(found, messages.Refused)
    assert type(found.error) is EngineError
    assert str(found.error) == "why"


def test_metrics_go_over_as_they_are() -> None:
    """Numbers and histograms."""
    samples = [
        Sample("a", "counter", (("kind", "x"),), 3),
        Sample("b", "histogram", (), Histogram((0.1, 1.0), (1, 0, 2), 3.5, 0.05, 2.0)),
    ]
    assert messages.decode_up(messages.encode(messages.Stats(samples))) == messages.Stats(samples)


def test_another_version_of_the_protocol_is_refused() -> None:
    """With the event, and the way out."""
    messages.check_protocol(messages.PROTOCOL)
    with pytest.raises(EngineError, match="changed on disk"):
        messages.check_protocol(messages.PROTOCOL + 1)


def test_the_error_of_a_death_has_signal_and_last_words() -> None:
    """For programs, beside the message."""
    error = EngineDied("it died", "SIGABRT", "GGML_ASSERT failed")
    assert (error.signal, error.last_words, error.code) == ("SIGABRT", "GGML_ASSERT failed", "engine_died")
    assert errors.EngineDied("x").last_words == ""
