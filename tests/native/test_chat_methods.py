"""Chats of `LLM` and `AsyncLLM` on the demo model: tools, typed replies, streams, and a worker process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from openai.types.chat import ChatCompletionMessage
from tests.native.chat_templates import demo
from tests.pictures import picture

from paceline import LLM, AsyncLLM, ChatReply, Image
from paceline.chat import ChatFormat, ChatOptions, next_turn
from paceline.chat_client.response_models import ResponseModel, SchemaNotice
from paceline.errors import PacelineError, ResponseModelError, TemplateError, Unsupported

PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: dict[str, Any] = {"temperature": 0}


@dataclass
class Animal:
    name: str
    kind: Literal["fox", "bear"]


def weather(city: str) -> str:
    """Current weather of a city.

    Args:
        city: The city.
    """
    return f"sunny in {city}, 20 degrees"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_slots=4, n_ctx=8192, n_threads=1) as made:
        yield made


def roles(reply: ChatReply[Any]) -> list[str]:
    return [message["role"] for message in reply.messages]


def test_a_reply_has_content_thinking_and_the_conversation(llm: LLM) -> None:
    """The messages fit the next call."""
    reply = llm.chat(STORY, **GREEDY, max_tokens=40)
    assert reply.reasoning_content
    assert "<think>" not in reply.content
    assert roles(reply) == ["user", "assistant"]
    following = llm.chat([*reply.messages, {"role": "user", "content": "Thank you!"}], **GREEDY, max_tokens=20)
    assert roles(following) == ["user", "assistant", "user", "assistant"]
    assert following.usage.cached_tokens > 0


def test_messages_of_other_sdks_are_taken(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Generated messages, pydantic models and their dumps; unknown members are logged once for each kind."""
    first = llm.chat(STORY, **GREEDY, max_tokens=10, reasoning_effort="none")
    dumped = {"role": "assistant", "content": first.content, "audio": None, "function_call": None, "tool_calls": None}
    model = ChatCompletionMessage.model_validate(dumped)
    thanks = {"role": "user", "content": "Thank you!"}
    replies = [
        llm.chat([*STORY, said, thanks], **GREEDY, max_tokens=5)  # type: ignore[list-item]
        for said in (first.message, model, dumped, model.model_dump())
    ]
    assert len({reply.prompt_token_ids for reply in replies}) == 1
    assert not caplog.records
    llm.chat([{**STORY[0], "colour": "red"}, {**thanks, "colour": "red"}], **GREEDY, max_tokens=1)
    assert [record.message for record in caplog.records] == ["messages[0].colour has no effect here and was ignored"]


