"""Conversations on the demo model: turns, token ids, forks, files."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncConversation, AsyncLLM, Conversation, FinishReason
from paceline.errors import InvalidParams, InvalidType, PromptTooLong, StateError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
KEEPING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPPING = KEEPING.replace("message.reasoning_content %}", "message.reasoning_content and loop.last %}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_slots=4, n_ctx=8192, n_threads=1) as made:
        yield made


def weather(city: str) -> str:
    """Current weather of a city.

    Args:
        city: The city.
    """
    return "sunny, 20 degrees"


@pytest.mark.parametrize("template", [None, KEEPING])
def test_a_prompt_begins_with_the_tokens_of_the_turn_before(llm: LLM, template: str | None) -> None:
    """Prompt and generated tokens, so that nothing of them is computed again."""
    talk = Conversation(llm, "You tell stories.", chat_template=template, **GREEDY)
    for text in ("Tell me a story about a fox.", "Who is its friend?", "Thank you!"):
        before = talk.token_ids
        reply = talk.say(text)
        assert reply.prompt_token_ids[: len(before)] == before
        assert reply.usage.cached_tokens >= len(before) - 1
        assert talk.token_ids == (*reply.prompt_token_ids, *reply.choices[0].token_ids)
    assert [message["role"] for message in talk.messages] == ["system"] + ["user", "assistant"] * 3


def test_an_option_of_a_turn_that_is_none_is_that_of_the_conversation(llm: LLM) -> None:
    """It counts as left out; max_tokens=None is until the message ends or the context is full."""
    talk = Conversation(llm, messages=None, temperature=0, max_tokens=3)  # type: ignore[arg-type]
    assert len(talk.say("Hello.", temperature=None, stop=None).choices[0].token_ids) == 3
    assert len(talk.say("Hello.", max_tokens=None).choices[0].token_ids) > 3


def test_a_template_that_leaves_thinking_out_is_rendered_anew(llm: LLM) -> None:
    """The prompt is rendered from the messages, and the cache serves the common part."""
    talk = Conversation(llm, chat_template=DROPPING, **GREEDY)
    first = talk.say("Tell me a story about a fox.")
    assert first.reasoning_content
    second = talk.say("Thank you!")
    alone = llm.chat(second.messages[:-1], chat_template=DROPPING, **GREEDY)
    assert second.prompt_token_ids == alone.prompt_token_ids
    assert second.usage.cached_tokens > 0


def test_streamed_turns_are_turns(llm: LLM) -> None:
    """Added when the terminal chunk is read, also after cancel; a stream that is left changes nothing."""
    talk = Conversation(llm, **GREEDY)
    with talk.stream("Tell me a story about a fox.") as stream:
        with pytest.raises(InvalidParams, match="has not ended"):
            talk.say("Hello!")
        reply = stream.collect()
    assert talk.messages == reply.messages
    with talk.stream("And now?", max_tokens=None, ignore_eos=True) as left:
        left.get()
    assert talk.messages == reply.messages
    assert left.wait_released(30)
    stream = talk.stream("And then?", max_tokens=None, ignore_eos=True)
    stream.get()
    stream.cancel()
    cut = stream.collect()
    assert cut.finish_reason is FinishReason.CANCELLED
    assert talk.messages == cut.messages
    dropped = talk.stream("Hm?", max_tokens=None)
    del dropped
    gc.collect()
    assert talk.say("Bye!").content


def test_a_turn_that_fails_changes_nothing(llm: LLM) -> None:
    """The next turn goes on from the unchanged conversation."""
    talk = Conversation(llm, **GREEDY)
    talk.say("Hello! Who are you?")
    before = (talk.messages, talk.token_ids)
    with pytest.raises(InvalidParams):
        talk.say("\ud800")
    with pytest.raises(InvalidParams):
        talk.say("Hello!", temperature=-1)
    with pytest.raises(PromptTooLong):
        talk.stream("fox " * 5000)
    with pytest.raises(PromptTooLong):
        talk.say("fox " * 5000)
    assert (talk.messages, talk.token_ids) == before
    assert talk.say("Thank you!").content


def test_forks_go_on_by_themselves(llm: LLM) -> None:
    """From the same tokens, also those of a class with other parameters."""

    class Story(Conversation):
        def __init__(self, animal: str) -> None:
            super().__init__(llm, **GREEDY)
            self.animal = animal

    talk = Story("fox")
    talk.say(f"Tell me a story about a {talk.animal}.")
    fork = talk.fork()
    assert fork.animal == "fox"
    one, other = talk.say("Who is its friend?"), fork.say("Thank you!")
    assert one.messages[:2] == other.messages[:2]
    assert one.messages[2:] != other.messages[2:]
    assert other.usage.cached_tokens >= len(other.messages[1]["content"].split())


def test_the_last_turn_can_be_taken_back(llm: LLM) -> None:
    """With its text, to be said again; a system message stays when all is cleared."""
    talk = Conversation(llm, "You tell stories.", **GREEDY)
    assert talk.undo() is None
    first = talk.say("Tell me a story about a fox.")
    talk.say("Thank you!")
    assert talk.undo() == "Thank you!"
    assert talk.messages == first.messages
    assert talk.token_ids == (*first.prompt_token_ids, *first.choices[0].token_ids)
    assert talk.say("Thank you!").content
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "You tell stories."}]
    assert talk.undo() is None


def test_tools_of_a_conversation_run(llm: LLM) -> None:
    """Calls and results are part of it, and its tokens."""
    talk = Conversation(llm, tools=[weather], run_tools=True, temperature=0)
    reply = talk.say("What is the weather in Paris?")
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.token_ids == (*reply.prompt_token_ids, *reply.choices[0].token_ids)


def test_a_conversation_is_saved_and_loaded(llm: LLM, tmp_path: Path) -> None:
    """With its token ids, which another model's conversation does not use."""
    talk = Conversation(llm, **GREEDY)
    talk.say("Tell me a story about a fox.")
    path = tmp_path / "talk.json"
    talk.save(path)
    loaded = Conversation.load(llm, path, **GREEDY)
    assert (loaded.messages, loaded.token_ids) == (talk.messages, talk.token_ids)
    before = loaded.token_ids
    assert loaded.say("Thank you!").prompt_token_ids[: len(before)] == before
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"model": "00" * 16, "token_ids": [1] * len(before)}))
    other = Conversation.load(llm, path, **GREEDY)
    assert 1 not in other.say("Thank you!").prompt_token_ids[:3]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"paceline_conversation": 9}', "[" * 100_000, "\x00"])
