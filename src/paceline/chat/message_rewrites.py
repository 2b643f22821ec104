"""Other arrangements of a conversation that lose no text, for chat templates that refuse or lose parts of it. Pure; any thread.

A rewrite takes the messages of a conversation, as `parse_messages` returns them, and returns other messages; it changes nothing
if the conversation has nothing of its kind. `message_fitter` selects rewrites by the prompts that the template renders.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from paceline.chat.conversation import MAX_ARGUMENTS_BYTES, MAX_ARGUMENTS_DEPTH
from paceline.chat.message_parts import checked_json
from paceline.errors import InvalidParams, TemplateError

Message: TypeAlias = dict[str, Any]
Rewrite: TypeAlias = Callable[[list[Message]], list[Message]]

SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"  # texts of two messages that become one
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def joined_text(content: str | Sequence[Mapping[str, str]], between: str = "\n") -> str:
    """Return the text of a content; parts are joined by line breaks."""
    return content if isinstance(content, str) else between.join(part["text"] for part in content)


def role_of(message: object) -> object:
    """Return a message's role; None for a malformed message, which is refused when it is parsed."""
    return message.get("role") if isinstance(message, Mapping) else None


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one leading system message, and every system content as one text."""
    rewritten = [
        {**message, "content": joined_text(message["content"])} if message["role"] in SYSTEM_ROLES else message
        for message in messages
    ]
    begin = num_leading_systems(messages)
    if begin < 2:
        return rewritten
    texts = [message["content"] for message in rewritten[:begin] if message["content"]]
    return [{**rewritten[0], "content": _BETWEEN.join(texts)}, *rewritten[begin:]]


def num_leading_systems(messages: Sequence[object]) -> int:
    """Return the number of system and developer messages at the beginning."""
    roles = map(role_of, messages)
    return next((index for index, role in enumerate(roles) if role not in SYSTEM_ROLES), len(messages))


def attached_results(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each message whether it is a tool's result right after the calls that it belongs to."""
    open_ids: set[str] | None = None  # of the calls before a row of results; None: there are none
    attached = []
    for message in messages:
        if message["role"] != "tool":
            calls = message.get("tool_calls")
            open_ids = {call.get("id", "") for call in calls} if calls else None
            attached.append(False)
        else:
            wanted = message.get("tool_call_id", "")
            attached.append(open_ids is not None and (not wanted or wanted in open_ids or "" in open_ids))
    return attached


def is_short_id(value: str | None) -> bool:
    """Return whether an id of a call is one that every template takes: nine letters and digits."""
    return value is not None and _SHORT_ID.fullmatch(value) is not None


# ---- rewrites


def join_parts(messages: list[Message]) -> list[Message]:
    """Make one text of the content of every message but results."""
    return [message if message["role"] == "tool" else _with_text(message) for message in messages]


def join_result_parts(messages: list[Message]) -> list[Message]:
    """Make one text of the content of every result."""
    return [_with_text(message) if message["role"] == "tool" else message for message in messages]


def shorten_ids(messages: list[Message]) -> list[Message]:
    """Give every call an id of its own, of nine letters and digits, and its result the same one.

    An id that has this form and comes for the first time stays. Others become the same in every conversation that begins alike.
    """
    rewritten: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # ids before and now
    taken: Counter[str] = Counter()
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            given = [call.get("id") or f"call {index} {number}" for number, call in enumerate(message["tool_calls"])]
            unanswered = [(call_id, _next_id(call_id, taken)) for call_id in given]
            calls = [{**call, "id": new} for call, (_, new) in zip(message["tool_calls"], unanswered, strict=True)]
            rewritten.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            wanted = message.get("tool_call_id")
            answered = next((ids for ids in unanswered if ids[0] == wanted), unanswered[0] if unanswered else None)
            if answered is not None:
                unanswered = [ids for ids in unanswered if ids is not answered]
            new = _next_id(wanted or f"result {index}", taken) if answered is None else answered[1]
            rewritten.append({**message, "tool_call_id": new})
        else:
            rewritten.append(message)
    return rewritten


def split_calls(messages: list[Message]) -> list[Message]:
    """Put each of several calls into a message of its own, with its result after it."""
    rewritten: list[Message] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            rewritten.append(message)
            continue
        results = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            shown = message if number == 0 else {"role": "assistant", "content": ""}
            rewritten.append({**shown, "tool_calls": [call]})
            result = _result_of(call, results)
            if result is not None:
                rewritten.append(result)
                results = [other for other in results if other is not result]
        rewritten += results
    return rewritten


