"""Rewrites of conversations: the change of each, and that it leaves other conversations alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.growth import LINEAR, growth

from paceline.chat import message_rewrites as rewrites
from paceline.chat.message_fitter import _COSTS as REWRITES
from paceline.chat.message_rewrites import Message


def said(role: str, content: Any = "", **members: Any) -> Message:
    return {"role": role, "content": content, **members}


def call(name: str, call_id: str | None = None, arguments: Any = "{}") -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {**made, "id": call_id}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


USER, REPLY = said("user", "u"), said("assistant", "r")
PLAIN = [said("system", "s"), USER, said("assistant", "", tool_calls=[call("f", "123456789")]),
         said("tool", "t", tool_call_id="123456789"), REPLY, USER]  # fmt: skip


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
def test_conversations_without_anything_of_a_kind_stay_as_they_are(rewrite: rewrites.Rewrite) -> None:
    """A chat with one short call, but for rewrites of every call, result and first system message."""
    if rewrite not in (rewrites.spell_calls, rewrites.spell_results, rewrites.move_first_system):
        assert rewrite(PLAIN) == PLAIN
    assert rewrite([]) == []
    assert PLAIN[2]["tool_calls"] == [call("f", "123456789")]


def test_ids_become_short_and_stay_together() -> None:
    """The same id becomes the same short one in every conversation; calls and results without ids get some."""
    talk = [
        said("assistant", tool_calls=[call("f", "call_1"), call("g", "call_2")]),
        said("tool", "2", tool_call_id="call_2"),
        said("tool", "1", tool_call_id="call_1"),
        said("assistant", tool_calls=[call("h")]),
        said("tool", "3"),
        said("assistant", tool_calls=[call("i")]),
        said("tool", "4", tool_call_id="made up"),
        said("tool", "5", tool_call_id="gone"),
    ]
    found = rewrites.shorten_ids(talk)
    first, second = (made["id"] for made in found[0]["tool_calls"])
    assert all(map(rewrites.is_short_id, (first, second)))
    assert [message["tool_call_id"] for message in found[1:3]] == [second, first]
    assert found[4]["tool_call_id"] == found[3]["tool_calls"][0]["id"]
    assert found[6]["tool_call_id"] == found[5]["tool_calls"][0]["id"]
    assert rewrites.is_short_id(found[7]["tool_call_id"])
    assert rewrites.shorten_ids([USER, *talk])[1] == found[0]
    assert not rewrites.is_short_id(None)


def test_several_calls_become_messages_with_their_results() -> None:
    """By id, or in order; text and thinking stay with the first, and further results come last."""
    f, g = call("f", "1"), call("g", "2")
    results = [said("tool", "2", tool_call_id="2"), said("tool", "1", tool_call_id="1"), said("tool", "x")]
    talk = [said("assistant", "a", tool_calls=[f, g], reasoning_content="hm"), *results, USER]
    assert rewrites.split_calls(talk) == [
        said("assistant", "a", tool_calls=[f], reasoning_content="hm"),
        results[1],
        said("assistant", tool_calls=[g]),
        results[0],
        results[2],
        USER,
    ]
    nameless = [said("assistant", tool_calls=[call("f"), call("g")]), said("tool", "1"), said("tool", "2")]
    assert [message["content"] for message in rewrites.split_calls(nameless)] == ["", "1", "", "2"]


def test_a_result_without_an_id_belongs_to_the_first_call_that_has_no_result() -> None:
    """Unless its call has one by its id."""
    talk = [
        said("assistant", tool_calls=[call("f", "1"), call("g", "2"), call("h", "3")]),
        said("tool", "a"),
        said("tool", "g", tool_call_id="2"),
        said("tool", "b"),
    ]
    assert [message["content"] for message in rewrites.split_calls(talk)] == ["", "a", "", "g", "", "b"]


@pytest.mark.parametrize("rewrite", [rewrites.merge_turns, rewrites.move_later_systems], ids=["turns", "systems"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_thousands_of_messages_become_one_in_linear_time(rewrite: rewrites.Rewrite, role: str) -> None:
    """Their 10 MB are copied once."""
    talk = [USER, *(said(role, "x" * 600) for _ in range(16_000))]
    assert growth(lambda size: rewrite(talk[:size]), len(talk)) < LINEAR
    found = rewrite(talk)
    if (rewrite is rewrites.merge_turns) == (role == "user"):
        assert found == [said("user", "\n\n".join(message["content"] for message in talk))]
    else:
        assert found == talk


def test_text_beside_calls_becomes_a_message_before_them() -> None:
    """With the thinking."""
    talk = [said("assistant", "a", tool_calls=[call("f")], reasoning_content="hm")]
    assert rewrites.part_text_from_calls(talk) == [
        said("assistant", "a", reasoning_content="hm"),
        said("assistant", tool_calls=[call("f")]),
    ]


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("s u s a", [("s", "0"), ("u", "1\n\n2"), ("a", "3")]),
        ("s u a s u", [("s", "0"), ("u", "1"), ("a", "2"), ("u", "3\n\n4")]),
        ("u a s a", [("u", "0"), ("a", "1"), ("u", "2"), ("a", "3")]),
        ("u a s s", [("u", "0"), ("a", "1"), ("u", "2\n\n3")]),
        ("u s s a", [("u", "0\n\n1\n\n2"), ("a", "3")]),
        ("u a s u s", [("u", "0"), ("a", "1"), ("u", "2\n\n3\n\n4")]),
        ("u a s t u", [("u", "0"), ("a", "1"), ("t", "3"), ("u", "2\n\n4")]),
        ("u a s t a", [("u", "0"), ("a", "1"), ("t", "3"), ("u", "2"), ("a", "4")]),
        ("s s u", [("s", "0"), ("s", "1"), ("u", "2")]),
    ],
)
def test_later_system_texts_go_into_the_users_turn(roles: str, wanted: list[tuple[str, str]]) -> None:
    """Into the message before or after them, or into a message of their own, after the results of calls."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    talk = [said(names[role], str(index)) for index, role in enumerate(roles.split())]
    found = rewrites.move_later_systems(talk)
    assert [(message["role"][0], message["content"]) for message in found] == wanted


