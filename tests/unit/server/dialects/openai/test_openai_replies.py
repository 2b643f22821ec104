"""Responses and events, from hand-made chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from paceline.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    MessageDelta,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    ToolCallDelta,
    chat_completion_of,
)
from paceline.errors import ChatParseError
from paceline.output import Vocabulary
from paceline.server.dialects.openai.openai_replies import (
    ChatCompletionStream,
    CompletionStream,
    OpenAIReply,
    chat_body,
    completion_body,
)
from paceline.server.dialects.token_reports import final_timings, usage_body
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import Completion, completion_of

PIECES = tuple(bytes([byte]) for byte in range(128))
USAGE = Usage(prompt_tokens=2, cached_tokens=1, cached_from="host", completion_tokens=3)
HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "system_fingerprint": "fp"}
ONE = TokenLogprobs(-1.0, (65,), (-0.5,))
named = Vocabulary(PIECES, PIECES, frozenset()).with_texts


def options(**options: Any) -> OpenAIReply:
    return OpenAIReply(**{**HEAD, "prompts": ((72, 105),), "text_pieces": PIECES, "token_pieces": PIECES, **options})


def chunk(text: str = "", index: int = 0, **options: Any) -> StreamChunk:
    return StreamChunk(index=index, text=text, token_ids=tuple(text.encode()), **options)


def last(text: str = "", **options: Any) -> StreamChunk:
    return chunk(text, finish_reason=FinishReason.LENGTH, usage=USAGE, **options)


def completion(*chunks: StreamChunk, prompt: tuple[int, ...] = (72, 105), scored: bool = False) -> Completion:
    has_logprobs = any(chunk.logprobs for chunk in chunks)
    return completion_of(chunks, prompt=prompt, wants_logprobs=has_logprobs, wants_prompt_logprobs=scored, index=0)


def as_chat(chunk: StreamChunk) -> ChatChunk:
    """Return a chunk with its text as content."""
    return ChatChunk(
        choice=chunk.choice,
        deltas=(MessageDelta(content=chunk.text),) if chunk.text else (),
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        finish_reason=chunk.finish_reason,
        stop=chunk.stop,
        usage=chunk.usage,
        message=None if chunk.finish_reason is None else ParsedMessage(content=chunk.text),
    )


def chat_completion(*chunks: StreamChunk) -> ChatCompletion:
    """Return a chat completion with texts as contents, by the format that has nothing else."""
    return chat_completion_of(completion(*chunks), RenderedPrompt(text="Hi"))


def events(
    stream: CompletionStream | ChatCompletionStream, chunks: Iterable[StreamChunk | ChatChunk | tuple[int, StreamChunk]]
) -> list[Any]:
    payloads = []
    for item in chunks:
        prompt, chunk = item if isinstance(item, tuple) else (0, item)
        if isinstance(stream, CompletionStream):
            assert isinstance(chunk, StreamChunk)
            rendered = stream(prompt, chunk)
        else:
            rendered = stream(prompt, as_chat(chunk) if isinstance(chunk, StreamChunk) else chunk)
        payloads += [msgspec.json.decode(event) for event in rendered]
    return payloads


def choices(payloads: Iterable[Any]) -> list[Any]:
    return [choice for event in payloads for choice in event["choices"]]


def test_a_whole_completion_has_openais_members_llama_servers_timings_and_no_others() -> None:
    """Nothing of ours is there that was not asked for."""
    body = msgspec.json.decode(completion_body(options(), [completion(chunk("ab"), last("c"))]))
    assert body == {
        **HEAD,
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1, "cached_from": "host"},
        },
        "timings": final_timings(USAGE, 3),
    }


def test_timings_are_of_one_prompt() -> None:
    """Of several there is no pace that would be theirs; in a stream they come with the last event."""
    body = msgspec.json.decode(completion_body(options(prompts=((1,), (2,))), [completion(last("c"))] * 2))
    assert "timings" not in body
    several = events(CompletionStream(options(prompts=((1,), (2,)))), [last("a"), (1, last("b"))])
    assert not any("timings" in event for event in several)
    for stream in (CompletionStream, ChatCompletionStream):
        for include_usage in (False, True):
            payloads = events(stream(options(include_usage=include_usage)), [chunk("a"), last("b")])
            assert [event.get("timings") for event in payloads] == [None] * (len(payloads) - 1) + [
                final_timings(USAGE, 3)
            ]


def test_timings_can_come_with_every_event() -> None:
    """By the renderer's clock; the last event's are the engine's."""
    now = [10.0]
    stream = CompletionStream(options(clock=lambda: now[0]))
    now[0] += 2
    first = events(stream, [chunk("a")])
    now[0] += 1
    payloads = [*first, *events(stream, [chunk("bc"), last()])]
    assert [event["timings"]["predicted_n"] for event in payloads] == [1, 3, 3]
    assert [event["timings"]["prompt_ms"] for event in payloads] == [2000, 2000, 1000 * USAGE.prefill_s]
    assert payloads[1]["timings"]["predicted_per_second"] == 2


