"""The world, the tool conversations and the chat form of the corpus."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import jinja2

import demo_model
from demo_model import chat_data, corpus, fmt, places, tools_data, world
from demo_model.fmt import Call, Chat, Message

TEMPLATE = Path(demo_model.__file__).with_name("chat_template.jinja")


def test_the_world_is_fixed() -> None:
    assert len(world.TABLE) == 30
    assert len({v.job for v in world.TABLE.values()}) == 30
    assert all(v.friend in world.TABLE and v.friend != v.name for v in world.TABLE.values())


def test_held_out_questions_are_never_in_the_corpus() -> None:
    held_out = {q.text for q in world.HELD_OUT}
    assert 150 < len(held_out) < 400
    assert not held_out & {q.text for q in world.TRAINING}
    for document in itertools.islice(corpus.documents(7), 1500):
        for segment in document:
            asked = segment.text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")
            assert asked not in held_out


def test_every_fact_is_in_the_corpus_in_some_phrasing() -> None:
    known = {(q.attribute, q.villager.name) for q in world.TRAINING}
    assert len(known) == 7 * 30


def test_held_out_sums_are_not_in_the_corpus() -> None:
    rng = random.Random(1)
    for _ in range(500):
        a, _, b = chat_data.sums(rng).answer.split(" = ")[0].partition(" + ")
        assert not chat_data.sum_held_out(int(a), int(b))


def test_the_thought_of_a_sum_is_right() -> None:
    e = chat_data.sum_of(27, 45, "?")
    assert e.think == "7 + 5 = 12. 2 + 4 + 1 = 7. So 72."
    assert e.answer == "27 + 45 = 72."


def test_tool_calls_use_an_offered_tool_and_its_parameters() -> None:
    rng = random.Random(2)
    for _ in range(300):
        chat, use = tools_data.tool_chat(rng)
        function: dict[str, Any] = next(t["function"] for t in chat.tools if t["function"]["name"] == use.call.name)
        assert list(use.call.arguments) == list(function["parameters"]["properties"]) or sorted(
            use.call.arguments
        ) == list(function["parameters"]["properties"])


def test_offered_tools_have_different_names() -> None:
    rng = random.Random(4)
    for _ in range(300):
        names = [t["function"]["name"] for t in tools_data.tool_chat(rng)[0].tools]
        assert len(set(names)) == len(names)


def test_held_out_cities_are_not_in_the_corpus_lists() -> None:
    assert not set(places.HELD_OUT_CITIES) & set(places.CITIES)


def test_only_the_assistant_is_learned() -> None:
    chat = Chat([Message("system", "S"), Message("user", "U"), Message("assistant", "A")])
    learned = [s.text for s in fmt.segments(chat) if s.learn]
    assert learned == ["A<|im_end|>"]


def _as_openai(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.think:
        out["reasoning_content"] = message.think
    if message.calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls
        ]
    return out


def _render(chat: Chat, **options: Any) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        messages=[_as_openai(m) for m in chat.messages], tools=chat.tools, **options
    )
    return text


def _tool_chats() -> list[Chat]:
    rng = random.Random(8)
    return [tools_data.tool_chat(rng, thinking=n % 3 == 0)[0] for n in range(30)]


def test_the_template_writes_what_the_corpus_has() -> None:
    for chat in _tool_chats():
        assert _render(chat) == "".join(s.text for s in fmt.segments(chat))


def test_the_template_opens_the_assistant_message() -> None:
    chat = Chat([Message("user", "Hi.")])
    for thinking in (False, True):
        rendered = _render(chat, add_generation_prompt=True, enable_thinking=thinking)
        assert rendered == fmt.prompt(chat, thinking)
    assert _render(chat, add_generation_prompt=True) == fmt.prompt(chat)


def test_two_results_share_one_turn() -> None:
    call = Call("f", {"x": 1})
    chat = Chat(
        [
            Message("user", "U"),
            Message("assistant", calls=(call, call)),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "A"),
        ]
    )
    text = "".join(s.text for s in fmt.segments(chat))
    assert text == _render(chat)
    assert "1\n</tool_response>\n<tool_response>\n2" in text


def test_a_rendered_reply_is_a_prefix_of_the_next_turn() -> None:
    first = [Message("user", "Hi.")]
    replied = [*first, Message("assistant", "Hello!"), Message("user", "Bye.")]
    assert fmt.prompt(Chat(replied)).startswith(fmt.prompt(Chat(first)) + "Hello!<|im_end|>\n")


def test_documents_of_one_seed_are_the_same() -> None:
    assert list(itertools.islice(corpus.documents(3), 50)) == list(itertools.islice(corpus.documents(3), 50))
