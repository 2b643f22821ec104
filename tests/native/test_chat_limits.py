"""Limits of chat templates, their messages and their variables."""

from __future__ import annotations

from typing import Any

import pytest
from tests.native.chat_templates import TALK, demo, text_of

from paceline.chat import ChatFormat
from paceline.errors import InvalidParams, InvalidType, TemplateError, TextTooLong

# Things that would grow without an end; `ns.x` begins as one letter.
GROW = "{% set ns = namespace(x='a') %}{% for i in range(60) %}%s{% endfor %}{{ ns.x }}"
GROW_LIST = "{% set ns = namespace(x=(1, 2)) %}{% for i in range(60) %}%s{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "has no Jinja in it: ''"),
        ("llama3", r"has no Jinja in it: 'llama3'; give the source of a template, or 'default', 'chatml'"),
        ("{{ 'a", "does not parse: unexpected end of input"),
        ("{% for x in y %}", "does not parse"),
        ("{{ a[", r"does not parse: Unexpected EOF, near: \.\.\.\{\{ a\["),
        ("{% frobnicate %}", "does not parse: Unknown statement: frobnicate"),
        ("{% include 'x' %}", "does not parse: Unknown statement: include"),
        ("{{ 99999999999999999999 }}", "does not parse: a number in it is too large"),
        ("{{ " + "(" * 500_000 + " }}", "a tag of more than 2000 tokens"),
        ("{% if 1 %}" * 201 + "{% endif %}" * 201, "more than 200 blocks"),
        ("{% if 1 %}" + "{% elif 1 %}" * 50_000 + "{% endif %}", "more than 200 blocks"),
        ("{{ 1 }}" + "x" * (1 << 20), "has 1048583 bytes, and may have at most 1048576"),
    ],
)
def test_a_template_that_does_not_parse_is_refused_at_once(template: str, words: str) -> None:
    """The error comes when the template is loaded, before any request."""
    with pytest.raises(TemplateError, match=words):
        ChatFormat(demo(), template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('One user, please') }}", "^the chat template refuses this conversation: One user, please$"),
        ("{{ raise_exception() }}", "refuses this conversation"),
        ("{{ nothing() }}", r"failed: Callee is not a function: .* \(line 1, column \d+\)"),
        ("\n\n{{ messages[0].content + 5 - 'x' }}", r"failed: .* \(line 3, column \d+\)"),
        ("{{ 'a'|nothing }}", "failed: Unknown .*filter 'nothing'"),
        ("{% break %}", "failed: Break"),
        ("{{ 5 is divisibleby(0) }}", "division by zero"),
        ("{{ messages[0].content.split('') }}", "empty separator"),
        ("{{ 'x'|indent(100000000000) }}", "width of 0 to 1000"),
        ("{{ [1, 'a', 2]|sort }}", "texts together with something else"),
        ("{{ [1, 2][::-9223372036854775807] }}", "slice of that size"),
        ("{{ strftime_now('%c' * 500) }}", "cannot show the time"),
    ],
)  # fmt: skip
def test_the_error_of_a_template_has_the_line(template: str, words: str) -> None:
    """A TemplateError reports the reason and the line; the process continues."""
    with pytest.raises(TemplateError, match=words):
        text_of(template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(1000000000) %}x{% endfor %}", "range.. of more than 100000"),
        ("{{ range(9223372036854775807, -9223372036854775807, -1)|length }}", "range.. of more than 100000"),
        ("{% for i in range(2000) %}{% for j in range(2000) %}x{% endfor %}{% endfor %}", "more than (1000000 steps|20 seconds)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests calls of its macros too deeply"),
        ("{% macro f(x) %}{{ x(x) }}{% endmacro %}{{ f(f) }}", "nests calls of its macros too deeply"),
        ("{% macro f(x=f()) %}{{ x }}{% endmacro %}{{ f() }}", "nests calls of its macros too deeply"),
        ("{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}", "nests calls of its macros too deeply"),
        ("{{ 'a' * 10000000000 }}", "too much text"),
        (GROW.replace("%s", "{% set ns.x = ns.x + ns.x %}"), "too much text"),
        (GROW.replace("%s", "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}"), "too much text"),
        (GROW.replace("%s", "{% set ns.x = [ns.x, ns.x]|join %}"), "too much text"),
        (GROW.replace("%s", "{% set ns.x = ns.x.replace('a', 'aa') %}"), "too much text"),
        (GROW.replace("%s", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"), "too much text"),
        (GROW_LIST.replace("%s", "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x|tojson }}", "too much text"),
        (GROW_LIST.replace("%s", "{% set ns.x = (ns.x, ns.x) %}") + "{{ ns.x == ns.x }}", "too much text"),
        ("{% set n = namespace() %}{% set n.n = n %}{{ n|tojson }}", "contains itself"),
        ("{% set n = namespace() %}{% set n.n = n %}{{ 'a' ~ n }}", "contains itself"),
        ("{% set n = namespace() %}{% set n.n = n %}{{ n|trim }}", "contains itself"),
        ("{% set l = [] %}{% set _ = l.append(l) %}{{ l }}", "contains itself"),
        ("{% set l = [] %}{% set _ = l.append(l) %}{{ '{}'.format(l) }}", "contains itself"),
    ],
)  # fmt: skip
def test_a_template_without_an_end_is_ended(template: str, words: str) -> None:
    """Loops, recursion and growth are bounded: none of these ends the process or runs forever."""
    with pytest.raises(TemplateError, match=words):
        text_of(template)


@pytest.mark.parametrize("content", ["</think>" * 250_000, "\n" * 2_000_000, " " * 2_000_000, "a\n" * 1_000_000])
def test_long_contents_take_no_time_with_their_square(content: str) -> None:
    """Splitting and replacing is linear, so a message can be megabytes of the text that a template looks for."""
    template = "{{ messages[0].content.split('</think>')[-1].replace('\\n', ' ')|trim|length }}"
    assert text_of(template, content) == str(len(content.rsplit("</think>", 1)[-1].replace("\n", " ").strip()))


def test_what_fits_between_the_limits_is_rendered() -> None:
    """Nested brackets, blocks, filters and long chains as far as they are allowed."""
    assert text_of("{{ " + "(" * 990 + "1" + ")" * 990 + " }}") == "1"
    assert text_of("{% if true %}" * 199 + "x" + "{% endif %}" * 199) == "x"
    assert text_of("{{ 'a'" + "|trim" * 900 + " }}") == "a"
    assert text_of("{{ 1" + "+1" * 900 + " }}") == "901"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages must be a list of messages, such as .*, not str"),
        ([], "messages must have at least one message"),
        ([{"role": "user", "content": "x"}] * 20_000, "messages must have at most 16384 messages, not 20000"),
        ([5], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a text or a list"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\.content has a lone surrogate"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any, words: str) -> None:
    """Refused as by `parse_messages`: the error reports the index and the field."""
    with pytest.raises(InvalidParams, match=words):
        ChatFormat(demo()).render(messages)


def test_a_conversation_has_an_end() -> None:
    """Messages of more than 32 MiB are refused before the template runs."""
    with pytest.raises(TextTooLong, match="and may have 33554432"):
        ChatFormat(demo()).render([{"role": "user", "content": "x" * (33 << 20)}])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ([], "kwargs must be a mapping, not list"),
        ({5: 1}, "a name in kwargs must be a str, not 5"),
        ({"messages": []}, "kwargs cannot set 'messages'"),
        ({"bos_token": ""}, "kwargs cannot set 'bos_token'"),
        ({"x": float("nan")}, r"kwargs\.x must be a finite number"),
        ({"x": 2**63}, r"kwargs\.x must be an integer"),
        ({"x": {"y": [object()]}}, r"kwargs\.x\.y\[0\] must be a finite number"),
        ({"x": "\ud800"}, r"kwargs\.x has a lone surrogate"),
        ({"x": "a" * (1 << 20)}, "kwargs has 1048585 bytes as JSON"),
        ({"x": dict.fromkeys(map(str, range(5000)))}, r"kwargs\.x has 5000 members, and may have 4096"),
    ],
)
def test_variables_that_are_no_json_are_refused(kwargs: Any, words: str) -> None:
    """Names, sizes and numbers of variables are checked before the template runs."""
    with pytest.raises(InvalidParams, match=words):
        ChatFormat(demo()).render(TALK, kwargs=kwargs)


def test_deeply_nested_variables_are_refused() -> None:
    """Nesting beyond the limit is refused, even if it would overflow Python's own stack."""
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidParams, match="kwargs is nested more than 64 deep"):
        ChatFormat(demo()).render(TALK, kwargs={"x": nested})
    del nested


def test_switches_are_booleans() -> None:
    """A switch is a boolean: 1 is refused."""
    for name in ("add_generation_prompt", "continue_final_message"):
        with pytest.raises(InvalidType, match=f"{name} must be True or False"):
            ChatFormat(demo()).render(TALK, **{name: 1})
