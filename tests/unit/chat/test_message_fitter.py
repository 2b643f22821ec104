"""Which rewrites a template needs, on templates that are Python functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.growth import LINEAR, growth

from paceline.chat import message_fitter
from paceline.chat import message_rewrites as rewrites
from paceline.chat.message_fitter import TOOL_MARK, MessageFitter
from paceline.chat.message_rewrites import Message
from paceline.errors import TemplateError


class Template:
    """Renders messages by a function, and counts how often."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self.num_rendered = 0
        self._render = render

    def __call__(self, messages: list[Message]) -> Any:
        self.num_rendered += 1
        return SimpleNamespace(parts=[(self._render(messages), True)])


def plain(messages: list[Message]) -> str:
    return "".join(f"[{message['role']}]{message['content']}" for message in messages)


def refusing(words: str) -> str:
    raise TemplateError(f"the chat template refuses this conversation: {words}")


def one_system(messages: list[Message]) -> str:
    """Render as Qwen 3.5 does."""
    late = any(message["role"] == "system" for message in messages[1:])
    return refusing("System message must be at the beginning.") if late else plain(messages)


def rendered(fitter: MessageFitter, template: Template, messages: list[Message], **options: Any) -> str:
    found = fitter.render(messages, (), template, template, **options)
    return "".join(text for text, _ in found.parts)


SYSTEM, USER, REPLY = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))


def test_a_conversation_that_is_whole_is_rendered_once() -> None:
    """And so is every later conversation of its shape, with other texts and more of the same turns."""
    fitter, template = MessageFitter(), Template(plain)
    assert rendered(fitter, template, [SYSTEM, USER, REPLY, USER]) == "[system]s[user]u[assistant]a[user]u"
    rendered(fitter, template, [SYSTEM, {**USER, "content": "x"}, REPLY, USER])
    assert template.num_rendered == 2
    for turns in range(1, 30):
        before = template.num_rendered
        rendered(fitter, template, [SYSTEM, *[USER, REPLY] * turns])
        assert template.num_rendered == before + 1
    assert len(fitter._kept) == 3


def test_a_refused_conversation_is_rewritten_and_its_shape_kept() -> None:
    """Only the first time are there probes."""
    fitter, template = MessageFitter(), Template(one_system)
    wanted = "[system]s[user]u\n\ns[assistant]a"
    assert rendered(fitter, template, [SYSTEM, USER, SYSTEM, REPLY]) == wanted
    num_first = template.num_rendered
    assert num_first > 3
    assert rendered(fitter, template, [SYSTEM, USER, SYSTEM, REPLY]) == wanted
    assert template.num_rendered == num_first + 1
    assert rendered(fitter, template, [SYSTEM, USER, REPLY]) == "[system]s[user]u[assistant]a"


def test_later_turns_of_an_irregular_conversation_need_no_probes() -> None:
    """Each new shape takes one rendering more if the same kinds of messages were neighbours before."""
    fitter, template = MessageFitter(), Template(one_system)
    thought = {**REPLY, "reasoning_content": "hm"}
    talk, numbers = [SYSTEM, USER, SYSTEM], []
    for index in range(40):
        talk += [thought if index.bit_count() % 2 else REPLY, {**USER, "content": str(index)}]
        before = template.num_rendered
        assert rendered(fitter, template, talk).endswith(f"[user]{index}")
        numbers.append(template.num_rendered - before)
    assert numbers[-30:] == [1] * 30
    assert len(fitter._kept) < 50


def test_a_refusal_that_no_rewrite_avoids_is_raised() -> None:
    """As the template has it, and every time."""
    fitter = MessageFitter()
    template = Template(lambda messages: plain(messages) if len(messages) == 1 else refusing("one message"))
    for _ in range(2):
        with pytest.raises(TemplateError, match="refuses this conversation: one message"):
            rendered(fitter, template, [USER, REPLY, USER])


def test_probes_end_at_a_limit_of_the_template() -> None:
    """A template that exceeds its limits is not tried hundreds of times."""

    def slow(messages: list[Message]) -> str:
        if len(messages) > 1:
            raise TemplateError("the chat template takes more than 5 s")
        return plain(messages)

    template = Template(slow)
    with pytest.raises(TemplateError, match="takes more than 5 s"):
        rendered(MessageFitter(), template, [USER, REPLY, USER, USER])
    assert template.num_rendered < 6


def test_long_irregular_conversations_have_few_probes() -> None:
    """Their number falls with the length of the probed conversation."""
    numbers = []
    for length in (10, 400):
        talk = [{"role": "user", "content": [{"type": "text", "text": "x"}] * (index % 3)} for index in range(length)]
        irregular = [item for index, item in enumerate(talk) if index.bit_count() % 2]
        template = Template(lambda messages: plain(messages) if len(messages) == 1 else refusing("no"))
        with pytest.raises(TemplateError, match="no"):
            rendered(MessageFitter(), template, [*irregular, REPLY, USER, USER])
        numbers.append(template.num_rendered)
    assert numbers[1] < 60


def test_a_template_that_shows_no_user_is_left_alone() -> None:
    """Nothing could be found in its prompts."""
    template = Template(lambda messages: str(len(messages)))
    assert rendered(MessageFitter(), template, [USER, REPLY]) == "2"


def test_texts_that_a_template_respells_are_not_lost() -> None:
    """A probe finds that nothing is missing, and the prompt is the first one."""
    template = Template(lambda messages: plain(messages).replace("u", "\\u0075"))
    fitter = MessageFitter()
    assert rendered(fitter, template, [USER, REPLY]) == "[\\u0075ser]\\u0075[assistant]a"
    before = template.num_rendered
    rendered(fitter, template, [USER, REPLY])
    assert template.num_rendered == before + 1