def test_a_model_that_cannot_see_goes_on_behind_an_image(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """With a text in its place; the conversation keeps the image, and the last message of the user is refused."""
    seen = {"role": "user", "content": [Image(picture(1)), {"type": "text", "text": "?"}]}
    reply = llm.chat([seen, {"role": "assistant", "content": "A fox."}, *STORY], **GREEDY, max_tokens=1)
    assert "[image omitted: this model cannot see]\n?" in llm.tokenizer.decode(reply.prompt_token_ids)
    assert reply.messages[0] == seen
    (record,) = caplog.records
    assert record.message.startswith("messages[0].content[0]: this model takes no images; the prompt has")
    with pytest.raises(Unsupported, match="this model takes no images"):
        llm.chat([seen], max_tokens=1)


def test_a_function_is_called_and_its_result_read(llm: LLM) -> None:
    """The loop ends with a reply; the second prompt begins with the tokens of the first one and of its call."""
    asked = []

    def weather_of(city: str) -> str:
        asked.append(city)
        return "sunny, 20 degrees"

    weather_of.__name__, weather_of.__doc__ = "weather", weather.__doc__
    reply = llm.chat(PARIS, tools=[weather_of], run_tools=True, **GREEDY)
    assert asked == ["Paris"]
    assert roles(reply) == ["user", "assistant", "tool", "assistant"]
    assert "20 degrees" in reply.content
    first = reply.rounds[0]
    before = (*first.prompt_token_ids, *first.choices[0].token_ids)
    assert reply.prompt_token_ids[: len(before)] == before
    assert reply.usage.cached_tokens >= len(before) - 1


def test_without_run_tools_the_calls_are_the_callers(llm: LLM) -> None:
    """Every call has an id, and the conversation ends with them."""
    reply = llm.chat(PARIS, tools=[weather], tool_choice="weather", **GREEDY)
    assert [call.name for call in reply.tool_calls] == ["weather"]
    assert reply.messages[-1]["tool_calls"][0]["id"] == reply.tool_calls[0].id
    with pytest.raises(ResponseModelError, match="calls tools"):
        _ = reply.parsed


def test_a_stream_runs_tools_as_a_chat_does(llm: LLM) -> None:
    """The pieces of both messages, the call and its result between them; the reply is that of `chat`."""
    whole = llm.chat(PARIS, tools=[weather], run_tools=True, **GREEDY)
    with llm.stream_chat(PARIS, tools=[weather], run_tools=True, **GREEDY) as stream:
        chunks = list(stream)
        reply = stream.collect()
    (place,) = [index for index, chunk in enumerate(chunks) if chunk.tool_result is not None]
    called = chunks[place - 1].message
    assert called is not None
    result = chunks[place].tool_result
    assert result is not None
    assert (called.tool_calls, result.content) == ((result.call,), whole.messages[2]["content"])
    assert "".join(delta.content for chunk in chunks[place:] for delta in chunk.deltas) == reply.content
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (reply.content, roles(reply)) == (whole.content, roles(whole))
    assert reply.usage.cached_tokens > 0


def test_a_reply_is_an_instance(llm: LLM) -> None:
    """Of a dataclass; one that is cut off raises with its text, and the next one works."""
    asked = [{"role": "user", "content": "Describe an animal."}]
    reply = llm.chat(asked, response_model=Animal, **GREEDY, max_tokens=400)
    assert isinstance(reply.parsed, Animal)
    with pytest.raises(ResponseModelError, match="cut off") as caught:
        llm.chat(asked, response_model=Animal, **GREEDY, max_tokens=3, reasoning_effort="none")
    assert caught.value.text.startswith("{")
    assert isinstance(caught.value.reply, ChatReply)
    assert llm.chat(STORY, max_tokens=2).parsed is None


def test_the_prefix_cache_serves_a_schema_that_was_shown_before(llm: LLM) -> None:
    """After a system message that several questions share."""
    system = {"role": "system", "content": "You know all animals."}
    texts = ("Describe a fox.", "And now, for something else, describe a bear!")
    replies = [
        llm.chat([system, {"role": "user", "content": text}], response_model=Animal, **GREEDY, max_tokens=400)
        for text in texts
    ]
    assert replies[1].usage.cached_tokens > replies[1].usage.prompt_tokens / 2
    assert replies[1].messages[0] == system


SHOWN = "Answer with JSON that fits this schema: "


def test_a_schema_is_shown_once_by_every_template(llama_cpp_source: Path) -> None:
    """In templates without system messages it stands in a user's message. Each turn after the first has it once as well."""
    notice, num_shown = SchemaNotice(ResponseModel(Animal).shown_schema, has_tools=False), 0
    first = [{"role": "user", "content": "Describe a fox."}]
    later = [{"role": "system", "content": "Be brief."}, *first, {"role": "assistant", "content": "No."}, *first]
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = ChatFormat(demo(), path.read_text())
        for messages in (first, later):
            turn = next_turn(messages)
            try:
                chat.render_turn(turn, ChatOptions())
            except PacelineError:  # a template that needs more
                continue
            text = chat.render_turn(replace(turn, messages=notice.added_to(turn.messages)), ChatOptions()).text
            assert (text.count(SHOWN), text.count("Describe a fox.")) == (1, len(messages) // 2 or 1), path.name
            num_shown += 1
    assert num_shown > 100


class Pages(pydantic.BaseModel):
    number: Annotated[int, pydantic.Field(ge=0, le=6, multiple_of=2)]


def test_types_that_grammars_of_chats_cannot_enforce_work_beside_tools(llm: LLM) -> None:
    """The grammar enforces a part of them, and the reply is parsed; it is odd at most twice."""
    replies = []
    for seed in range(4):
        options: Any = {"seed": seed, "temperature": 1.5, "max_tokens": 300, "reasoning_effort": "none"}
        with suppress(ResponseModelError):
            replies.append(llm.chat(STORY, tools=[weather], response_model=Pages, **options))
    instances = [reply.parsed for reply in replies if not reply.tool_calls]
    assert instances
    assert all(isinstance(instance, Pages) for instance in instances)


def test_streamed_equals_whole_with_tools(llm: LLM) -> None:
    """Thinking, name and arguments of the call come in pieces that make up the message."""
    with llm.stream_chat(PARIS, tools=[weather], **GREEDY) as stream:
        chunks = list(stream)
        reply = stream.collect()
    deltas = [delta for chunk in chunks for delta in chunk.deltas]
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    assert "".join(call.arguments for call in calls) == reply.tool_calls[0].arguments
    assert [call.id for call in calls if call.name] == [reply.tool_calls[0].id]
    assert "".join(delta.reasoning_content for delta in deltas) == reply.reasoning_content
    assert reply.finish_reason == "tool_calls"


def test_a_message_is_continued(llm: LLM) -> None:
    """The reply has the new text; the conversation has the whole message, in the place of its beginning."""
    begun = [*STORY, {"role": "assistant", "content": "There was a red"}]
    reply = llm.chat(begun, continue_final_message=True, **GREEDY, max_tokens=10)
    assert roles(reply) == ["user", "assistant"]
    assert reply.messages[-1]["content"] == "There was a red" + reply.content


def test_templates_come_with_the_llm_or_the_call(llm: LLM) -> None:
    """By name or source; one that does not parse is refused at once, also by the constructor."""
    source = "{% for message in messages %}[{{ message.content }}]{% endfor %}{{ mark }}"
    reply = llm.chat(STORY, chat_template=source, chat_template_kwargs={"mark": "!"}, max_tokens=3)
    assert llm.tokenizer.decode(reply.prompt_token_ids) == f"[{STORY[0]['content']}]!"
    with pytest.raises(TemplateError):
        llm.chat(STORY, chat_template="{% if %}", max_tokens=3)
    with pytest.raises(TemplateError):
        LLM(n_ctx=512, chat_template="{% if %}")
    with LLM(n_ctx=512, n_threads=1, chat_template=source) as other:
        assert len(other.chat(STORY, max_tokens=2).prompt_token_ids) < len(
            llm.chat(STORY, max_tokens=2).prompt_token_ids
        )


def test_thinking_is_left_out_or_left_in(llm: LLM) -> None:
    """By reasoning_effort and reasoning_format."""
    assert llm.chat(STORY, reasoning_effort="none", **GREEDY, max_tokens=20).reasoning_content == ""
    assert "<think>" in llm.chat(STORY, reasoning_format="none", **GREEDY, max_tokens=20).content


def test_an_event_loop_runs_tools_concurrently() -> None:
    """Async functions on the loop, plain functions in threads; lists and streams work as with `LLM`."""

    async def async_weather(city: str) -> str:
        assert asyncio.get_running_loop()
        await asyncio.sleep(0)
        return "rainy"

    def plain_weather(city: str) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return "windy"

    async def main() -> None:
        async with AsyncLLM(num_slots=4, n_ctx=8192, n_threads=1) as llm:
            for function, word in ((async_weather, "rainy"), (plain_weather, "windy")):
                function.__name__, function.__doc__ = "weather", weather.__doc__
                reply = await llm.chat(PARIS, tools=[function], run_tools=True, **GREEDY)
                assert reply.messages[2]["content"] == word
                assert reply.content
            two = await llm.chat([PARIS, STORY], **GREEDY, max_tokens=10)
            assert [item.index for item in two] == [0, 1]
            async with llm.stream_chat(STORY, **GREEDY, max_tokens=20) as stream:
                text = "".join([delta.content async for chunk in stream for delta in chunk.deltas])
            assert stream.completion is not None
            assert stream.completion.content == text
            endless = llm.stream_chat(STORY, ignore_eos=True)
            async for _ in endless:
                break
            await endless.released()
            assert endless.is_cancelled
            with pytest.raises(TemplateError):
                await llm.chat(STORY, chat_template="{% if %}")
            assert await llm.chat(STORY, max_tokens=2)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_worker_process_chats() -> None:
    """The template is rendered here, the tokens come from there."""
    with LLM(num_slots=2, n_ctx=4096, n_threads=1, isolation="process") as llm:
        reply = llm.chat(PARIS, tools=[weather], run_tools=True, **GREEDY)
        assert "20 degrees" in reply.content
