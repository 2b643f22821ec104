"""Arguments of tool calls are held to their schemas, within the call syntax of every chat format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.chat_templates import demo
from tests.native.test_chat_formats import ASKED, tool_of
from tests.sweeps import sampled

from paceline import SamplingParams
from paceline.chat import ChatFormat, ChatOptions, ChatRequest, MessageParser, RenderedPrompt, next_turn, prepare_chat
from paceline.chat.call_grammar import call_syntax
from paceline.chat.chat_request import is_thinking_open
from paceline.constraints import ConstraintCompiler, ThinkingConstraint
from paceline.engine.llama_backend import token_table
from paceline.errors import ChatParseError, InvalidParams, PacelineError
from paceline.params import CallGrammar
from paceline.runtime import Sampler

ORDER = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "count": {"type": "integer", "minimum": 3, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2}, "maxItems": 2},
        "mail": {"type": "string", "format": "email"},
        "kind": {"$ref": "#/$defs/kind"},
        "text": {"type": "string", "maxLength": 524_288},
    },
    "required": ["code", "count"],
    "$defs": {"kind": {"enum": ["a", "b"]}},
}
TOOLS = [tool_of("order", **ORDER), tool_of("order_more")]
CONFORMING: list[dict[str, Any]] = [
    {"code": "ABC", "count": 5},
    {"code": "ABC", "count": 9, "mail": "a@b.de", "kind": "b", "text": 'hello "you" <b>'},
]
VIOLATING: list[dict[str, Any]] = [
    {"code": "ABCD", "count": 5},
    {"code": "ABC", "count": 12},
    {"code": "ABC", "count": 5, "tags": ["x"]},
    {"code": "ABC", "count": 5, "tags": ["xx", "yy", "zz"]},
    {"code": "ABC", "count": 5, "mail": "nobody"},
    {"code": "ABC", "count": 5, "kind": "c"},
]
NOT_HELD = {
    "MiniMax-M3",
    "google-gemma-4-31B-it",
    "google-gemma-4-31B-it-interleaved",
    "ibm-granite-granite-3.3-2B-Instruct",
}
"""Formats with calls whose arguments no grammar holds to a schema."""
NUM_SPELT = 44


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(token_table(demo().tokenizer))


class Follower:
    """Follows a text as an engine does: by the constraint and the grammar of a request's params."""

    def __init__(self, params: SamplingParams, compiler: ConstraintCompiler) -> None:
        self._sampler, self._constraint = Sampler(params, demo(), is_masked=True), compiler.compile(params)
        self._words = np.zeros(compiler.table.num_words, dtype=np.uint32)

    def refused(self, text: str) -> str | None:
        """Return the text in front of the first token that may not come; None if all may."""
        token_ids = demo().tokenizer.encode(text, add_special=False)
        for index, token_id in enumerate(token_ids):
            if not self._takes(token_id):
                return demo().tokenizer.decode(token_ids[:index])
        return None

    def _takes(self, token_id: int) -> bool:
        constraint = self._constraint
        has_mask = constraint is not None and constraint.fill_mask(self._words)
        if has_mask and not self._words[token_id >> 5] >> np.uint32(token_id & 31) & 1:
            return False
        try:
            self._sampler.accept(token_id)
        except InvalidParams:
            return False
        if constraint is not None:
            constraint.accept(token_id)
        if isinstance(constraint, ThinkingConstraint) and self._sampler.params.grammar_lazy:
            self._sampler.set_grammar_asleep(constraint.is_thinking)
        return True


def spelt(chat: ChatFormat, prompt: RenderedPrompt, *calls: Mapping[str, Any]) -> str | None:
    """Return calls as the template spells them in a conversation; None if its parser does not read them so."""
    made = [
        {"id": f"12345678{n}", "type": "function", "function": {"name": "order", "arguments": json.dumps(call)}}
        for n, call in enumerate(calls)
    ]
    talk = [*ASKED, {"role": "assistant", "content": "", "tool_calls": made}]
    try:
        whole = chat.render(talk, options=ChatOptions(tools=TOOLS), add_generation_prompt=False).text
    except PacelineError:
        return None
    begun = next((n for n, (a, b) in enumerate(zip(prompt.text, whole, strict=False)) if a != b), len(prompt.text))
    text = (f"Hm.{prompt.thinking_ends[0]}" if is_thinking_open(prompt) else "") + whole[begun:]
    parser, found = MessageParser(prompt), None
    for end in range(len(text), max(0, len(text) - 40), -1):
        with suppress(ChatParseError):
            message = parser.parse(text[:end])
            if len(message.tool_calls) == len(calls) and message.has_whole_calls:
                found = text[:end]
    return found