def part_text_from_calls(messages: list[Message]) -> list[Message]:
    """Put the text beside calls into a message of its own before them."""
    rewritten: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and joined_text(message["content"]).strip():
            text = {name: value for name, value in message.items() if name != "tool_calls"}
            rewritten += [text, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
        else:
            rewritten.append(message)
    return rewritten


def move_later_systems(messages: list[Message]) -> list[Message]:
    """Put the texts of later system messages into the user's turn at their place, or make them messages of the user."""
    begin = num_leading_systems(messages)
    groups: list[list[Message]] = []  # each becomes one message
    pending: list[Message] = []  # system messages before a message of the user, or after results
    for message in messages[begin:]:
        if message["role"] in SYSTEM_ROLES:
            follows_user = bool(groups) and groups[-1][-1]["role"] in ("user", *SYSTEM_ROLES)
            (groups[-1] if follows_user else pending).append(message)
        elif message["role"] == "user":
            groups.append([*pending, message])
            pending = []
        else:
            if pending and message["role"] != "tool":
                groups.append(pending)
                pending = []
            groups.append([message])
    if pending:
        groups.append(pending)
    turns = []
    for group in groups:
        if len(group) == 1 and group[0]["role"] not in SYSTEM_ROLES:
            turns.append(group[0])
        else:  # a message of the user with the texts of system messages
            users = next((message for message in group if message["role"] == "user"), {"role": "user"})
            turns.append({**users, "content": _joined(*(joined_text(message["content"]) for message in group))})
    return [*messages[:begin], *turns]


def move_first_system(messages: list[Message]) -> list[Message]:
    """Put the text of the leading system message into the user's first message, or make it a message of the user."""
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return messages
    text, rest = joined_text(messages[0]["content"]), messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _joined(text, joined_text(rest[0]["content"]))}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def spell_lost_results(messages: list[Message]) -> list[Message]:
    """Make results without their calls texts of the user."""
    attached = zip(messages, attached_results(messages), strict=True)
    return [message if has_call else _with_spelt_result(message) for message, has_call in attached]


def spell_results(messages: list[Message]) -> list[Message]:
    """Make all results texts of the user."""
    return [*map(_with_spelt_result, messages)]


def spell_calls(messages: list[Message]) -> list[Message]:
    """Make all calls texts of the assistant."""
    rewritten = []
    for message in messages:
        functions = (call["function"] for call in message.get("tool_calls", ()))
        calls = [
            f"Call of the tool {function['name']}: {spelt_arguments(function['arguments'])}" for function in functions
        ]
        if calls:
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            rewritten.append({**others, "content": _joined(joined_text(message["content"]), "\n".join(calls))})
        else:
            rewritten.append(message)
    return rewritten


def drop_thoughts(messages: list[Message]) -> list[Message]:
    """Leave out the thinking of earlier messages."""
    return [{name: value for name, value in message.items() if name != "reasoning_content"} for message in messages]


