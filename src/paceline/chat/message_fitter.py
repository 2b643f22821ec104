"""Renders conversations by a chat template so that none of their texts is lost, and no offered tools.

Most conversations are rendered as they are, and all of their texts are then found in the prompt. If the template refuses a
conversation, or a text is not found, probes show which rewrites the template needs: small conversations of the same shape with
marks as texts. The mildest rewrites under which every mark is in the prompt are kept for the shape.

Names of tools are no evidence in a prompt, because texts mention them. Probes therefore offer one tool with a mark as its name.

Any thread, several at once.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from paceline import validation
from paceline.chat import message_rewrites as rewrites
from paceline.chat.conversation import ROLES
from paceline.chat.message_rewrites import Message, Rewrite, attached_results, is_short_id, spelt_arguments
from paceline.errors import InvalidParams, TemplateError
from paceline.runtime.model import ChatPrompt

Apply: TypeAlias = Callable[[list[Message]], ChatPrompt]
"""Renders messages with the options of a request. Raises `TemplateError` if the template refuses them."""
Options: TypeAlias = tuple[Hashable, ...]
Plan: TypeAlias = tuple[Rewrite, ...]
Key: TypeAlias = tuple[Hashable, Collection[Hashable]]

# In the order in which they are applied, each with its cost. Plans are tried by the sum of their costs.
_COSTS: Mapping[Rewrite, int] = {
    rewrites.shorten_ids: 1,
    rewrites.split_calls: 1,
    rewrites.spell_lost_results: 2,
    rewrites.spell_calls: 9,
    rewrites.spell_results: 9,
    rewrites.part_text_from_calls: 2,
    rewrites.move_later_systems: 2,
    rewrites.move_first_system: 3,
    rewrites.join_result_parts: 1,
    rewrites.join_parts: 1,
    rewrites.drop_thoughts: 3,
    rewrites.merge_turns: 2,
    rewrites.alternate_turns: 4,
}
_MOST_REWRITES = 6  # of a plan
_BUDGET = 1 << 16  # of a search: messages that are rewritten, and 16 times those that are rendered
_RENDERING_COST = 16
_MAX_KEPT = 512
_MAX_LENGTH = 256  # of a key
_MAX_PERIOD = 4  # messages; a shape has two repetitions of a sequence that is as long or shorter
_MAX_CALLS = 3  # of a message in a shape
_NEAR = 256  # characters between the name of a call and its arguments
TOOL_MARK = "zqtoolqz"
"""Name of the tool that probes offer."""
_NEAREST_ROLES = {"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant"}
_PART_SPELLING = re.compile(r"""['"]type['"]\s*:\s*['"]text['"]""")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The facts about a message by which templates treat it.

    Attributes:
        role: Its role.
        num_parts: Number of text parts, at most 2; 0: no text; -1: the content is no list.
        has_thoughts: Whether it has thinking.
        calls: Of each of its first calls, the spelling of the id, and whether its arguments are a text.
        result_id: The spelling of a result's id; empty: the message is no result.
        is_attached: Whether a result comes right after its call.
        repeats_id: Whether an id of its calls, or the id of the result, is that of an earlier message of the role.
        has_name: Whether it has a name.
    """

    role: str
    num_parts: int
    has_thoughts: bool
    calls: tuple[tuple[str, bool], ...]
    result_id: str
    is_attached: bool
    repeats_id: bool
    has_name: bool


class MessageFitter:
    """Fits conversations to one chat template, and keeps the plans of the latest shapes.

    The plan of a shape is also tried first for other conversations in which the same kinds of messages are neighbours: the next
    turns of a long conversation, for example.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Any] = OrderedDict()

    def render(
        self,
        messages: list[Message],
        options: Options,
        apply: Apply,
        probe: Apply,
        num_merged: int = 0,
        *,
        has_tools: bool = False,
    ) -> ChatPrompt:
        """Render messages, with at most one leading system message (`message_rewrites.with_one_system`).

        Args:
            messages: The messages.
            options: The options of the request by which the template renders messages in another way.
            apply: Renders messages.
            probe: Renders messages with brief options of the same effect: the tool `TOOL_MARK` in place of all.
            num_merged: Number of messages that were merged into the first one; for places in errors.
            has_tools: Whether the request offers tools.

        Raises:
            InvalidParams: The template does not know the role of a message.
            TemplateError: The template refuses the conversation, or leaves out a message, under every plan.
        """
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and role.lower() in ROLES and not self._spells(role, options, probe):
                raise _unknown_role(role, index + num_merged if index else 0, "this model's chat template has no role")
        kinds = _kinds_of(messages)
        indices = _without_repetitions(kinds)
        shape = [kinds[index] for index in indices]
        key = (options, tuple(shape))
        plan: Plan | None = self._find(key)
        if plan is not None:
            return apply(_rewritten(messages, plan))
        neighbours = (options, frozenset(zip([None, *kinds], [*kinds, None], strict=True)))
        likely: Plan | None = self._find(neighbours)
        if likely:
            rewritten = _rewritten(messages, likely)
            prompt, _ = _attempt(apply, rewritten)
            if prompt is not None and _has_texts(prompt, rewritten):
                self._keep(key, likely)
                return prompt
        prompt, refusal = _attempt(apply, messages)
        needs_tools = has_tools and self._renders(("tools", options), [[_PLAIN]], probe, TOOL_MARK)
        if prompt is not None and _has_texts(prompt, messages):
            tools_key = ((*options, "tools"), neighbours[1])
            if not needs_tools or self._renders(tools_key, [_marked(shape)[0]], probe, TOOL_MARK):
                self._keep(key, ())
                return prompt
        places = [index + num_merged if index else 0 for index in indices]
        plan = self._search(shape, places, options, probe, needs_tools=needs_tools)
        self._keep(key, plan)
        if plan:
            self._keep(neighbours, plan)
            return apply(_rewritten(messages, plan))
        if prompt is None:
            raise refusal or TemplateError("the chat template renders nothing")
        return prompt

    def _search(
        self, shape: list[_Kind], places: list[int], options: Options, probe: Apply, *, needs_tools: bool
    ) -> Plan:
        """Return the mildest plan under which nothing, or nothing but the tools, is lost; no rewrites if there is none."""
        if not self._renders(("a user's text", options), [[_PLAIN]], probe):
            return ()  # a template of a special kind, which no rewrite helps
        for kind, place in zip(shape, places, strict=True):
            if kind.role not in ROLES:
                self._check_role(kind.role, place, options, probe)
        messages, marks = _marked(shape)
        plan = _mildest_plan(messages, marks, probe, needs_tools=needs_tools)
        if plan is not None:
            return plan
        everything = tuple(_COSTS)
        if _has_marks(_attempt(probe, _rewritten(messages, everything))[0], marks):
            return everything
        prompt, _ = _attempt(probe, messages)
        if prompt is not None:
            _check_traces(prompt, marks, places)
            return ()
        for kind, place in zip(shape, places, strict=True):
            if kind.role not in ROLES:  # such as a role that the template has, and refuses at this place
                raise _unknown_role(
                    kind.role, place, "this model's chat template refuses the conversation with the role"
                )
        return ()

    def _check_role(self, role: str, place: int, options: Options, probe: Apply) -> None:
        user, other = {"role": "user", "content": "x"}, {"role": role, "content": _mark(0)}
        reply = {"role": "assistant", "content": "y"}
        conversations = [[user, other], [other, user], [user, reply, other], [user, other, user]]
        if not self._renders((role, options), conversations, probe):
            raise _unknown_role(role, place, "this model's chat template has no role")

    def _spells(self, role: str, options: Options, probe: Apply) -> bool:
        """Return whether the template treats a role as it treats the same role in lower case."""
        key = (("spelling", role), options)
        found: bool | None = self._find(key)
        if found is None:
            user = {"role": "user", "content": "x"}
            shown = []
            for spelt in (role, role.lower()):
                other = {"role": spelt, "content": _mark(0)}
                prompts = (_attempt(probe, messages)[0] for messages in ([other, user], [user, other]))
                shown.append([prompt and _text_of(prompt) for prompt in prompts])
            found = shown[0] == shown[1]
            self._keep(key, found)
        return found

    def _renders(self, key: Key, conversations: list[list[Message]], probe: Apply, mark: str | None = None) -> bool:
        """Return whether the prompt of any of the conversations has a mark, by default the first one; kept under the key."""
        found: bool | None = self._find(key)
        if found is None:
            prompts = (_attempt(probe, messages)[0] for messages in conversations)
            wanted = mark or _mark(0)
            found = any(prompt is not None and wanted in _text_of(prompt) for prompt in prompts)
            self._keep(key, found)
        return found

    def _find(self, key: Key) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: Key, value: object) -> None:
        """Keep a value, unless its key is long: an irregular conversation of that length hardly comes again."""
        if len(key[1]) > _MAX_LENGTH:
            return
        with self._lock:
            self._kept[key] = value
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)