def test_a_damaged_file_is_refused(llm: LLM, tmp_path: Path, text: str) -> None:
    """As a StateError that names it; a missing one as an OSError."""
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"talk\.json"):
        Conversation.load(llm, path)
    with pytest.raises(FileNotFoundError):
        Conversation.load(llm, tmp_path / "none.json")


def test_damaged_fields_are_refused(llm: LLM, tmp_path: Path) -> None:
    """Each by itself; the file that was saved can be loaded."""
    talk = Conversation(llm, messages=[{"role": "user", "content": "Hello!"}])
    path = tmp_path / "talk.json"
    talk.save(path)
    assert Conversation.load(llm, path).messages == talk.messages
    good = json.loads(path.read_text())
    for name, value in (
        ("messages", [{"role": 3}]),
        ("token_ids", ["x"]),
        ("token_ids", [-1]),
        ("text", 3),
        ("model", 3),
    ):
        path.write_text(json.dumps(good | {name: value}))
        with pytest.raises(StateError):
            Conversation.load(llm, path)


def test_an_event_loop_has_conversations() -> None:
    """Said, streamed, forked, loaded."""

    async def main(path: Path) -> None:
        async with AsyncLLM(num_slots=2, n_ctx=8192, n_threads=1) as llm:
            talk = AsyncConversation(llm, "You tell stories.", **GREEDY)
            first = await talk.say("Tell me a story about a fox.")
            async with talk.stream("Who is its friend?") as stream:
                reply = await stream.collect()
            assert talk.messages == reply.messages
            before = (*first.prompt_token_ids, *first.choices[0].token_ids)
            assert reply.prompt_token_ids[: len(before)] == before
            fork = talk.fork()
            assert (await fork.say("Thank you!")).content
            talk.save(path)
            assert AsyncConversation.load(llm, path).token_ids == talk.token_ids

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(main(Path(folder) / "talk.json"), 120))