def merge_turns(messages: list[Message]) -> list[Message]:
    """Merge consecutive messages of the user, and of the assistant. A message after calls is not merged with them."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        is_same = last is not None and last["role"] == message["role"] and message["role"] in ("user", "assistant")
        if last is None or not is_same or last.get("tool_calls"):
            runs.append([message])
        else:
            runs[-1].append(message)
    return [run[0] if len(run) == 1 else _merged(run) for run in runs]


def alternate_turns(messages: list[Message]) -> list[Message]:
    """Put empty messages between texts of the same role, so that user and assistant alternate and the user begins."""
    rewritten: list[Message] = []
    last = "assistant"
    for message in messages:
        role = message["role"]
        if role in ("user", "assistant") and not message.get("tool_calls"):
            if role == last:
                rewritten.append({"role": "user" if role == "assistant" else "assistant", "content": ""})
            last = role
        rewritten.append(message)
    return rewritten


def _with_text(message: Message) -> Message:
    return {**message, "content": joined_text(message["content"])}


def _merged(messages: Sequence[Message]) -> Message:
    merged: Message = {}
    for message in messages:
        merged |= message
    merged["content"] = _joined(*(joined_text(message["content"]) for message in messages))
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    return {**merged, "reasoning_content": _BETWEEN.join(thoughts)} if thoughts else merged


def _joined(*texts: str) -> str:
    return _BETWEEN.join(filter(None, texts))


def _result_of(call: Mapping[str, Any], results: Sequence[Message]) -> Message | None:
    """Return the result with the id of a call; otherwise the first one if the call or the result has no id."""
    wanted = call.get("id")
    named = (result for result in results if wanted and result.get("tool_call_id") == wanted)
    unnamed = (result for result in results if not wanted or not result.get("tool_call_id"))
    return next(named, None) or next(unnamed, None)


def _next_id(given: str, taken: Counter[str]) -> str:
    """Return the short id of a call or of a result without one, and count it."""
    number = taken[given]
    taken[given] += 1
    if number == 0 and is_short_id(given):
        return given
    return hashlib.sha256(f"{given} {number}".encode()).hexdigest()[:9]


def spelt_arguments(arguments: Any) -> str:
    """Return arguments of a call as text, in which form they may be already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_spelt_result(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    tool = f"the tool {message['name']}" if message.get("name") else "a tool"
    return {"role": "user", "content": f"Result of {tool}:\n\n{joined_text(message['content'])}"}


# Templates that keep white space around a content, which drives their models into loops of reasoning.
_TRIMMED = "You have access to the following functions in JSONSchema format"


def for_template(messages: Sequence[Mapping[str, Any]], capabilities: Mapping[str, bool], source: str) -> list[Message]:
    """Return the messages with the roles and arguments that the template knows, and one leading system message.

    `capabilities` are the template's, by llama.cpp's names; `source` is its Jinja source.

    Raises:
        InvalidParams: The template needs arguments of tool calls as objects, and some nest too deep or are too long.
        TemplateError: The template has no system messages, and there is no other message.
    """
    fitted = [dict(message) for message in messages]
    for index, message in enumerate(fitted):
        if _TRIMMED in source:
            content = message["content"]
            is_text = isinstance(content, str)
            message["content"] = (
                content.strip() if is_text else [{**part, "text": part["text"].strip()} for part in content]
            )
            if "reasoning_content" in message:
                message["reasoning_content"] = message["reasoning_content"].strip()
        if message["role"] == "developer" and "<|channel|>" not in source:
            message["role"] = "system"
        if "tool_calls" in message and capabilities["supports_object_arguments"]:
            calls = []
            for number, call in enumerate(message["tool_calls"]):
                place = f"messages[{index}].tool_calls[{number}].function.arguments"
                arguments = _object_of(place, call["function"]["arguments"])
                calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            message["tool_calls"] = calls
    fitted = with_one_system(fitted)
    if not capabilities["supports_system_role"] and len(fitted) == 1 and fitted[0]["role"] == "system":
        raise TemplateError(
            "the chat template has no system messages, and there is no other message to put the text into"
        )
    return fitted


def with_fitted_contents(messages: Sequence[Message], capabilities: Mapping[str, bool]) -> list[Message]:
    """Return the messages with contents as texts or parts, and without a system message, as the template takes them."""
    takes_text, takes_parts = capabilities["supports_string_content"], capabilities["supports_typed_content"]
    fitted = []
    for message in messages:
        content = message["content"]
        if not takes_parts:
            content = joined_text(content)
        elif not takes_text and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        fitted.append({**message, "content": content})
    if len(fitted) < 2 or fitted[0]["role"] != "system" or capabilities["supports_system_role"]:
        return fitted
    # The text of the system message comes before the text of the next message.
    system, following = fitted[0], fitted[1]
    text = joined_text(system["content"]) + "\n" + joined_text(following["content"])
    content = text if isinstance(following["content"], str) else [{"type": "text", "text": text}]
    return [{**following, "content": content}, *fitted[2:]]


def _object_of(place: str, arguments: str) -> Mapping[str, Any] | None:
    """Return arguments as an object, which the template needs; a text that is no object becomes its only member."""
    try:
        found = json.loads(arguments, parse_constant=_refuse_constant)
    except ValueError:
        return {"arguments": arguments}
    except RecursionError:
        raise InvalidParams(f"{place} is nested more than {MAX_ARGUMENTS_DEPTH} deep") from None
    if found is not None and not isinstance(found, dict):
        found = {"arguments": found}
    checked: Mapping[str, Any] | None = checked_json(place, found, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
    return checked


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")