def tagged(messages: list[Message]) -> str:
    """Render calls with a tag for each argument, as Qwen3-Coder does."""
    calls = (call["function"] for message in messages for call in message.get("tool_calls", ()))
    texts = (f"<{key}>{value}" for call in calls for key, value in [("call", call["name"]), *call["arguments"].items()])
    return plain(messages) + "".join(texts)


@pytest.mark.parametrize(("num_calls", "num_arguments"), [(1, 60_000), (16_000, 6)])
def test_arguments_are_found_in_linear_time(num_calls: int, num_arguments: int) -> None:
    """A prompt that is sought through for each argument or call would take many seconds."""

    def render(size: int) -> None:
        """Render so many arguments in one call, or so many calls."""
        num_each = size if num_calls == 1 else num_arguments
        arguments = {f"k{number}": f"value {number}" for number in range(num_each)}
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        calls = [{"role": "assistant", "content": "", "tool_calls": [call]}] * (1 if num_calls == 1 else size)
        template = Template(tagged)
        assert rendered(MessageFitter(), template, [USER, *calls]).endswith(f"value {num_each - 1}")
        assert template.num_rendered == 1

    assert growth(render, max(num_calls, num_arguments)) < LINEAR


def test_arguments_that_are_missing_are_a_loss() -> None:
    """Each value of an object counts, and the text of arguments that are no object."""
    for arguments in ({"x": "one", "y": "two"}, "{broken", ["item"]):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        template = Template(lambda messages: plain(messages) + "f one" * any("tool_calls" in each for each in messages))
        found = rendered(MessageFitter(), template, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
        spelt = arguments if isinstance(arguments, str) else json.dumps(arguments)
        assert found == f"[user]u[assistant]Call of the tool f: {spelt}"


def test_a_list_in_place_of_texts_is_a_loss() -> None:
    """As a template prints parts that it does not know; a text of the user may spell the same."""
    parts = [{"type": "text", "text": "u"}]
    fitter, template = MessageFitter(), Template(plain)
    assert rendered(fitter, template, [{"role": "user", "content": parts}]) == "[user]u"
    assert rendered(fitter, template, [{"role": "user", "content": str(parts)}]) == f"[user]{parts}"


def with_tools_before_a_text(messages: list[Message]) -> str:
    """Render as Mistral Small 3.2 does: the tools stand before the last message of the user if its content is a text."""
    tools = f"[{TOOL_MARK}]" if messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str) else ""
    texts = (rewrites.joined_text(message["content"]) for message in messages)
    return tools + "".join(texts)


def test_tools_that_are_missing_are_a_loss() -> None:
    """Even if a text has the tool's name. A request without tools keeps its prompt."""
    parts = {"role": "user", "content": [{"type": "text", "text": "run "}, {"type": "text", "text": TOOL_MARK}]}
    fitter, template = MessageFitter(), Template(with_tools_before_a_text)
    for _ in range(2):
        assert rendered(fitter, template, [parts], has_tools=True) == f"[{TOOL_MARK}]run \n{TOOL_MARK}"
    assert rendered(MessageFitter(), template, [parts]) == f"run \n{TOOL_MARK}"


def test_tools_are_sought_once_for_turns_with_the_same_neighbours() -> None:
    """Later turns of an irregular conversation are rendered once, as without tools."""
    fitter, template = MessageFitter(), Template(lambda messages: TOOL_MARK + plain(messages))
    thought = {**REPLY, "reasoning_content": "hm"}
    talk, numbers = [SYSTEM, USER], []
    for index in range(40):
        talk += [thought if index.bit_count() % 2 else REPLY, USER]
        before = template.num_rendered
        rendered(fitter, template, talk, has_tools=True)
        numbers.append(template.num_rendered - before)
    assert numbers[0] == 3
    assert numbers[-30:] == [1] * 30


@pytest.mark.parametrize(
    ("tools", "num_rendered"), [("", 2), (TOOL_MARK, None)], ids=["never shown", "shown before one message"]
)
def test_tools_that_no_rewrite_shows_refuse_nothing(tools: str, num_rendered: int | None) -> None:
    """The conversation gets the mildest rewrites with all of its texts."""

    def render(messages: list[Message]) -> str:
        return (tools if len(messages) == 1 else "") + one_system(messages)

    fitter, template = MessageFitter(), Template(render)
    assert (
        rendered(fitter, template, [SYSTEM, USER, REPLY, USER], has_tools=True) == "[system]s[user]u[assistant]a[user]u"
    )
    assert num_rendered in (None, template.num_rendered)
    wanted = "[system]s[user]u\n\ns[assistant]a"
    assert rendered(fitter, template, [SYSTEM, USER, SYSTEM, REPLY], has_tools=True) == wanted


def test_places_in_errors_match_the_caller() -> None:
    """Messages that were merged into the first one count."""
    template = Template(lambda messages: plain([message for message in messages if message["role"] != "assistant"]))
    for num_merged in (0, 2):
        with pytest.raises(
            TemplateError, match=rf"messages\[{2 + num_merged}\]: the chat template leaves this message out"
        ):
            rendered(MessageFitter(), template, [SYSTEM, USER, REPLY], num_merged=num_merged)


def test_shapes_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(message_fitter, "_MAX_KEPT", 4)
    fitter, template = MessageFitter(), Template(plain)
    for number in range(10):
        rendered(fitter, template, [{**USER, "role": f"role{number}"}])
    assert len(fitter._kept) == 4