def formats(llama_cpp_source: Path) -> dict[str, ChatFormat]:
    """Return the formats with calls of the pinned source."""
    found = {}
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = ChatFormat(demo(), path.read_text())
        if chat.capabilities["supports_tools"] or chat.capabilities["supports_tool_calls"]:
            found[path.stem] = chat
    return found


def request_for(chat: ChatFormat, **options: Any) -> ChatRequest | None:
    try:
        return prepare_chat(chat, next_turn(ASKED), ChatOptions(**{"tools": TOOLS, **options}))
    except PacelineError:
        return None  # a template that fails on this schema


def test_arguments_are_held_to_their_schema_in_every_format(
    llama_cpp_source: Path, compiler: ConstraintCompiler
) -> None:
    """In the template's spelling of calls: conforming calls are possible, and calls that violate a bound are not."""
    num_spelt, not_held = 0, set()
    for name, chat in formats(llama_cpp_source).items():
        request = request_for(chat)
        if request is None:
            continue
        if request.params.call_grammar is None:
            not_held.add(name)
            assert "tools[0] (order): arguments may violate #: " in " ".join(request.warnings), name
            continue
        for arguments in CONFORMING:
            text = spelt(chat, request.rendered, arguments)
            if text is not None:
                num_spelt += 1
                assert Follower(request.params, compiler).refused(text) is None, (name, text)
        for arguments in VIOLATING:
            text = spelt(chat, request.rendered, arguments)
            assert text is None or Follower(request.params, compiler).refused(text) is not None, (name, text)
    assert not_held == NOT_HELD
    assert num_spelt >= 2 * NUM_SPELT


JSON_FORMAT, TAGGED, BARE = "Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "meta-llama-Llama-3.1-8B-Instruct"


@pytest.mark.parametrize("name", sampled([TAGGED, JSON_FORMAT, BARE], every=3))
@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "order"}}},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": True},
    ],
    ids=["required", "named", "one", "many"],
)
def test_calls_that_are_required_are_held_as_well(
    llama_cpp_source: Path, compiler: ConstraintCompiler, name: str, options: dict[str, Any]
) -> None:
    """From the first token on; a second call only if several are allowed."""
    chat = formats(llama_cpp_source)[name]
    request = request_for(chat, **options)
    assert request is not None
    offered = prepare_chat(chat, next_turn(ASKED), ChatOptions(tools=TOOLS)).rendered
    text = spelt(chat, offered, CONFORMING[0])
    assert text is not None
    assert Follower(request.params, compiler).refused(text) is None
    assert Follower(request.params, compiler).refused("Well, ") is not None
    for arguments in VIOLATING:
        wrong = spelt(chat, offered, arguments)
        assert wrong is not None and Follower(request.params, compiler).refused(wrong) is not None, arguments
    if name != BARE and "parallel_tool_calls" in options:
        for second in (CONFORMING[1], VIOLATING[1]):
            both = spelt(chat, offered, CONFORMING[0], second)
            assert both is not None
            is_refused = Follower(request.params, compiler).refused(both) is not None
            assert is_refused == (second == VIOLATING[1] or not options["parallel_tool_calls"])


@pytest.mark.parametrize("choice", sampled(["auto", "required"], every=2))
@pytest.mark.parametrize(
    ("arguments", "is_taken"),
    [
        ('{"n": 1234567890123456, "x": 0.5}', True),
        ('{"n":\n  5,\n  "x": 1.5e-10}', True),
        ('{"n": 12345678901234567, "x": 0.5}', False),
        ('{"n": 5, "x": 0.123456789012345678}', False),
        ('{"n": 5, "x": 1e99}', True),
        ('{"n": 5, "x": 1e100}', False),
        ('{"n": 5 , "x": 1}', False),
        ('{"n" : 5, "x": 1}', False),
        ('{"n":\n                 5, "x": 1}', False),
        ('{"n": 7, "x": 1, "long": 123456789012345678}', False),
    ],
)
def test_arguments_have_few_digits_and_blanks(
    llama_cpp_source: Path, compiler: ConstraintCompiler, choice: str, arguments: str, is_taken: bool
) -> None:
    """Numbers have 16 digits before the point and after it, and blanks come after separators alone."""
    chat = formats(llama_cpp_source)[JSON_FORMAT]
    properties = {"n": {"type": "integer"}, "x": {"type": "number"}, "long": {"type": "integer"}}
    tool = tool_of("order", type="object", properties=properties)
    request = request_for(chat, tools=[tool], tool_choice=choice)
    assert request is not None
    text = f'<tool_call>\n{{"name": "order", "arguments": {arguments}}}\n</tool_call>'
    assert (Follower(request.params, compiler).refused(text) is None) is is_taken


LONG = {"n": {"type": "integer", "maximum": 10**17}}