def _unknown_role(role: str, place: int, reason: str) -> InvalidParams:
    lower = role.lower()
    near = _NEAREST_ROLES.get(lower) or next(iter(validation.nearest_names(lower, ROLES)), None)
    hint = f"did you mean {near!r}?" if near else f"use one of {', '.join(map(repr, ROLES))}"
    return InvalidParams(f"messages[{place}].role: {reason} {role!r}; {hint}")


@cache
def _plans() -> tuple[Plan, ...]:
    plans = (plan for size in range(_MOST_REWRITES + 1) for plan in itertools.combinations(_COSTS, size))
    return tuple(sorted(plans, key=lambda plan: sum(map(_COSTS.__getitem__, plan))))


def _mildest_plan(
    messages: list[Message], marks: Sequence[Sequence[str]], probe: Apply, *, needs_tools: bool
) -> Plan | None:
    """Return the mildest plan under which a prompt has all marks, if possible with the tools; None if there is none."""
    budget, without_tools = _BUDGET, None
    for plan in _plans():
        budget -= len(messages)
        rewritten = _rewritten_in_full(messages, plan)
        if rewritten is None:
            continue
        prompt, refusal = _attempt(probe, rewritten)
        if prompt is not None and _has_marks(prompt, marks):
            if not needs_tools or TOOL_MARK in _text_of(prompt):
                return plan
            without_tools = plan if without_tools is None else without_tools
        budget -= len(messages) * _RENDERING_COST
        if budget < 0 or (refusal is not None and not _is_refusal(refusal)):
            break
    return without_tools