def test_choices_are_numbered_over_all_prompts() -> None:
    """The first prompt's first."""
    two = [completion(chunk("a", choice=0), chunk("b", choice=1, finish_reason=FinishReason.STOP), last(choice=0))] * 2
    body = msgspec.json.decode(completion_body(options(n=2, prompts=((1,), (2,))), two))
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        (0, "a", "length"), (1, "b", "stop"), (2, "a", "length"), (3, "b", "stop"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 4


def test_own_members_come_when_they_are_asked_for() -> None:
    """Ids, the prompt's log-probabilities, the stop that ended the completion, warnings."""
    wanted = options(token_ids=True, wants_prompt_logprobs=True, warnings=("x: y",))
    whole = completion(chunk("a", prompt_logprobs=(named(105, ONE),)), last(stop="!"), scored=True)
    body = msgspec.json.decode(completion_body(wanted, [whole]))
    (choice,) = body["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["stop_reason"]) == ([97], [72, 105], "!")
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["105"] == {"logprob": -1.0, "decoded_token": "i"}
    assert body["warnings"] == ["x: y"]


def test_an_echoed_prompt_is_part_of_the_columns() -> None:
    """Its first token without a probability; offsets are of the whole text."""
    wanted = options(echoes=True, num_top=1)
    whole = completion(StreamChunk(index=0, text="Hi", prompt_logprobs=(ONE,)), last("x", logprobs=(ONE,)), scored=True)
    (choice,) = msgspec.json.decode(completion_body(wanted, [whole]))["choices"]
    assert choice["text"] == "Hix"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "x"],
        "token_logprobs": [None, -1.0, -1.0],
        "top_logprobs": [None, {"A": -0.5, "i": -1.0}, {"A": -0.5, "x": -1.0}],
        "text_offset": [0, 1, 2],
    }


def test_streamed_text_and_columns_joined_are_the_whole_ones() -> None:
    """With the prompt echoed and its log-probabilities arriving in parts."""
    wanted = options(echoes=True, num_top=1, prompts=((72, 105, 33),))
    chunks = [
        StreamChunk(index=0, text="Hi!", prompt_logprobs=(ONE,)),
        StreamChunk(index=0, prompt_logprobs=(ONE,)),
        chunk("a", logprobs=(ONE,)),
        last("b", index=1, logprobs=(ONE,)),
    ]
    (whole,) = msgspec.json.decode(completion_body(wanted, [completion(*chunks, prompt=(72, 105, 33), scored=True)]))[
        "choices"
    ]
    payloads = choices(events(CompletionStream(wanted), chunks))
    assert "".join(payload["text"] for payload in payloads) == whole["text"] == "Hi!ab"
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for payload in payloads for value in payload["logprobs"][column]] == whole["logprobs"][column]


def test_every_choice_has_the_prompts_columns_though_only_the_first_brings_them() -> None:
    """Chunks wait until these are there."""
    wanted = options(echoes=True, num_top=0, n=2)
    stream = CompletionStream(wanted)
    early = [StreamChunk(index=0, text="Hi", choice=1), StreamChunk(index=0, text="Hi", prompt_logprobs=(ONE,))]
    assert stream(0, early[0]) == []
    payloads = choices([msgspec.json.decode(event) for event in stream(0, early[1])])
    assert [(payload["index"], payload["logprobs"]["tokens"]) for payload in payloads] == [
        (1, ["H", "i"]),
        (0, ["H", "i"]),
    ]


def test_the_usage_comes_last_and_alone_where_it_is_asked_for() -> None:
    """All other events have null."""
    payloads = events(CompletionStream(options(include_usage=True)), [chunk("a"), last("b")])
    assert [event["usage"] for event in payloads[:-1]] == [None, None]
    assert payloads[-1]["choices"] == []
    assert payloads[-1]["usage"] == usage_body([USAGE])
    assert "usage" not in events(CompletionStream(options()), [last("b")])[0]


def test_the_usage_so_far_can_come_with_every_event() -> None:
    """Prompt tokens of all prompts, and the tokens generated until then."""
    stream = CompletionStream(options(continuous_usage=True, prompts=((1,), (2, 3))))
    payloads = events(stream, [chunk("ab"), (1, chunk("c"))])
    assert [(payload["usage"]["prompt_tokens"], payload["usage"]["completion_tokens"]) for payload in payloads] == [
        (3, 2),
        (3, 3),
    ]