def test_arguments_with_longer_bounds_have_longer_numbers(llama_cpp_source: Path, compiler: ConstraintCompiler) -> None:
    """One digit more than the longest number of the tools' schemas."""
    chat = formats(llama_cpp_source)[JSON_FORMAT]
    request = request_for(chat, tools=[tool_of("order", type="object", properties=LONG)])
    assert request is not None
    for number, is_taken in ((10**17, True), (10**17 + 1, False), (10**18, False)):
        text = f'<tool_call>\n{{"name": "order", "arguments": {{"n": {number}}}}}\n</tool_call>'
        assert (Follower(request.params, compiler).refused(text) is None) is is_taken


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "name", sampled(["Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "StepFun3.5-Flash"], every=3)
)
def test_a_call_that_ends_thinking_is_held(
    llama_cpp_source: Path, compiler: ConstraintCompiler, name: str, choice: str
) -> None:
    """In formats with thinking that ends when a call begins."""
    request = request_for(formats(llama_cpp_source)[name], tool_choice=choice)
    assert request is not None
    text = (
        "Hm.<tool_call>\n<function=order>\n<parameter=code>\nABC\n</parameter>\n<parameter=count>\n5\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert Follower(request.params, compiler).refused(text) is None
    for right, wrong in (("ABC", "abc"), ("5", "12"), ("order", "orders")):
        assert Follower(request.params, compiler).refused(text.replace(right, wrong)) is not None, wrong


ODD = [
    tool_of("call", type="object", properties={"a": {"type": "integer"}}, required=["a"]),
    tool_of("a.b", type="object", properties={"x_y": {"const": 1}, "x.y": {"const": 2}}, required=["x_y", "x.y"]),
    tool_of("a_b", type="object", properties={"a": {"const": 3}}, required=["a"]),
    tool_of("a_b-schema", properties={"a": {"type": "boolean"}}),
    tool_of("mcp:größe/1", **{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}),
    {"type": "function", "function": {"name": "none"}},
    tool_of("open", type="object", additionalProperties={"type": "integer"}),
]
ODD_CALLS: list[tuple[str, dict[str, Any], bool]] = [
    ("call", {"a": 1}, True),
    ("call", {"a": "x"}, False),
    ("a.b", {"x_y": 1, "x.y": 2}, True),
    ("a.b", {"x_y": 2, "x.y": 1}, False),
    ("a_b", {"a": 3}, True),
    ("a_b", {"x_y": 1, "x.y": 2}, False),
    ("a_b-schema", {"a": True}, True),
    ("none", {}, True),
    ("none", {"a": 1}, False),
    ("a.c", {}, False),
]


@pytest.mark.parametrize("name", [JSON_FORMAT, TAGGED])
def test_tools_may_have_any_name(llama_cpp_source: Path, compiler: ConstraintCompiler, name: str) -> None:
    """Names of rules, names that differ in one sign, properties like that, schemas without a type: each has its own."""
    chat = formats(llama_cpp_source)[name]
    request = prepare_chat(chat, next_turn(ASKED), ChatOptions(tools=ODD, tool_choice="required"))
    parser = MessageParser(request.rendered)
    for tool, arguments, is_right in ODD_CALLS:
        if name == JSON_FORMAT:
            text = f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        else:
            values = "".join(
                f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key, value in arguments.items()
            )
            text = f"<tool_call>\n<function={tool}>\n{values}</function>\n</tool_call>"
        assert (Follower(request.params, compiler).refused(text) is None) == is_right, (tool, arguments)
        if is_right:
            (call,) = parser.parse(text).tool_calls
            assert (call.name, json.loads(call.arguments)) == (tool, arguments)


HOSTILE_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "a|^b"}, "#/properties/a/pattern"),
    ({"type": "string", "pattern": "(?=x)y"}, "#/properties/a/pattern"),
    ({"type": "string", "format": "ipv6"}, "#/properties/a/format"),
    ({"type": ["string", "integer"], "minimum": 3}, "#/properties/a/minimum"),
    ({"type": "string", "maxLength": 100_000}, "#/properties/a/maxLength"),
]


@pytest.mark.parametrize(("schema", "pointer"), HOSTILE_TEXTS, ids=lambda text: text if isinstance(text, str) else "")
def test_plain_text_is_relaxed_where_it_cannot_be_held(
    llama_cpp_source: Path, schema: dict[str, Any], pointer: str
) -> None:
    """Arguments of some formats are text without quotes: a warning names the parts that are not enforced."""
    tools = [tool_of("f", type="object", properties={"a": schema, "b": {"type": "integer"}}, required=["a"])]
    request = prepare_chat(formats(llama_cpp_source)[TAGGED], next_turn(ASKED), ChatOptions(tools=tools))
    assert request.params.call_grammar is not None
    (warning,) = request.warnings
    assert warning.startswith(f"tools[0] (f): arguments may violate {pointer}: ")