def _attempt(apply: Apply, messages: list[Message]) -> tuple[ChatPrompt | None, TemplateError | None]:
    try:
        return apply(messages), None
    except TemplateError as error:
        return None, error


def _is_refusal(error: TemplateError) -> bool:
    """Return whether the template refuses the messages or fails on them; other errors are of its limits."""
    return str(error).startswith(("the chat template refuses", "the chat template failed"))


def _text_of(prompt: ChatPrompt) -> str:
    return "".join(text for text, _ in prompt.parts)


def _rewritten(messages: list[Message], plan: Plan) -> list[Message]:
    for rewrite in plan:
        messages = rewrite(messages)
    return messages


def _rewritten_in_full(messages: list[Message], plan: Plan) -> list[Message] | None:
    """Return the rewritten messages; None if a rewrite changes nothing, so that a milder plan does the same."""
    for rewrite in plan:
        before, messages = messages, rewrite(messages)
        if messages == before:
            return None
    return messages


# ---- texts of a conversation in its prompt


def _has_texts(prompt: ChatPrompt, messages: Sequence[Message]) -> bool:
    """Return whether the texts of the messages are in a prompt, in order. False may be wrong: a template may respell texts."""
    text = _text_of(prompt)
    if _PART_SPELLING.search(text) and any(isinstance(message["content"], list) for message in messages):
        return False
    place = 0
    for message in messages:
        content = message["content"]
        for piece in [content] if isinstance(content, str) else [part["text"] for part in content]:
            place = _end_of(text, piece.strip(), place)
            if place < 0:
                return False
        for call in message.get("tool_calls", ()):
            place = _end_of(text, call["function"]["name"], place)
            if place < 0 or (place := _end_of_arguments(text, call["function"]["arguments"], place)) < 0:
                return False
    return True


def _end_of(text: str, piece: str, begin: int) -> int:
    found = text.find(piece, begin)
    return found if found < 0 else found + len(piece)


def _end_of_arguments(text: str, arguments: Any, begin: int) -> int:
    """Return the end of arguments in a text, of the whole or of each value in order; -1 if they are not found.

    The whole is sought near `begin` alone, so that the work grows with the length of the text and not with its square.
    """
    whole = spelt_arguments(arguments)
    found = text.find(whole, begin, begin + _NEAR + len(whole))
    if found >= 0:
        return found + len(whole)
    if not isinstance(arguments, Mapping):
        return -1
    for value in arguments.values():
        begin = _end_of(text, spelt_arguments(value), begin)
        if begin < 0:
            break
    return begin


# ---- shapes and marks


def _has_marks(prompt: ChatPrompt | None, marks: Sequence[Sequence[str]]) -> bool:
    """Return whether a prompt has all marks, and shows no list of parts in place of their texts."""
    if prompt is None:
        return False
    text = _text_of(prompt)
    return not _PART_SPELLING.search(text) and all(mark in text for of_message in marks for mark in of_message)