def test_the_first_system_text_goes_into_the_users_first_message() -> None:
    """Or becomes one."""
    assert rewrites.move_first_system(PLAIN)[0] == said("user", "s\n\nu")
    assert rewrites.move_first_system([said("system", "s"), REPLY]) == [said("user", "s"), REPLY]
    assert rewrites.move_first_system([USER]) == [USER]


def test_results_and_calls_become_texts() -> None:
    """Results without their calls alone, or all; with the names of the tools."""
    talk = [
        said("assistant", "a", tool_calls=[call("f", "1", {"x": 1}), call("g", "2", "{x")]),
        said("tool", "t", tool_call_id="1", name="f"),
        said("tool", parts("a", "b"), tool_call_id="3"),
        REPLY,
        said("tool", "late", tool_call_id="1"),
    ]
    spelt, other = said("user", "Result of the tool f:\n\nt"), said("user", "Result of a tool:\n\na\nb")
    late = said("user", "Result of a tool:\n\nlate")
    assert rewrites.spell_lost_results(talk) == [*talk[:2], other, REPLY, late]
    assert rewrites.spell_results(talk) == [talk[0], spelt, other, REPLY, late]
    assert rewrites.spell_calls(talk)[0] == said(
        "assistant", 'a\n\nCall of the tool f: {"x": 1}\nCall of the tool g: {x'
    )


def test_parts_become_one_text() -> None:
    """Of results, or of other messages."""
    talk = [said("user", parts("a", "b")), said("tool", parts("c", "d"))]
    assert rewrites.join_parts(talk) == [said("user", "a\nb"), talk[1]]
    assert rewrites.join_result_parts(talk) == [talk[0], said("tool", "c\nd")]


def test_consecutive_messages_become_one() -> None:
    """Of the user and of the assistant, with thinking and calls; a text after calls stays apart."""
    f = [call("f")]
    talk = [
        USER,
        said("user", parts("v", "w")),
        said("assistant", "a", reasoning_content="x"),
        said("assistant", "b", reasoning_content="y", tool_calls=f),
        said("assistant", "c"),
    ]
    assert rewrites.merge_turns(talk) == [
        said("user", "u\n\nv\nw"),
        said("assistant", "a\n\nb", reasoning_content="x\n\ny", tool_calls=f),
        said("assistant", "c"),
    ]


def test_turns_alternate_with_empty_messages() -> None:
    """From the user's on; calls and their results do not count."""
    f = said("assistant", tool_calls=[call("f")])
    talk = [said("system", "s"), REPLY, f, said("tool", "t"), USER, USER, REPLY]
    nothing, silence = said("user"), said("assistant")
    assert rewrites.alternate_turns(talk) == [talk[0], nothing, *talk[1:5], silence, USER, REPLY]


def test_thinking_of_earlier_messages_is_left_out() -> None:
    """And nothing else."""
    assert rewrites.drop_thoughts([said("assistant", "a", reasoning_content="x")]) == [said("assistant", "a")]