def tagged(tool: str, **arguments: Any) -> str:
    """Return a call as Qwen3-Coder spells it."""
    values = "".join(f"<parameter={name}>\n{json.dumps(value)}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function={tool}>\n{values}</function>\n</tool_call>"


def test_references_of_arguments_lead_into_the_whole_schema(
    llama_cpp_source: Path, compiler: ConstraintCompiler
) -> None:
    """Also if the arguments are separate: to the root, and from one property to another."""
    tree = {
        "type": "object",
        "properties": {
            "v": {"type": "integer"},
            "kids": {"type": "array", "items": {"$ref": "#"}},
            "more": {"type": "array", "items": {"$ref": "#/properties/v"}},
        },
        "required": ["v"],
    }
    options = ChatOptions(tools=[tool_of("tree", **tree)], tool_choice="required")
    request = prepare_chat(formats(llama_cpp_source)[TAGGED], next_turn(ASKED), options)
    assert request.warnings == ()
    for right in ({"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}]}, {"v": 1, "more": [2]}):
        assert Follower(request.params, compiler).refused(tagged("tree", **right)) is None, right
    for wrong in ({"v": 1, "kids": [[]]}, {"v": 1, "kids": [{}]}, {"v": 1, "more": ["x"]}):
        assert Follower(request.params, compiler).refused(tagged("tree", **wrong)) is not None, wrong


def test_a_tool_with_more_properties_than_a_format_takes_by_name_can_be_called(
    llama_cpp_source: Path, compiler: ConstraintCompiler
) -> None:
    """A warning says that its arguments are not held."""
    wide = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(401)}}
    options = ChatOptions(tools=[tool_of("wide", **wide)], tool_choice="required")
    request = prepare_chat(formats(llama_cpp_source)[TAGGED], next_turn(ASKED), options)
    assert Follower(request.params, compiler).refused(tagged("wide", p0=1, p400=2)) is None
    (warning,) = request.warnings
    assert warning.startswith("tools[0] (wide): arguments may violate #: ")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_format_with_a_trigger_for_each_tool_takes_hundreds_of_tools(llama_cpp_source: Path, choice: str) -> None:
    """And holds the arguments of the last one."""
    tools = [tool_of(f"tool_{number}") for number in range(300)]
    chat = formats(llama_cpp_source)[TAGGED]
    request = prepare_chat(chat, next_turn(ASKED), ChatOptions(tools=tools, tool_choice=choice))
    assert request.params.call_grammar is not None
    assert isinstance(request.params.call_grammar, CallGrammar)
    assert len(request.params.call_grammar.triggers) > 300


def test_tools_whose_grammar_is_too_large_are_offered_without_it(
    llama_cpp_source: Path, compiler: ConstraintCompiler
) -> None:
    """Calls keep their syntax, and warnings say that their arguments are not held: llguidance takes 65,000 symbols."""
    tools = [
        tool_of(
            f"tool_{n}",
            properties={f"p{k}_{n}": {"type": "array", "items": {"enum": [k, n]}, "maxItems": 9} for k in range(4)},
        )
        for n in range(1024)
    ]
    request = prepare_chat(formats(llama_cpp_source)[JSON_FORMAT], next_turn(ASKED), ChatOptions(tools=tools))
    assert request.params.call_grammar is None
    assert request.params.grammar is not None
    assert len(request.warnings) == 1024
    call = '<tool_call>\n{"name": "tool_1023", "arguments": {"p3_1023": [3, 1023]}}\n</tool_call>'
    assert Follower(request.params, compiler).refused(call) is None


def test_a_very_large_set_of_tools_is_not_kept(llama_cpp_source: Path) -> None:
    """The caches hold the sets of agents, not megabytes of each request."""
    chat = ChatFormat(demo(), (llama_cpp_source / "models" / "templates" / f"{JSON_FORMAT}.jinja").read_text())
    before = call_syntax.cache_info().currsize
    for size, num_kept in ((2**18, 0), (2, 1)):
        tools = [tool_of(f"large_{n}", type="object", description="x" * size) for n in range(5)]
        request = prepare_chat(chat, next_turn(ASKED), ChatOptions(tools=tools))
        assert request.params.call_grammar is not None
        assert chat._relaxed.cache_info().currsize == num_kept
        assert call_syntax.cache_info().currsize <= before + num_kept


def test_many_tools_are_prepared_and_compiled_in_time(llama_cpp_source: Path, compiler: ConstraintCompiler) -> None:
    """A coding agent's tools take well under a second together."""
    tools = [tool_of(f"tool_{n}", **ORDER) for n in range(24)]
    chat = formats(llama_cpp_source)[JSON_FORMAT]
    request = prepare_chat(chat, next_turn(ASKED), ChatOptions(tools=tools))
    assert compiler.compile(request.params) is not None
    assert request.params.call_grammar is not None
    assert len(request.params.call_grammar.lark) < 2**17