def _check_traces(prompt: ChatPrompt, marks: Sequence[Sequence[str]], places: Sequence[int]) -> None:
    text = _text_of(prompt)
    for of_message, place in zip(marks, places, strict=True):
        if of_message and not any(mark in text for mark in of_message):
            raise TemplateError(
                f"messages[{place}]: the chat template leaves this message out; leave it out yourself, or give another "
                "template"
            )


def _kinds_of(messages: Sequence[Message]) -> list[_Kind]:
    kinds, known = [], {"tool": set[str](), "assistant": set[str]()}
    for message, is_attached in zip(messages, attached_results(messages), strict=True):
        role, content, calls = message["role"], message["content"], message.get("tool_calls", ())
        ids = {message.get("tool_call_id", ""), *(call.get("id", "") for call in calls)} - {""}
        before = known.get(role, set())
        if isinstance(content, str):
            num_parts = -1 if content.strip() else 0
        else:
            num_parts = min(2, sum(1 for part in content if part["text"].strip()))
        kind = _Kind(
            role=role,
            num_parts=num_parts,
            has_thoughts=bool(message.get("reasoning_content")),
            calls=tuple(
                (_id_spelling(call.get("id")), isinstance(call["function"]["arguments"], str))
                for call in calls[:_MAX_CALLS]
            ),
            result_id=_id_spelling(message.get("tool_call_id")) if role == "tool" else "",
            is_attached=is_attached,
            repeats_id=not ids.isdisjoint(before),
            has_name="name" in message,
        )
        kinds.append(kind)
        before |= ids
    return kinds


def _id_spelling(value: str | None) -> str:
    return "none" if not value else "short" if is_short_id(value) else "other"


def _without_repetitions(kinds: Sequence[_Kind]) -> list[int]:
    """Return the indices of messages, without the third and later repetitions of a sequence of up to `_MAX_PERIOD`."""
    kept: list[int] = []
    for index in range(len(kinds)):
        kept.append(index)
        for period in range(1, _MAX_PERIOD + 1):
            tail = [kinds[number] for number in kept[-3 * period :]]
            if len(tail) == 3 * period and tail[:period] == tail[period : 2 * period] == tail[2 * period :]:
                del kept[-period:]
                break
    return kept


def _mark(number: int) -> str:
    return f"zq{number}qz"


_PLAIN: Message = {"role": "user", "content": _mark(0)}


def _marked(shape: Sequence[_Kind]) -> tuple[list[Message], list[list[str]]]:
    """Return a conversation of a shape, and the marks of each of its messages."""
    marks, messages = list[list[str]](), list[Message]()
    numbers = itertools.count(1)
    unanswered: Iterator[str] = iter(())
    num_ids, latest = 0, {"assistant": 0, "tool": 0}

    def mark() -> str:
        marks[-1].append(_mark(next(numbers)))
        return marks[-1][-1]

    for kind in shape:
        marks.append([])
        content: Any = [{"type": "text", "text": mark()} for _ in range(kind.num_parts)]
        if kind.num_parts <= 0:
            content = mark() if kind.num_parts else ""
        message: Message = {"role": kind.role, "content": content}
        if kind.has_thoughts:
            message["reasoning_content"] = "thoughts"
        if kind.has_name:
            message["name"] = "name"
        if kind.calls:
            number = latest["assistant"] = latest["assistant"] if kind.repeats_id else num_ids
            message["tool_calls"] = calls = list[dict[str, Any]]()
            for index, (id_spelling, is_text) in enumerate(kind.calls, number):
                name, arguments = mark(), {"argument": mark()}
                function = {"name": name, "arguments": json.dumps(arguments) if is_text else arguments}
                calls.append({"type": "function", "function": function})
                if id_spelling != "none":
                    calls[-1]["id"] = _id_of(id_spelling, index)
            num_ids += len(calls)
            unanswered = iter([call.get("id", "") for call in calls])
        elif kind.result_id and kind.result_id != "none":
            known = next(unanswered, "") if kind.is_attached else ""
            number = latest["tool"] = latest["tool"] if kind.repeats_id else num_ids
            message["tool_call_id"] = known or _id_of(kind.result_id, number)
            num_ids += 1
        messages.append(message)
    return messages, marks


def _id_of(spelling: str, number: int) -> str:
    return f"{number:09}" if spelling == "short" else f"call_{number:012}"