LONG = "Please tell me a long story about a fox, an owl and the old king who lived in the wood. "


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    with LLM(num_slots=2, n_ctx=512, n_threads=1) as made:
        yield made


def fill(talk: Conversation, llm: LLM) -> int:
    """Say things until the context is full; return how many turns it took."""
    for count in range(1, 60):
        if talk.num_left_out:
            return count
        talk.say(LONG)
    raise AssertionError("the context did not become full")


def test_a_full_context_is_an_error_with_advice_that_works(small: LLM) -> None:
    """The message is not added; the error's advice works, and so does the conversation afterwards."""
    talk = Conversation(small, "You tell stories.", **GREEDY)
    with pytest.raises(PromptTooLong, match='context_overflow="drop_oldest"') as caught:
        for _ in range(60):
            talk.say(LONG)
    assert f"a larger n_ctx (at most {small.model.n_ctx_train})" in str(caught.value)
    assert "truncate" not in str(caught.value)  # it would cut the system message
    before = talk.messages
    assert before[-1]["role"] == "assistant"
    assert talk.say(LONG, context_overflow="drop_oldest").finish_reason is not None
    assert talk.messages[: len(before)] == before
    assert len(talk.messages) == len(before) + 2
    assert talk.num_left_out > 0
    talk.clear()
    assert talk.num_left_out == 0
    assert talk.say("Hello!").finish_reason is not None


def test_the_oldest_exchanges_are_left_out_of_a_full_context(small: LLM, tmp_path: Path) -> None:
    """The system message and the newest exchanges stay, the reply has room, and the conversation is whole."""
    talk = Conversation(small, "You tell stories.", context_overflow="drop_oldest", **GREEDY)
    num_turns = fill(talk, small)
    reply = talk.say("Thank you!")
    text = small.tokenizer.decode(reply.prompt_token_ids, special=True)
    assert "You tell stories." in text
    assert text.count(LONG.strip()) == num_turns - 1 - talk.num_left_out // 2
    assert talk.num_left_out % 2 == 0
    assert len(talk.messages) == 1 + 2 * num_turns
    assert talk.messages == reply.messages
    talk.save(tmp_path / "talk.json")
    loaded = Conversation.load(small, tmp_path / "talk.json", context_overflow="drop_oldest", **GREEDY)
    assert loaded.messages == talk.messages
    assert loaded.say("Hello!").finish_reason is not None


def test_a_full_context_is_not_emptied_at_every_turn(small: LLM) -> None:
    """Half of it is free then; later prompts begin with the tokens of the last prompt, and the system message stays cached."""
    talk = Conversation(small, LONG, context_overflow="drop_oldest", **GREEDY)
    fill(talk, small)
    left_out, before = talk.num_left_out, talk.token_ids
    assert len(before) <= 256 + 24
    reply = talk.say("Thank you!")
    assert talk.num_left_out == left_out
    assert reply.prompt_token_ids[: len(before)] == before
    system = len(small.tokenizer.encode(LONG))
    while talk.num_left_out == left_out:
        reply = talk.say(LONG)
    assert reply.usage.cached_tokens >= system


def test_room_is_kept_for_the_reply(small: LLM) -> None:
    """As many tokens as max_tokens, up to half of the context."""
    talk = Conversation(small, context_overflow="drop_oldest", temperature=0, max_tokens=200, ignore_eos=True)
    for _ in range(8):
        assert len(talk.say(LONG).choices[0].token_ids) == 200
    assert talk.num_left_out > 0