def test_a_stream_of_several_prompts_ends_with_the_last_of_them() -> None:
    """Then come usage and warnings, of all."""
    stream = CompletionStream(options(prompts=((1,), (2,)), include_usage=True, warnings=("w",)))
    payloads = events(stream, [(1, last("b")), (0, chunk("a")), (0, last())])
    assert [choice["index"] for choice in choices(payloads)] == [1, 0, 0]
    assert [payload for payload in payloads if payload["usage"]] == [payloads[-1]]
    assert payloads[-1]["usage"]["total_tokens"] == 10
    assert [event.get("warnings") for event in payloads] == [None, None, None, ["w"]]


def test_warnings_come_with_the_last_event_without_usage() -> None:
    """No other event has them."""
    payloads = events(CompletionStream(options(warnings=("w",))), [chunk("a"), last("b")])
    assert [event.get("warnings") for event in payloads] == [None, ["w"]]


def test_tokens_without_text_yet_are_sent_only_where_tokens_are_asked_for() -> None:
    """An event without text has nothing else."""
    part = StreamChunk(index=0, token_ids=(65,), logprobs=(ONE,))
    assert events(CompletionStream(options()), [part]) == []
    assert len(events(CompletionStream(options(token_ids=True)), [part])) == 1
    assert len(events(CompletionStream(options(num_top=0)), [part])) == 1
    assert len(events(ChatCompletionStream(options()), [part])) == 1  # the role


def test_a_chunk_of_a_failed_completion_is_sent_without_an_end() -> None:
    """The failure is another event, which is not written here."""
    wanted = options(include_usage=True, warnings=("w",))
    for stream in (CompletionStream(wanted), ChatCompletionStream(wanted)):
        payloads = events(stream, [chunk("a")])
        assert all(choice["finish_reason"] is None for choice in choices(payloads))
        assert all(event["usage"] is None and "warnings" not in event for event in payloads)


