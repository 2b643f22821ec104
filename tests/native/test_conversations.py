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
from paceline.errors import InvalidParams, PromptTooLong, StateError

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
    """The prompt is that of the messages, and the cache serves what is the same."""
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
    """The next one goes on from where it was."""
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
    """From the same tokens."""
    talk = Conversation(llm, **GREEDY)
    talk.say("Tell me a story about a fox.")
    fork = talk.fork()
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


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", '{"paceline_conversation": 9}', "[" * 100_000, "\x00"],
)
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