def test_calls_and_their_results_are_left_out_together(small: LLM) -> None:
    """An exchange goes as a whole, also in the middle of a list, and in `LLM.chat`."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    exchange = [
        {"role": "user", "content": "First: " + LONG},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    messages = [{"role": "system", "content": "You tell stories."}, *exchange * 9, {"role": "user", "content": "Bye!"}]
    with pytest.raises(PromptTooLong):
        small.chat(messages, **GREEDY)
    reply = small.chat(messages, context_overflow="drop_oldest", **GREEDY)
    text = small.tokenizer.decode(reply.prompt_token_ids, special=True)
    assert 0 < text.count("First:") < 9
    assert text.count("First:") == text.count("It is sunny.")
    assert "Bye!" in text
    assert len(reply.messages) == len(messages) + 1


def test_a_last_message_that_fills_the_context_alone_is_refused(small: LLM) -> None:
    """Nothing is left to leave out; the conversation is as it was."""
    talk = Conversation(small, context_overflow="drop_oldest", **GREEDY)
    talk.say("Hello!")
    before = talk.messages
    with pytest.raises(
        PromptTooLong, match="tokens\\); shorten the messages, or take a model that was trained for longer texts"
    ) as caught:
        talk.say(LONG * 60)
    assert "drop_oldest" not in str(caught.value)
    assert "truncate" not in str(caught.value)
    assert talk.messages == before
    assert talk.say("Hello!").finish_reason is not None


def test_undo_takes_back_what_was_left_out(small: LLM) -> None:
    """The turn that was taken back is as if it had not been."""
    talk = Conversation(small, context_overflow="drop_oldest", **GREEDY)
    fill(talk, small)
    assert talk.undo() == LONG
    assert talk.num_left_out == 0


def test_streams_and_async_conversations_leave_messages_out(small: LLM) -> None:
    """As `say` does."""

    async def run() -> None:
        async with AsyncLLM(num_slots=2, n_ctx=512, n_threads=1) as llm:
            talk = AsyncConversation(llm, "You tell stories.", context_overflow="drop_oldest", **GREEDY)
            for _ in range(12):
                await talk.say(LONG)
            assert talk.num_left_out > 0
            async with talk.stream(LONG) as stream:
                chunks = [chunk async for chunk in stream]
            assert chunks[-1].finish_reason is not None
            assert len(talk.messages) == 1 + 2 * 13

    asyncio.run(run())
    talk = Conversation(small, context_overflow="drop_oldest", **GREEDY)
    for _ in range(12):
        with talk.stream(LONG) as stream:
            stream.collect()
    assert talk.num_left_out > 0


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncate_is_refused_in_chats(small: LLM, side: str) -> None:
    """It would cut the system message or the question; the error names the option of chats, which refuses unknown words."""
    refused = (
        r'^truncate would cut the system message.*; context_overflow="drop_oldest" leaves the oldest messages out$'
    )
    options: dict[str, Any] = {"truncate": side}
    for call in (small.chat, small.stream_chat):
        with pytest.raises(InvalidParams, match=refused):
            call([{"role": "user", "content": "a"}], **options)
    with pytest.raises(InvalidParams, match=refused):
        Conversation(small).say("a", **options)
    with pytest.raises(InvalidParams, match=refused):
        Conversation(small, **options)
    with pytest.raises(InvalidParams, match="context_overflow"):
        small.chat([{"role": "user", "content": "a"}], context_overflow="drop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sytem": "x"}, "unknown option 'sytem'; did you mean 'system'?"),
        ({"temprature": 1}, "unknown option 'temprature'; did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature must be a finite number >= 0 and <= 1000000.0, not -1"),
        ({"interval": 0}, "interval must be an integer >= 1"),
        ({"max_tool_rounds": 2}, "max_tool_rounds has no effect without run_tools=True"),
    ],
)
def test_wrong_options_are_refused_before_the_first_turn(small: LLM, options: dict[str, Any], message: str) -> None:
    """At the constructor; valid options of streams are taken there."""
    for kind, llm in ((Conversation, small), (AsyncConversation, AsyncLLM())):
        with pytest.raises(InvalidParams) as refused:
            kind(llm, **options)  # type: ignore[arg-type]
        assert str(refused.value).startswith(message)
    Conversation(small, interval=3, max_tokens=1).stream("Hello!").close()


def test_a_conversation_names_the_class_for_the_other_engine(small: LLM) -> None:
    """And refuses anything else."""
    with pytest.raises(InvalidType, match="^llm must be an LLM, not AsyncLLM; an AsyncLLM takes an AsyncConversation$"):
        Conversation(AsyncLLM())  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="^llm must be an AsyncLLM, not LLM; an LLM takes a Conversation$"):
        AsyncConversation(small)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="^llm must be an LLM, not str"):
        Conversation("m.gguf")  # type: ignore[arg-type]