def test_a_whole_chat_has_openais_members_and_no_others() -> None:
    """The message is the assistant's."""
    body = msgspec.json.decode(chat_body(options(object="chat.completion"), chat_completion(chunk("ab"), last("c"))))
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason() -> None:
    """Each of several choices does; the text is between."""
    stream = ChatCompletionStream(options(n=2, include_usage=True))
    payloads = events(
        stream, [chunk("a", choice=1), chunk("b"), chunk(choice=1, finish_reason=FinishReason.STOP), last("c")]
    )
    of = {index: [choice for choice in choices(payloads) if choice["index"] == index] for index in (0, 1)}
    assert [choice["delta"] for choice in of[0]] == [
        {"role": "assistant", "content": None},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    assert [item["finish_reason"] for item in of[0]] == [None, None, None, "length"]
    assert [choice["delta"] for choice in of[1]] == [{"role": "assistant", "content": None}, {"content": "a"}, {}]
    assert of[1][-1]["finish_reason"] == "stop"
    assert payloads[-1]["choices"] == []
    assert payloads[-1]["usage"] == usage_body([USAGE], 0)


def test_a_chats_logprobs_streamed_match_the_whole() -> None:
    """Token by token."""
    a, b, c = (named(token, ONE) for token in b"abc")
    wanted, chunks = options(num_top=1), [chunk("ab", logprobs=(a, b)), last("c", logprobs=(c,))]
    (whole,) = msgspec.json.decode(chat_body(wanted, chat_completion(*chunks)))["choices"]
    payloads = choices(events(ChatCompletionStream(wanted), chunks))
    assert [item for part in payloads if part["logprobs"] for item in part["logprobs"]["content"]] == whole["logprobs"][
        "content"
    ]
    assert [part["token"] for part in whole["logprobs"]["content"]] == ["a", "b", "c"]


@pytest.mark.parametrize(("reason", "word"), [("STOP", "stop"), ("LENGTH", "length")])
def test_finish_reasons_are_openais_words(reason: str, word: str) -> None:
    """The members of a response without streaming."""
    ended = chunk("a", finish_reason=FinishReason[reason], usage=USAGE)
    assert choices(events(CompletionStream(options()), [ended]))[-1]["finish_reason"] == word
    assert choices(events(ChatCompletionStream(options()), [ended]))[-1]["finish_reason"] == word


def test_usage_names_the_source_of_cached_tokens_if_there_is_one() -> None:
    """And the results of drafts, if there were any."""
    device = Usage(prompt_tokens=1, cached_tokens=1, cached_from="device", draft_tokens=4, accepted_tokens=2)
    assert usage_body([USAGE, Usage()])["prompt_tokens_details"] == {"cached_tokens": 1, "cached_from": "host"}
    assert usage_body([USAGE, device])["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage_body([device])["completion_tokens_details"] == {"draft_tokens": 4, "accepted_draft_tokens": 2}


THOUGHT = (
    ChatChunk(choice=0, deltas=(MessageDelta(reasoning_content="Hm."),), token_ids=(72, 109, 46)),
    ChatChunk(
        choice=0,
        deltas=(MessageDelta(content="No."),),
        token_ids=(78, 111, 46),
        finish_reason=FinishReason.STOP,
        usage=USAGE,
        message=ParsedMessage("No.", "Hm."),
    ),
)


def test_thinking_is_shown_apart_or_left_out() -> None:
    """Its tokens are counted and reported all the same."""
    for shows in (True, False):
        wanted = options(shows_thinking=shows, token_ids=True)
        payloads = choices(events(ChatCompletionStream(wanted), THOUGHT))
        assert "".join(payload["delta"].get("content") or "" for payload in payloads) == "No."
        thought = "".join(payload["delta"].get("reasoning_content", "") for payload in payloads)
        assert thought == ("Hm." if shows else "")
        assert [token for payload in payloads for token in payload.get("token_ids", ())] == [72, 109, 46, 78, 111, 46]
        choice = ChatChoice(
            index=0, message=ParsedMessage("No.", "Hm."), finish_reason=FinishReason.STOP, text="", token_ids=()
        )
        whole = ChatCompletion(choices=(choice,), prompt_token_ids=(), usage=USAGE)
        (body,) = msgspec.json.decode(chat_body(wanted, whole))["choices"]
        assert body["message"].get("reasoning_content", "") == thought


def test_parts_of_calls_have_openais_members() -> None:
    """Id, type and name in the first part of each; arguments in all; null as the content of a message of calls alone."""
    calls = (ToolCall("f", '{"a":1}', "x"), ToolCall("g", "{}", "y"))
    parts = (ToolCallDelta(0, "f", '{"a', "x"), ToolCallDelta(0, arguments='":1}'), ToolCallDelta(1, "g", "{}", "y"))
    message = ParsedMessage(tool_calls=calls)
    chunks = [ChatChunk(choice=0, deltas=(MessageDelta(tool_call=part),), token_ids=(1,)) for part in parts]
    end = ChatChunk(choice=0, finish_reason=FinishReason.TOOL_CALLS, usage=USAGE, message=message)
    payloads = choices(events(ChatCompletionStream(options()), [*chunks, end]))
    assert [call for payload in payloads for call in payload["delta"].get("tool_calls", ())] == [
        {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}},
        {"index": 0, "function": {"arguments": '":1}'}},
        {"index": 1, "id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert payloads[-1]["finish_reason"] == "tool_calls"
    choice = ChatChoice(index=0, message=message, finish_reason=FinishReason.TOOL_CALLS, text="", token_ids=())
    whole = ChatCompletion(choices=(choice,), prompt_token_ids=(), usage=USAGE)
    (body,) = msgspec.json.decode(chat_body(options(), whole))["choices"]
    assert body["finish_reason"] == "tool_calls"
    assert body["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_a_message_that_was_cut_off_ended_for_its_length() -> None:
    """Whatever calls it had begun."""
    message = ParsedMessage(tool_calls=(ToolCall("f", '{"a', "x"),))
    end = ChatChunk(choice=0, finish_reason=FinishReason.LENGTH, usage=USAGE, message=message)
    assert choices(events(ChatCompletionStream(options()), [end]))[-1]["finish_reason"] == "length"


def test_a_message_that_could_not_be_read_is_warned_of() -> None:
    """At the end of a stream, and in the response."""
    warning = ChatParseError("the text is not of the format")
    end = ChatChunk(choice=0, finish_reason=FinishReason.STOP, usage=USAGE, message=ParsedMessage("x"), warning=warning)
    assert events(ChatCompletionStream(options()), [end])[-1]["warnings"] == [str(warning)]
    choice = ChatChoice(
        index=0, message=ParsedMessage("x"), finish_reason=FinishReason.STOP, text="x", token_ids=(), warning=warning
    )
    whole = ChatCompletion(choices=(choice,), prompt_token_ids=(), usage=USAGE)
    assert msgspec.json.decode(chat_body(options(), whole))["warnings"] == [str(warning)]


def test_half_a_call_is_no_reason_to_stop() -> None:
    """A client would run it: a caller's stop text within the arguments ends the message as any other."""
    message = ParsedMessage(tool_calls=(ToolCall("weather", '{"ci', "call_1"),))
    end = ChatChunk(choice=0, finish_reason=FinishReason.STOP, usage=USAGE, message=message)
    assert choices(events(ChatCompletionStream(options()), [end]))[-1]["finish_reason"] == "stop"
