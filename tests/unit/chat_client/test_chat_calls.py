"""Chats of the library on the fake engine: lists, options, rounds of tools, and bad input that leaves everything working."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pydantic
import pytest
from tests.chat_world import FakeAsyncChats, FakeChats, run_async

from paceline.chat import ParsedMessage, ToolCall
from paceline.chat.chat_request import TokenHistory
from paceline.chat_client import chat_call
from paceline.chat_client.chat_arguments import CHAT_NAMES, check_chat_options
from paceline.chat_client.conversations import Conversation
from paceline.errors import BatchError, InvalidParams, InvalidType, PacelineError, PromptTooLong, ResponseModelError
from paceline.params import FIELDS, SamplingParams
from paceline.request import OPTION_NAMES
from paceline.streaming import FinishReason
from paceline.testing import FakeEngineClient

HELLO = [{"role": "user", "content": "Hello!"}]
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def chats() -> Iterator[FakeChats]:
    engine = FakeEngineClient()
    yield FakeChats(engine)
    engine.close()


def scripted(
    monkeypatch: pytest.MonkeyPatch, *messages: ParsedMessage, reason: FinishReason = FinishReason.STOP
) -> None:
    """Have the generated texts read as these messages, the last one for all that follow."""
    read = chat_call.chat_completion_of
    left = list(messages)

    def chat_completion_of(completion: Any, rendered: Any) -> Any:
        whole = read(completion, rendered)
        message = left.pop(0) if len(left) > 1 else left[0]
        return replace(whole, choices=(replace(whole.choices[0], message=message, finish_reason=reason),))

    monkeypatch.setattr(chat_call, "chat_completion_of", chat_completion_of)


def calling(*calls: tuple[str, str]) -> ParsedMessage:
    return ParsedMessage(tool_calls=tuple(ToolCall(name, text, f"call_{i}") for i, (name, text) in enumerate(calls)))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(reason: str) -> str:
    """Fail."""
    raise RuntimeError(reason)


def odd() -> str:
    """Return a value that is no text."""
    return "\ud800"


def worse() -> str:
    """Fail with a value that is no text."""
    raise ValueError("\ud800")


def endless() -> list[Any]:
    """Return a list that has itself."""
    made: list[Any] = []
    made.append(made)
    return made


def test_a_list_of_conversations_has_a_reply_for_each(chats: FakeChats) -> None:
    """In order, each equal to that of the conversation alone, with its own index."""
    talks = [[{"role": "user", "content": text}] for text in ("One", "Two", "Three")]
    replies = chats.chat(talks, **SHORT)
    assert [reply.index for reply in replies] == [0, 1, 2]
    assert [reply.content for reply in replies] == [chats.chat(talk, **SHORT).content for talk in talks]
    assert [reply.messages[0] for reply in replies] == [talk[0] for talk in talks]


def test_one_bad_conversation_of_a_list_fails_alone(chats: FakeChats) -> None:
    """The error has the replies of the others."""
    with pytest.raises(BatchError) as caught:
        chats.chat([HELLO, [{"role": "user"}], HELLO], **SHORT)
    kinds = [isinstance(outcome, PacelineError) for outcome in caught.value.outcomes]
    assert kinds == [False, True, False]


def test_messages_have_no_limit_unless_params_say(chats: FakeChats) -> None:
    """Without params max_tokens is None; params that are given count as they are."""
    assert chats.chat(HELLO, ignore_eos=True, timeout_s=30).usage.completion_tokens > 256
    reply = chats.chat(HELLO, SamplingParams(ignore_eos=True))
    assert reply.usage.completion_tokens == 256


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([], {}, "at least one message"),
        ("Hello", {}, r"must be a list of messages, such as \[\{.*\}\], not str"),
        (None, {}, "must be a list of messages"),
        ([{"role": "user", "content": "\ud800"}], {}, "content"),
        ([{"role": "tool", "tool_call_id": "x"}], {}, "content is missing"),
        (HELLO, {"tool": [add]}, "did you mean 'tools'"),
        (HELLO, {"tools": [3]}, "must be an object"),
        (HELLO, {"tools": [add, add]}, "two tools have the name"),
        (HELLO, {"tools": [print]}, "tool 'print'"),
        (HELLO, {"tools": [add], "tool_choice": "sub"}, "'sub'"),
        (HELLO, {"run_tools": True}, "run_tools needs Python functions"),
        (HELLO, {"run_tools": 1}, "run_tools"),
        (HELLO, {"max_tool_rounds": 3}, "without run_tools"),
        (HELLO, {"tools": [add], "run_tools": True, "max_tool_rounds": 0}, "max_tool_rounds"),
        (HELLO, {"tools": [add], "run_tools": True, "n": 2}, "one choice"),
        (HELLO, {"response_format": {"type": "xml"}}, "response_format"),
        (HELLO, {"response_format": "json"}, "response_format"),
        (HELLO, {"text_format": list[int]}, "^unknown option 'text_format'; .*response_model"),
        (HELLO, {"truncate": "left"}, 'context_overflow="drop_oldest" leaves the oldest messages out$'),
        (HELLO, {"response_model": int, "response_format": {"type": "json_object"}}, "exclude each other"),
        (HELLO, {"response_model": lambda: 1}, "response_model"),
        (HELLO, {"chat_template_kwargs": 3}, "chat_template_kwargs"),
        (HELLO, {"reasoning_effort": 3}, "reasoning_effort"),
        (HELLO, {"continue_final_message": "yes"}, "continue_final_message"),
        (HELLO, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (HELLO, {"echo": True}, "echo"),
        (HELLO, {"parse_special": True}, "parse_special has no effect in a chat"),
        (HELLO, {"interval": 3}, "use stream"),
        (HELLO, {"temperature": -1}, "temperature"),
    ],
)
def test_bad_input_names_its_field_and_changes_nothing(
    chats: FakeChats, messages: Any, options: dict[str, Any], reason: str
) -> None:
    """A RequestError before anything runs; the next chat works."""
    with pytest.raises((InvalidParams, InvalidType), match=reason):
        chats.chat(messages, **options)
    assert chats._engine.num_open == 0
    assert chats.chat(HELLO, **SHORT).content


def test_an_empty_reply_after_results_of_tools_has_a_warning(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its choice; the message with the calls has none."""
    scripted(monkeypatch, calling(("add", '{"a": 1, "b": 2}')), ParsedMessage())
    reply = chats.chat(HELLO, tools=[add], run_tools=True, **SHORT)
    warning = "the model's reply after the results of tools is empty; ask it again, or try a larger model"
    assert str(reply.choices[0].warning) == warning
    assert [round_.choices[0].warning for round_ in reply.rounds] == [None]


