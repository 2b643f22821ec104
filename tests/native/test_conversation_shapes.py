"""Conversations of every shape in every template of the pinned llama.cpp: no text of theirs is missing from the prompt."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from tests.native.chat_templates import CHATML, TURNS, Messages, demo
from tests.sweeps import sampled

from paceline.chat import ChatFormat, ChatOptions
from paceline.chat.conversation import OmittedAttachment, next_turn
from paceline.chat.message_fitter import MessageFitter
from paceline.errors import InvalidParams, TemplateError
from paceline.server.request_media import known_attachment

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "offered_tool"}},  # which no message calls
]
# Templates that show no tools, with any conversation.
WITHOUT_TOOLS = {
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "fireworks-ai-llama-3-firefunction-v2",
}
KWARGS = {"date_string": "1 May 2026", "datetime": "May 1 2026"}
MARK = re.compile(r"mark\d+k")
PART_SPELLING = re.compile(r"""['"]type['"]\s*:\s*['"]text['"]""")


def mark(number: int) -> str:
    return f"mark{number}k"


def message(role: str, *numbers: int, **members: Any) -> dict[str, Any]:
    """Return a message with a text for one number, and with parts for several."""
    texts = [{"type": "text", "text": mark(number)} for number in numbers]
    content: Any = texts if len(texts) > 1 else texts[0]["text"] if texts else ""
    return {"role": role, "content": content, **members}


def parts(role: str, *numbers: int) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": mark(number)} for number in numbers]}


def call(number: int, call_id: str | None = None, arguments: str | None = None) -> dict[str, Any]:
    """Return a call with a mark in its argument."""
    spelt = json.dumps({"command": mark(number)}) if arguments is None else arguments
    made: dict[str, Any] = {"type": "function", "function": {"name": "bash", "arguments": spelt}}
    return made if call_id == "" else {**made, "id": call_id or f"call_{number}"}


def result(number: int, of: int | str, **members: Any) -> dict[str, Any]:
    """Return the result of the call with that number, or that id."""
    return {
        **message("tool", number),
        "tool_call_id": f"call_{of}" if isinstance(of, int) else of,
        "name": "bash",
        **members,
    }


SYSTEM, USER, REPLY = message("system", 1), message("user", 2), message("assistant", 3)
CALL = message("assistant", tool_calls=[call(4)])
PLACEHOLDER = {"role": "user", "content": [OmittedAttachment("image", "x"), {"type": "text", "text": mark(9)}]}

SHAPES: dict[str, Messages] = {
    "plain": [SYSTEM, USER, REPLY, message("user", 4)],
    "several system parts": [message("system", 1, 5, 6), USER],
    "two system messages": [SYSTEM, message("system", 5), USER],
    "system and developer": [SYSTEM, message("developer", 5), USER],
    "developer in parts": [message("developer", 1, 5), USER],
    "system after the user": [SYSTEM, USER, message("system", 5), REPLY, message("user", 6)],
    "system before the user": [SYSTEM, USER, REPLY, message("system", 5), message("user", 6)],
    "system at the end": [SYSTEM, USER, message("system", 5)],
    "system in the middle alone": [USER, REPLY, message("system", 5), message("user", 6)],
    "system among results": [USER, CALL, message("system", 5), result(6, 4), message("user", 7)],
    "parts of everybody": [message("user", 1, 5), message("assistant", 3, 6), message("user", 7)],
    "two of the user": [SYSTEM, USER, message("user", 5), REPLY, message("user", 6), message("user", 7)],
    "two of the assistant": [USER, REPLY, message("assistant", 5), message("user", 6)],
    "assistant first": [REPLY, USER],
    "empty first": [message("user"), message("assistant", 3), message("user", 5)],
    "text and call": [SYSTEM, USER, {**CALL, "content": mark(5)}, result(6, 4)],
    "text and call earlier": [SYSTEM, USER, {**CALL, "content": mark(5)}, result(6, 4), REPLY, message("user", 7)],
    "thinking and call": [USER, {**CALL, "content": mark(5), "reasoning_content": "hm"}, result(6, 4)],
    "several calls": [USER, message("assistant", tool_calls=[call(4), call(5)]), result(6, 4), result(7, 5)],
    "results in another order": [USER, message("assistant", tool_calls=[call(4), call(5)]), result(6, 5), result(7, 4)],
    "calls in a row": [USER, CALL, result(5, 4), message("assistant", tool_calls=[call(6)]), result(7, 6)],
    "result in parts": [USER, CALL, {**message("tool", 5, 6), "tool_call_id": "call_4"}],
    "user after a result": [USER, CALL, result(5, 4), message("user", 6)],
    "call without result": [USER, CALL, message("user", 5)],
    "result without call": [USER, REPLY, result(5, 9), message("user", 6)],
    "result without call first": [result(5, 9), USER],
    "result without call alone": [result(5, 9)],
    "ids of nothing": [USER, message("assistant", tool_calls=[call(4, "")]), message("tool", 5)],
    "ids twice": [
        USER,
        message("assistant", tool_calls=[call(4, "a")]),
        result(5, "a"),
        message("assistant", tool_calls=[call(6, "a")]),
        result(7, "a"),
    ],
    "short ids": [USER, message("assistant", tool_calls=[call(4, "abcdefgh1")]), result(5, "abcdefgh1")],
    "broken arguments": [
        USER,
        message("assistant", tool_calls=[call(4, arguments='{"command": "mark4k')]),
        result(5, 4),
    ],
    "arguments of a list": [USER, message("assistant", tool_calls=[call(4, arguments='["mark4k"]')]), result(5, 4)],
    "an image": [PLACEHOLDER, REPLY, USER],
    "an image of a tool": [USER, CALL, {**PLACEHOLDER, "role": "tool", "tool_call_id": "call_4"}],
    "Claude Code": [message("system", 1, 5, 6), parts("user", 2, 7), message("system", 8), CALL, result(9, 4)],
    "Codex": [
        parts("developer", 1),
        message("developer", 5, 6),
        parts("user", 2),
        parts("user", 7),
        CALL,
        {**result(9, 4), "content": [{"type": "text", "text": mark(9)}]},
    ],
    "opencode": [SYSTEM, USER, {**CALL, "content": mark(5)}, result(6, 4), message("user", 7), message("user", 8)],
    "system alone": [SYSTEM],
}

EXCEPTIONS = {
    # The error says so: there is no message that could take the text.
    ("google-gemma-2-2b-it", "system alone"): "has no system messages, and there is no other message"
}


@cache
def templates(source: Path) -> dict[str, ChatFormat]:
    """Return the formats of all templates; their caches of earlier conversations change no later conversation."""
    paths = sorted((source / "models" / "templates").glob("*.jinja"))
    assert len(paths) == 70
    return {path.stem: ChatFormat(demo(), path.read_text()) for path in paths}


def options_of(chat: ChatFormat) -> Iterator[ChatOptions]:
    """Yield the options without tools, and with them if the template has any."""
    yield ChatOptions(kwargs=KWARGS)
    if chat.capabilities["supports_tools"] or chat.capabilities["supports_tool_calls"]:
        yield ChatOptions(kwargs=KWARGS, tools=TOOLS)


def rendered(chat: ChatFormat, messages: Messages, options: ChatOptions) -> str:
    """Return the prompt of a conversation, or the error."""
    try:
        return chat.render_turn(next_turn(messages, read_part=known_attachment), options).text
    except TemplateError as error:
        return f"TemplateError: {error}"


def missing(messages: Messages, text: str) -> list[str]:
    """Return the marks of messages that a prompt does not have, and spellings of Python lists."""
    marks = sorted(set(MARK.findall(str(messages))))
    return [each for each in marks if each not in text] + PART_SPELLING.findall(text)


def missing_tools(template: str, options: ChatOptions, text: str) -> list[str]:
    """Return the name of the offered tool if a prompt does not have it, and templates that show it against the list."""
    is_shown = "offered_tool" in text
    if template in WITHOUT_TOOLS:
        return ["an exception that is none"] * is_shown
    return [] if is_shown or options.tools is None else ["offered_tool"]


@pytest.mark.parametrize("shape", sampled(SHAPES, every=4))
def test_nothing_of_a_conversation_is_missing_from_its_prompt(llama_cpp_source: Path, shape: str) -> None:
    """In every template, without tools and with tools, which are shown too; exceptions are listed with their errors."""
    messages, wrong = SHAPES[shape], {}
    for name, chat in templates(llama_cpp_source).items():
        for options in options_of(chat):
            text = rendered(chat, messages, options)
            expected = EXCEPTIONS.get((name, shape))
            if expected is not None:
                assert expected in text
            elif lost := missing(messages, text) + missing_tools(name, options, text):
                wrong[name] = (lost, text[:200])
    assert wrong == {}


@pytest.mark.parametrize("every", sampled([8, 1], every=2))
def test_conversations_that_were_whole_are_rendered_as_they_are(
    llama_cpp_source: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The bytes equal the template's own rendering, so that cached prefixes and llama-server's prompts stay the same."""

    def unfitted(self: MessageFitter, messages: Any, options: Any, apply: Any, *_: Any, **__: Any) -> Any:
        return apply(messages)

    num_same, num_other = 0, 0
    for name, chat in list(templates(llama_cpp_source).items())[::every]:
        for (shape, messages), options in product(SHAPES.items(), options_of(chat)):
            text = rendered(chat, messages, options)
            with monkeypatch.context() as patch:
                patch.setattr(MessageFitter, "render", unfitted)
                alone = rendered(chat, messages, options)
            if missing(messages, alone) or missing_tools(name, options, alone):
                num_other += 1
            else:
                assert text == alone, (name, shape)
                num_same += 1
    assert num_same > 3600 // every * 0.8
    assert num_other > 600 // every * 0.5


def test_the_prompt_of_a_growing_conversation_begins_as_before(llama_cpp_source: Path) -> None:
    """Rewrites change a message in the same way in every later turn, so that its prefix stays cached."""
    turns: Messages = [
        message("system", 1, 2),
        message("user", 3),
        message("system", 4),
        {**message("assistant", 5, tool_calls=[call(6)]), "content": "text"},
        result(7, 6),
        message("assistant", tool_calls=[call(8), call(9)]),
        result(10, 8),
        result(11, 9),
        message("assistant", tool_calls=[call(12)]),
        result(13, 12),
    ]
    ends = (3, 5, 8, 10)
    for name in (
        "Qwen3.5-4B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen3-Coder",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "unsloth-mistral-Devstral-Small-2507",
        "meta-llama-Llama-3.1-8B-Instruct",
        "LFM2-8B-A1B",
        "openai-gpt-oss-120b",
    ):
        chat = templates(llama_cpp_source)[name]
        prompts = [chat.render(turns[:end], add_generation_prompt=False, kwargs=KWARGS).text for end in ends]
        for before, after in pairwise(prompts):
            assert after.startswith(before.rstrip()), name


def random_conversation(rng: random.Random) -> Messages:
    """Return up to nine messages of any roles, contents, calls, ids and results."""
    numbers, open_ids, messages = iter(range(1, 1000)), list[str](), []
    for _ in range(rng.randint(1, 9)):
        role = rng.choice(["system", "developer", "user", "user", "assistant", "calls", "calls", "tool", "tool"])
        made = message(role, *(next(numbers) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))))
        if role == "calls":
            ids = [rng.choice(["", f"call_{next(numbers)}", f"{next(numbers):09}"]) for _ in range(rng.randint(1, 3))]
            kinds = (None, "{}", f'{{"a": "{mark(next(numbers))}', f'["{mark(next(numbers))}"]')
            calls = [call(next(numbers), call_id, rng.choice(kinds)) for call_id in ids]
            made |= {"role": "assistant", "tool_calls": calls}
            open_ids = [call_id for call_id in ids if call_id]
        if role == "tool" and rng.random() < 0.8:
            made["tool_call_id"] = open_ids.pop(0) if open_ids and rng.random() < 0.8 else "gone"
        if made["role"] == "assistant" and rng.random() < 0.2:
            made["reasoning_content"] = "hm"
        messages.append(made)
    return messages


@pytest.mark.parametrize("num_conversations", sampled([1, 6], every=2))
def test_nothing_of_any_conversation_is_missing_from_its_prompt(llama_cpp_source: Path, num_conversations: int) -> None:
    """Random conversations in every template; gemma 2 refuses a system message alone."""
    rng, wrong = random.Random(5), []
    for name, chat in templates(llama_cpp_source).items():
        for number in range(num_conversations):
            messages = random_conversation(rng)
            *_, options = options_of(chat)
            chosen = options if number % 2 else ChatOptions(kwargs=KWARGS)
            text = rendered(chat, messages, chosen)
            lost = missing(messages, text) + missing_tools(name, chosen, text)
            if lost and "there is no other message" not in text:
                wrong.append((name, messages, text[:200]))
    assert wrong == []


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("User", r"messages\[2\]\.role: this model's chat template has no role 'User'; did you mean 'user'\?"),
        ("human", "did you mean 'user'"),
        ("model", "did you mean 'assistant'"),
        ("xyz", "use one of 'system', 'developer', 'user', 'assistant', 'tool', 'function'"),
    ],
)
def test_a_role_that_the_template_leaves_out_is_refused(llama_cpp_source: Path, role: str, words: str) -> None:
    """With its place and the nearest role. Templates that render any role take it, but for another case of a known role."""
    talk = [SYSTEM, message("system", 5), {**USER, "role": role}, message("user", 6)]
    source = (llama_cpp_source / "models" / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    chat = ChatFormat(demo(), source)
    for _ in range(2):  # also when the shape is known
        with pytest.raises(InvalidParams, match=words):
            chat.render(talk)
    verbatim = ChatFormat(demo(), CHATML)
    if role == "User":
        with pytest.raises(InvalidParams, match=words):
            verbatim.render(talk)
    else:
        assert f"<|im_start|>{role}\n{mark(2)}" in verbatim.render(talk).text


@pytest.mark.parametrize("role", ["USER", "System", "Assistant", "Tool", "Developer"])
def test_another_case_of_a_role_is_refused_by_templates_that_tell_them_apart(role: str) -> None:
    """Also if the template renders any role. A template that ignores the case takes it."""
    talk = [message("user", 1), message(role, 2), message("user", 3)]
    for _ in range(2):
        with pytest.raises(InvalidParams, match=rf"messages\[1\]\.role: .*{role!r}; did you mean {role.lower()!r}\?"):
            ChatFormat(demo(), CHATML).render(talk)
    lower = ChatFormat(demo(), CHATML.replace("message.role", "message.role | lower"))
    assert f"<|im_start|>{role.lower()}\n{mark(2)}" in lower.render(talk).text


@pytest.mark.parametrize(("role", "near"), [("human", "user"), ("Human", "user"), ("bot", "assistant")])
def test_a_refusal_of_a_conversation_names_a_role_that_is_none_of_the_known(role: str, near: str) -> None:
    """In place of the template's words about roles that alternate."""
    with pytest.raises(InvalidParams, match=rf"messages\[0\]\.role: .*refuses .*{role!r}; did you mean {near!r}\?"):
        ChatFormat(demo(), TURNS).render([message(role, 1)])


def test_a_role_with_blanks_is_refused_with_the_nearest_role() -> None:
    """It is no plain word."""
    with pytest.raises(InvalidParams, match=r"messages\[0\]\.role .*not ' System'; did you mean 'system'\?"):
        ChatFormat(demo(), CHATML).render([message(" System", 1)])
    with pytest.raises(InvalidParams, match=r"not ''$"):
        ChatFormat(demo(), CHATML).render([message("", 1)])


def test_a_message_without_a_trace_is_an_error() -> None:
    """A template that shows the last two messages alone loses the others silently, if nobody says so."""
    chat = ChatFormat(demo(), "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert mark(2) in chat.render([USER, REPLY]).text
    with pytest.raises(TemplateError, match=r"messages\[0\]: the chat template leaves this message out"):
        chat.render([USER, REPLY, message("user", 4), message("assistant", 5), message("user", 6)])