def test_tools_run_until_there_is_a_reply(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results stand behind their calls, in order; the reply has the whole conversation and the rounds before."""
    scripted(
        monkeypatch, calling(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 5, "b": 5}')), ParsedMessage("Three and ten.")
    )
    reply = chats.chat(HELLO, tools=[add], run_tools=True, **SHORT)
    assert reply.content == "Three and ten."
    assert [message["role"] for message in reply.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [(message["tool_call_id"], message["content"]) for message in reply.messages[2:4]] == [
        ("call_0", "3"),
        ("call_1", "10"),
    ]
    assert [len(round_.tool_calls) for round_ in reply.rounds] == [2]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (("sub", "{}"), "Error: there is no tool 'sub'; the tools are: add, broken, odd, worse, endless"),
        (("add", '{"a": 1}'), "Error: the arguments do not fit: b: Field required"),
        (("add", '{"a": "x", "b": 1, "c": 2}'), "Error: the arguments do not fit: a: Input should be a valid integer"),
        (("add", "{"), "Error: the arguments do not fit: arguments: Invalid JSON"),
        (("add", "[]"), "Error: the arguments do not fit"),
        (("broken", '{"reason": "no wind"}'), "Error: RuntimeError: no wind"),
        (("odd", "{}"), "Error: UnicodeEncodeError"),
        (("worse", "{}"), "Error: ValueError: ?"),
        (("endless", "{}"), "Error: ValueError: Circular"),
    ],
)
def test_what_goes_wrong_in_a_call_is_its_result(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch, call: tuple[str, str], result: str
) -> None:
    """The model sees it and goes on."""
    scripted(monkeypatch, calling(call), ParsedMessage("Sorry."))
    reply = chats.chat(HELLO, tools=[add, broken, odd, worse, endless], run_tools=True, **SHORT)
    assert reply.messages[2]["content"].startswith(result)
    assert reply.content == "Sorry."


def test_the_loop_has_a_limit(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """After max_tool_rounds the calls are the reply, for the caller to go on with."""
    scripted(monkeypatch, calling(("add", '{"a": 1, "b": 2}')))
    reply = chats.chat(HELLO, tools=[add], run_tools=True, max_tool_rounds=3, **SHORT)
    assert len(reply.rounds) == 3
    assert reply.tool_calls[0].name == "add"
    assert reply.messages[-1]["tool_calls"]


def test_a_call_of_a_tool_without_a_function_is_the_callers(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the message is run then."""
    other = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
    scripted(monkeypatch, calling(("add", '{"a": 1, "b": 2}'), ("search", "{}")))
    reply = chats.chat(HELLO, tools=[add, other], run_tools=True, **SHORT)
    assert [call.name for call in reply.tool_calls] == ["add", "search"]
    assert reply.rounds == ()


def test_a_required_call_is_required_once(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the loop could never end with a reply."""
    scripted(monkeypatch, calling(("add", '{"a": 1, "b": 2}')), ParsedMessage("Three."))
    chats.chat(HELLO, tools=[add], run_tools=True, tool_choice=add, **SHORT)
    wanted = {"type": "function", "function": {"name": "add"}}
    # a turn may be rendered again, to find out how calls begin
    first_options = {id(turn): options for turn, options in reversed(chats._formats.format.turns)}
    assert [options.tool_choice for options in reversed(first_options.values())] == [wanted, "auto"]


def test_lists_run_their_tools_together(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round after round; conversations without calls are done before."""
    scripted(monkeypatch, calling(("add", '{"a": 1, "b": 2}')), ParsedMessage("Hi."), ParsedMessage("Three."))
    first, second = chats.chat([HELLO, HELLO], tools=[add], run_tools=True, **SHORT)
    assert (first.content, first.index, len(first.rounds)) == ("Three.", 0, 1)
    assert (second.content, second.index, len(second.rounds)) == ("Hi.", 1, 0)


def test_async_functions_need_an_event_loop(chats: FakeChats) -> None:
    """`LLM` refuses to run them, with the way out."""

    async def wait(seconds: float) -> None:
        """Wait."""

    with pytest.raises(InvalidParams, match="use AsyncLLM"):
        chats.chat(HELLO, tools=[wait], run_tools=True)


def test_an_exit_in_a_tool_is_no_result(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a tool ends the call, and the engine goes on."""

    def leave() -> None:
        """Leave."""
        raise KeyboardInterrupt

    scripted(monkeypatch, calling(("leave", "{}")))
    with pytest.raises(KeyboardInterrupt):
        chats.chat(HELLO, tools=[leave], run_tools=True, **SHORT)
    run: Callable[..., Any] = chats.chat
    assert run(HELLO, **SHORT)


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, number: int) -> int:
        if number % 2:
            raise ValueError("the number must be even")
        return number


@pytest.mark.parametrize("name", ["response_format", "text_format", "json_schema"])
def test_a_class_as_a_schema_is_refused_with_the_option_that_takes_types(chats: FakeChats, name: str) -> None:
    """In calls, and in the options of a conversation when it is made."""
    options: dict[str, Any] = {name: Even}
    with pytest.raises(InvalidType, match=f"^{name} takes no class; give a type as response_model=Even$"):
        chats.chat(HELLO, **options)
    with pytest.raises(InvalidType, match=f"^{name} takes no class; give a type as response_model=Even$"):
        check_chat_options(None, options)


def test_a_reply_that_is_no_instance_is_asked_for_once_more(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is told the error; the conversation has the valid reply, the rounds the other."""
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'), ParsedMessage(content='{"number": 4}'))
    reply = chats.chat(HELLO, response_model=Even)
    assert reply.parsed == Even(number=4)
    assert reply.messages == [*HELLO, {"role": "assistant", "content": '{"number": 4}'}]
    assert [round_.content for round_ in reply.rounds] == ['{"number": 3}']
    turn, _ = chats._formats.format.turns[-1]
    assert [message["role"] for message in turn.messages] == ["system", "user", "assistant", "user"]
    assert "the number must be even" in turn.messages[3]["content"]
    assert "errors.pydantic.dev" not in turn.messages[3]["content"]


def test_it_is_asked_for_once_alone(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the second reply."""
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'), ParsedMessage(content='{"number": 5}'))
    with pytest.raises(ResponseModelError, match="not a valid Even after 2 attempts: 1 validation error") as caught:
        chats.chat(HELLO, response_model=Even)
    assert caught.value.text == '{"number": 5}'
    assert len(chats._formats.format.turns) == 2


def test_a_reply_is_asked_for_as_often_as_asked(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model sees all that was refused; the reply counts the attempts and adds up their usage."""
    scripted(monkeypatch, *(ParsedMessage(content=f'{{"number": {number}}}') for number in (1, 3, 5, 8)))
    reply = chats.chat(HELLO, response_model=Even, max_retries=3, **SHORT)
    assert (reply.parsed.number, reply.attempts) == (8, 4)
    assert [completion.content for completion in reply.rounds] == [f'{{"number": {number}}}' for number in (1, 3, 5)]
    assert reply.messages == [*HELLO, {"role": "assistant", "content": '{"number": 8}'}]
    turn, _ = chats._formats.format.turns[-1]
    assert [message["role"] for message in turn.messages[1:]] == ["user", *["assistant", "user"] * 3]
    usages = [completion.usage for completion in (*reply.rounds, reply)]
    for field in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert getattr(reply.total_usage, field) == sum(getattr(usage, field) for usage in usages)
    assert (reply.total_usage.completion_tokens, reply.usage.completion_tokens) == (16, 4)
    assert reply.total_usage.decode_s == pytest.approx(sum(usage.decode_s for usage in usages))
    assert reply.total_usage.ttft_s == usages[0].ttft_s


def test_a_reply_is_not_asked_for_again_without_retries(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the only reply, and the error of its validation as its cause."""
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'), ParsedMessage(content='{"number": 4}'))
    with pytest.raises(ResponseModelError, match="the reply is not a valid Even: 1 validation error") as caught:
        chats.chat(HELLO, response_model=Even, max_retries=0)
    assert isinstance(caught.value.__cause__, pydantic.ValidationError)
    assert (caught.value.text, caught.value.reply.attempts) == ('{"number": 3}', 1)
    assert len(chats._formats.format.turns) == 1


def test_a_reply_that_was_cut_off_is_asked_for_again(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads that it was cut off; the error has the last reply."""
    monkeypatch.setattr(
        TokenHistory, "continued", lambda _, request, __: request
    )  # the fake tokenizer has no control tokens
    with pytest.raises(
        ResponseModelError,
        match=r"not a valid Even after 3 attempts: it was cut off \(length\) after 4 tok.*max_tokens",
    ) as caught:
        chats.chat(HELLO, response_model=Even, max_retries=2, **SHORT)
    assert caught.value.reply.attempts == 3
    assert len(caught.value.reply.messages) == 2
    turn, _ = chats._formats.format.turns[-1]
    assert "it was cut off" in turn.messages[-1]["content"]


def test_a_reply_that_fills_the_context_is_not_asked_for_again(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt would be longer still."""
    scripted(monkeypatch, ParsedMessage(content='{"number"'), reason=FinishReason.LENGTH)
    with pytest.raises(ResponseModelError, match=r"it was cut off \(length\) .*; a larger n_ctx may help$") as caught:
        chats.chat(HELLO, response_model=Even, max_retries=3)
    assert caught.value.reply.attempts == len(chats._formats.format.turns) == 1


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.CANCELLED, FinishReason.SHUTDOWN])
def test_a_reply_that_was_ended_from_outside_is_not_asked_for_again(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch, reason: FinishReason
) -> None:
    """Another attempt would take as long again as `timeout_s` allows."""
    scripted(monkeypatch, ParsedMessage(content='{"number"'), reason=reason)
    with pytest.raises(
        ResponseModelError, match=rf"the reply is not a valid Even: it was cut off \({reason}\)"
    ) as caught:
        chats.chat(HELLO, response_model=Even, max_retries=3)
    assert caught.value.reply.attempts == len(chats._formats.format.turns) == 1
    assert ("timeout_s" in str(caught.value)) == (reason is FinishReason.DEADLINE)
    assert "max_tokens" not in str(caught.value)


def test_a_retry_may_call_tools(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refused reply stays in the conversation, as the calls follow it."""
    prepare = chat_call.prepare_chat  # the fake format has no grammar for both

    def prepare_unconstrained(chat_format: Any, turn: Any, options: Any, params: SamplingParams, **limits: int) -> Any:
        return prepare(chat_format, turn, options, params.replace(json_schema=None), **limits)

    monkeypatch.setattr(chat_call, "prepare_chat", prepare_unconstrained)
    wrong, right = ParsedMessage(content='{"number": 3}'), ParsedMessage(content='{"number": 4}')
    scripted(monkeypatch, wrong, calling(("add", '{"a": 1, "b": 3}')), wrong, right)
    reply = chats.chat(HELLO, response_model=Even, tools=[add], run_tools=True, max_retries=2)
    assert (reply.parsed.number, reply.attempts, len(reply.rounds)) == (4, 3, 3)
    roles = [message["role"] for message in reply.messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_retries": 1}, "max_retries needs a response_model"),
        ({"max_retries": 1, "response_model": Even, "n": 2}, "one choice, and n is 2"),
        ({"max_retries": -1, "response_model": Even}, "max_retries must be"),
        ({"max_retries": 101, "response_model": Even}, "max_retries must be"),
    ],
)
def test_retries_that_cannot_be_are_refused(chats: FakeChats, options: dict[str, Any], reason: str) -> None:
    """Before anything runs."""
    with pytest.raises(InvalidParams, match=reason):
        chats.chat(HELLO, **options)
    assert not chats._formats.format.turns


def test_a_stream_is_not_asked_for_again(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """With retries it is refused; without, `collect` raises the error of its only reply."""
    with pytest.raises(InvalidParams, match="max_retries: a stream is not asked for again"):
        chats.stream_chat(HELLO, response_model=Even, max_retries=1)
    with pytest.raises(ResponseModelError, match="the reply is not a valid Even: it was cut off"):
        chats.stream_chat(HELLO, response_model=Even, max_retries=0, **SHORT).collect()


def test_a_conversation_keeps_the_last_attempt_alone(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next turn follows the reply that was an instance."""
    monkeypatch.setattr(chats._engine.model, "fingerprint", b"", raising=False)
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'), ParsedMessage(content='{"number": 4}'))
    talk = Conversation(chats)
    talk.say("Hello!", response_model=Even, max_retries=1)
    assert talk.messages == [*HELLO, {"role": "assistant", "content": '{"number": 4}'}]


def test_without_place_to_ask_again_the_error_has_the_first_reply(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of the caller was not too long."""
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'))
    prepare, num_prepared = chats._engine.prepare, 0

    def prepare_once(*arguments: Any) -> Any:
        nonlocal num_prepared
        num_prepared += 1
        if num_prepared > 1:
            raise PromptTooLong("the prompt (90 tokens) exceeds the available context size (80 tokens)", 90, 80)
        return prepare(*arguments)

    monkeypatch.setattr(chats._engine, "prepare", prepare_once)
    with pytest.raises(ResponseModelError, match="(?s)the number must be even.*the context has no room") as caught:
        chats.chat(HELLO, response_model=Even)
    assert caught.value.text == '{"number": 3}'
    assert [message["role"] for message in caught.value.reply.messages] == ["user", "assistant"]
    assert not caught.value.reply.rounds


def test_each_conversation_of_a_list_is_asked_by_itself(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that is an instance is not asked for again, nor are several choices."""
    scripted(monkeypatch, *(ParsedMessage(content=f'{{"number": {number}}}') for number in (2, 3, 4)))
    first, second = chats.chat([HELLO, HELLO], response_model=Even)
    assert (first.parsed.number, len(first.rounds)) == (2, 0)
    assert (second.parsed.number, len(second.rounds)) == (4, 1)
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'))
    with pytest.raises(ResponseModelError, match="the reply is not a valid Even: "):
        chats.chat(HELLO, response_model=Even, n=2)


def test_an_async_chat_asks_again_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same reply, rounds and messages."""
    scripted(monkeypatch, ParsedMessage(content='{"number": 3}'), ParsedMessage(content='{"number": 4}'))

    async def main(chats: FakeAsyncChats) -> None:
        reply = await chats.chat(HELLO, response_model=Even)
        assert (reply.parsed.number, len(reply.rounds), len(reply.messages)) == (4, 1, 2)

    run_async(main)


class Trip(pydantic.BaseModel):
    """A trip by train."""

    km: int = pydantic.Field(description="distance in kilometres", title="Length")
    to: str


SHOWN = (
    'Answer with JSON that fits this schema: {"description": "A trip by train.", "properties": {"km": {"description": '
    '"distance in kilometres", "title": "Length", "type": "integer"}, "to": {"type": "string"}}, "required": ["km", "to"], '
    '"type": "object"}'
)
WHERE = ParsedMessage(content='{"km": 3, "to": "Rome"}')


def prompted(chats: FakeChats, round_number: int = -1) -> list[Any]:
    """Return role and content of the messages of a prompt."""
    turn, _ = chats._formats.format.turns[round_number]
    return [(message["role"], message["content"]) for message in turn.messages]


def test_a_prompt_shows_the_response_model_and_the_conversation_does_not(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With descriptions, the docstring and titles that say more than the name; after the system's own text."""
    scripted(monkeypatch, WHERE)
    first = chats.chat(HELLO, response_model=Trip)
    assert prompted(chats) == [("system", SHOWN), ("user", "Hello!")]
    assert first.messages == [*HELLO, {"role": "assistant", "content": WHERE.content}]
    chats.chat([*first.messages, *HELLO], response_model=Trip)
    assert [content.count("this schema") for _, content in prompted(chats)] == [1, 0, 0, 0]
    for role in ("system", "developer"):
        chats.chat([{"role": role, "content": "Be brief."}, *HELLO], response_model=Trip)
        assert prompted(chats) == [(role, f"Be brief.\n\n{SHOWN}"), ("user", "Hello!")]
    parts = [{"type": "text", "text": "Be brief."}]
    chats.chat([{"role": "system", "content": parts}, *HELLO], response_model=Trip)
    assert prompted(chats)[0] == ("system", [*parts, {"type": "text", "text": SHOWN}])
    assert parts == [{"type": "text", "text": "Be brief."}]


def test_a_schema_is_shown_as_asked(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response_model unless it is turned off, other schemas if it is turned on."""
    scripted(monkeypatch, WHERE)
    chats.chat(HELLO, response_model=Trip, schema_in_prompt=False)
    assert prompted(chats) == [("user", "Hello!")]
    chats.chat(HELLO, json_schema={"type": "object"})
    assert prompted(chats) == [("user", "Hello!")]
    shown = 'Answer with JSON that fits this schema: {"type": "object"}'
    for options in ({"json_schema": {"type": "object"}}, {"response_format": {"type": "json_object"}}):
        chats.chat(HELLO, schema_in_prompt=True, **options)
        assert prompted(chats)[0] == ("system", shown)
    for wrong, reason in (
        ({}, "schema_in_prompt needs a schema"),
        ({"response_model": Trip}, "schema_in_prompt must be"),
    ):
        with pytest.raises(InvalidParams, match=reason):
            chats.chat(HELLO, schema_in_prompt=True if not wrong else "yes", **wrong)


@pytest.mark.parametrize(
    "written", [json.dumps(Trip.model_json_schema(), indent=2), SHOWN.partition(": ")[2], SHOWN.replace(" ", "")]
)
def test_a_schema_that_a_message_has_is_not_shown_again(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """As pydantic writes it, or as it would be shown, with any blanks."""
    scripted(monkeypatch, WHERE)
    asked = [{"role": "user", "content": f"Fill in: {written}"}]
    chats.chat(asked, response_model=Trip)
    assert prompted(chats) == [("user", f"Fill in: {written}")]


def test_beside_tools_the_schema_is_that_of_a_reply_without_calls(
    chats: FakeChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt of every round, at the same place."""
    prepare = chat_call.prepare_chat  # the fake format has no grammar for both

    def prepare_unconstrained(chat_format: Any, turn: Any, options: Any, params: SamplingParams, **limits: int) -> Any:
        return prepare(chat_format, turn, options, params.replace(json_schema=None), **limits)

    monkeypatch.setattr(chat_call, "prepare_chat", prepare_unconstrained)
    scripted(monkeypatch, calling(("add", '{"a": 1, "b": 2}')), WHERE)
    reply = chats.chat(HELLO, tools=[add], run_tools=True, response_model=Trip)
    assert reply.parsed == Trip(km=3, to="Rome")
    first, second = prompted(chats, 0), prompted(chats, -1)
    assert first[0] == second[0]
    assert first[0][1].startswith('When you call no tool, answer with JSON that fits this schema: {"description"')
    assert not any("this schema" in str(message["content"]) for message in reply.messages)
    chats.chat(HELLO, tools=[add], tool_choice="none", response_model=Trip)
    assert prompted(chats)[0] == ("system", SHOWN)


def test_a_stream_and_a_conversation_show_the_schema(chats: FakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chat does; the turn that is remembered has no schema."""
    monkeypatch.setattr(chats._engine.model, "fingerprint", b"", raising=False)
    with chats.stream_chat(HELLO, response_model=Trip, **SHORT) as stream:
        for _ in stream:
            pass
    assert prompted(chats)[0] == ("system", SHOWN)
    talk = Conversation(chats, system="Be brief.")
    talk.say("Hello!", **SHORT)
    talk.stream("Where?", response_model=Trip, **SHORT).consume(lambda _: None)
    assert prompted(chats)[0] == ("system", f"Be brief.\n\n{SHOWN}")
    assert talk.messages[0] == {"role": "system", "content": "Be brief."}


def test_an_async_chat_shows_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chat does."""
    scripted(monkeypatch, WHERE)

    async def main(chats: FakeAsyncChats) -> None:
        await chats.chat(HELLO, response_model=Trip)
        turn, _ = chats._formats.format.turns[-1]
        assert turn.messages[0] == {"role": "system", "content": SHOWN}

    run_async(main)


def test_a_keyword_of_a_chat_that_is_none_counts_as_left_out(chats: FakeChats) -> None:
    """All of them at once, in `chat` and in `stream_chat`."""
    nothing = dict.fromkeys([*CHAT_NAMES, *FIELDS, *OPTION_NAMES])
    del nothing["max_tokens"]
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    assert chats.chat(HELLO, params, progress=None, **nothing).content == chats.chat(HELLO, params).content
    assert chats.stream_chat(HELLO, params, request_index=None, **nothing).request_index == 0  # type: ignore[arg-type]


def test_conversations_of_a_list_have_params_of_their_own(chats: FakeChats) -> None:
    """None: the defaults; keywords change all of them. Another length, or an entry of another type, is refused."""
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)]
    asynchronous: list[Any] = []

    async def main(async_chats: FakeAsyncChats) -> None:
        asynchronous.extend(await async_chats.chat([HELLO, HELLO], params, ignore_eos=True))

    run_async(main)
    for replies in (chats.chat([HELLO, HELLO], params, ignore_eos=True), asynchronous):
        assert [len(reply.choices[0].token_ids) for reply in replies] == [2, 5]
    short = chats.chat([HELLO, HELLO], [None, SamplingParams(max_tokens=5)], max_tokens=3, ignore_eos=True)
    assert [len(reply.choices[0].token_ids) for reply in short] == [3, 3]
    with pytest.raises(InvalidParams, match="params must have an entry for each of the 3 prompts, not 2"):
        chats.chat([HELLO] * 3, params)
    with pytest.raises(InvalidType, match=r"params\[1\] must be SamplingParams, not int"):
        chats.chat([HELLO] * 2, [None, 5])  # type: ignore[list-item]
