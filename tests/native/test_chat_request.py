"""A turn's request to the engine: prompt, stops, grammar and visible tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.native.chat_templates import CHATML, demo
from tests.native.grammars import accept_all, bits
from tests.native.test_chat_formats import ASKED, SCHEMA, TOOLS

from paceline import SamplingParams
from paceline.chat import (
    ChatFormat,
    ChatOptions,
    ChatRequest,
    MessageParser,
    RenderedPrompt,
    Turn,
    is_thinking_open,
    next_turn,
    prepare_chat,
)
from paceline.chat.chat_request import _prefixed
from paceline.errors import GrammarError, InvalidParams, PacelineError, Unsupported
from paceline.params import ThinkingParams
from paceline.runtime import Sampler

Prepare = Callable[..., ChatRequest]
CLOCK = {"type": "function", "function": {"name": "clock"}}
CASES: dict[str, dict[str, Any]] = {
    "auto": {"tools": TOOLS},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": CLOCK},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "schema": {"json_schema": SCHEMA},
    "tools and schema": {"tools": TOOLS, "json_schema": SCHEMA},
}
SAYS_NOTHING_OF_TOOLS = "this model's chat template has none"
# The template whose `auto` leaves tool calls without a grammar: it renders no calls, so that llama.cpp infers none.
FREE_CALLS = {"ibm-granite-granite-3.3-2B-Instruct"}


@cache
def format_of(source: str | None) -> ChatFormat:
    """Return the format of a template; None: the demo model's own. Its analysis takes most of these tests' time."""
    return ChatFormat(demo(), source)


@pytest.fixture
def prepare(llama_cpp_source: Path) -> Prepare:
    """Return a function that prepares the question in a template of the pinned source; None: the demo model's own."""

    def make(name: str | None, params: SamplingParams | None = None, **options: Any) -> ChatRequest:
        source = name and (llama_cpp_source / "models" / "templates" / f"{name}.jinja").read_text()
        return prepare_chat(format_of(source), next_turn(ASKED), ChatOptions(**options), params)

    return make


@pytest.mark.parametrize("case", CASES)
def test_what_is_prepared_in_every_format_can_be_generated(llama_cpp_source: Path, case: str) -> None:
    """Its grammar compiles, and goes on from the end of the prompt; formats that cannot say so."""
    num_constrained, refusals = 0, []
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat, options = format_of(path.read_text()), CASES[case]
        try:
            request = prepare_chat(chat, next_turn(ASKED), ChatOptions(**options))
        except Unsupported as error:
            refusals.append(str(error))
            continue
        params = request.params
        assert request.token_ids == chat.encode(request.rendered)
        assert set(request.rendered.stops) <= set(params.stop)
        if params.grammar is None:
            continue
        num_constrained += 1
        assert params.grammar_lazy == (case == "auto"), path.stem
        assert params.grammar_prefix == ("" if params.grammar_lazy else request.rendered.generation_prompt)
        with Sampler(params, demo(), is_masked=True) as sampler:
            assert sampler.allowed_mask().any(), path.stem
    assert all(SAYS_NOTHING_OF_TOOLS in refusal or "has no grammar" in refusal for refusal in refusals), refusals
    assert num_constrained >= {"auto": 58, "schema": 4, "none": 0, "tools and schema": 54}.get(case, 64)


def test_calls_are_free_only_in_a_format_without_calls(llama_cpp_source: Path) -> None:
    """In all other formats with tools, `auto` constrains a call from its beginning."""
    free = set()
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        try:
            request = prepare_chat(format_of(path.read_text()), next_turn(ASKED), ChatOptions(tools=TOOLS))
        except Unsupported:
            continue
        if request.params.grammar is None:
            free.add(path.stem)
    assert free == FREE_CALLS


LLAMA, MUSE, GPT_OSS, FUNCTIONARY = (
    "meta-llama-Llama-3.1-8B-Instruct",
    "muse-glimmer",
    "openai-gpt-oss-120b",
    "meetkai-functionary-medium-v3.2",
)
MUSE_CALL = '<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="'


@pytest.mark.parametrize(
    ("name", "free", "begun", "wrong", "right"),
    [
        (GPT_OSS, "", " to=functions.", "other", 'weather<|channel|>commentary json<|message|>{"city": "Bonn"}'),
        (GPT_OSS, "", "<|channel|>commentary to=functions", "x", '.weather<|message|>{"city": "Bonn"}'),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>They want to=functions.<|end|><|start|>assistant",
            "<|channel|>analysis to=functions.weather<|message|>",
            "[",
            '{"city": "Bonn"}',
        ),
        (
            GPT_OSS,
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant",
            " to",
            "o",
            '=functions.weather<|channel|>commentary<|message|>{"city": "Bonn"}',
        ),
        (
            MUSE,
            "",
            " to=weather" + MUSE_CALL,
            "town",
            'city">Bonn</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        ),
        (
            MUSE,
            " to=self<|message|>Look to=weather.<|eom|><|start|>assistant",
            " to=weather<|message|>",
            "Hello",
            MUSE_CALL.removeprefix("<|message|>")
            + 'city">Bonn</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        ),
        (FUNCTIONARY, "", "weather\n", "Bonn", '{"city": "Bonn"}'),
        (FUNCTIONARY, "", "", "sunny", "clock\n{}"),
        (LLAMA, "", '{"name": "weather"', ', "arguments"', ', "parameters": {"city": "Bonn"}}'),
        (LLAMA, "Well.\n\n", '{"type": "function", "name": "weather", "parameters": {', "5", '"city": "Bonn"}}'),
    ],
)
def test_calls_are_constrained_from_where_they_begin(
    prepare: Prepare, name: str, free: str, begun: str, wrong: str, right: str
) -> None:
    """Text before is free; after the beginning of a call other text is refused, and the whole call ends the message."""
    request = prepare(name, tools=TOOLS)
    encode, params = (lambda text: demo().tokenizer.encode(text, add_special=False)), request.params
    assert params.grammar_lazy
    with Sampler(params, demo(), is_masked=True) as sampler:
        accept_all(sampler, encode(free))
        assert sampler.may_end
        accept_all(sampler, encode(begun))
        with pytest.raises(InvalidParams, match="does not allow"):
            accept_all(sampler, encode(wrong))
    with Sampler(params, demo(), is_masked=True) as sampler:
        accept_all(sampler, encode(free + begun + right))
        assert bits(sampler.allowed_mask(), sampler.n_vocab) >= {demo().tokenizer.special_tokens["eot"]}
        assert len(bits(sampler.allowed_mask(), sampler.n_vocab)) < 100
    parsed = MessageParser(request.rendered).parse(free + begun + right)
    assert [call.name for call in parsed.tool_calls] in (["weather"], ["clock"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (GPT_OSS, "<|channel|>final<|message|>Go to=functions.other or <|channel|>commentary to it."),
        (GPT_OSS, "<|channel|>commentary to=browser.search<|message|>"),
        (MUSE, " to=user<|message|>Send it to=weather, and <b>so on</b>."),
        (FUNCTIONARY, "all\n>>> print(1)\n>>>weather\n[]"),
        (LLAMA, '{"name": "Anna", "parameters": {"town": 1}}'),
        (LLAMA, 'The set {x} and {"name": "weather", "arguments": 5}'),
    ],
)
def test_content_that_resembles_a_call_is_free(prepare: Prepare, name: str, text: str) -> None:
    """No grammar begins in it."""
    with Sampler(prepare(name, tools=TOOLS).params, demo(), is_masked=True) as sampler:
        accept_all(sampler, demo().tokenizer.encode(text, add_special=False))
        assert sampler.may_end
        assert len(bits(sampler.allowed_mask(), sampler.n_vocab)) == sampler.n_vocab


def test_the_callers_params_stay(prepare: Prepare) -> None:
    """Stops of the format come behind the caller's, each once."""
    params = SamplingParams(temperature=0.25, max_tokens=9, stop=("END",), n=3, logprobs=1)
    plain = prepare("openai-gpt-oss-120b", params)
    assert (plain.params.replace(stop=("END",)), plain.params.stop[0]) == (params, "END")
    again = prepare("openai-gpt-oss-120b", plain.params)
    assert again.params == plain.params


def test_warnings_about_a_conversation_come_with_its_request() -> None:
    """Servers and the library report them."""
    turn = replace(next_turn([{"role": "user", "content": "Hi"}]), warnings=("messages[0]: altered",))
    chat_format = ChatFormat(demo(), "chatml")
    assert prepare_chat(chat_format, turn).warnings == ("messages[0]: altered",)


def test_a_chat_without_tools_and_schemas_is_free(prepare: Prepare) -> None:
    """Nothing is constrained, and the defaults equal `SamplingParams`'s."""
    request = prepare(None)
    assert request.params.replace(stop=()) == SamplingParams()
    assert request.rendered.text.endswith(request.rendered.generation_prompt)


def test_a_named_tool_is_the_only_one_that_is_offered(prepare: Prepare) -> None:
    """It is required, and the prompt has no other."""
    request = prepare("Qwen-Qwen3-0.6B", tools=TOOLS, tool_choice=CLOCK)
    assert request.params.grammar is not None
    assert not request.params.grammar_lazy
    assert ("clock" in request.params.grammar, "weather" in request.params.grammar) == (True, False)
    assert '"name": "weather"' not in request.rendered.text


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "LFM2-8B-A1B"])
def test_a_required_call_cannot_be_put_off(prepare: Prepare, name: str) -> None:
    """Nothing but thinking may come in front of it: a story would have no end."""
    params = prepare(name, tools=TOOLS, tool_choice="required").params
    with Sampler(params, demo(), is_masked=True) as sampler, pytest.raises(InvalidParams, match="does not allow"):
        accept_all(sampler, demo().tokenizer.encode("Once upon a time", add_special=False))


def test_tools_that_may_not_be_called_are_rendered_all_the_same(prepare: Prepare) -> None:
    """As in llama.cpp: the conversation may have calls of them. The parser leaves call-like text in the content."""
    request = prepare("Qwen-Qwen3-0.6B", tools=TOOLS, tool_choice="none")
    assert '"name": "weather"' in request.rendered.text
    assert request.params.grammar is None


def test_one_call_at_most_where_several_are_not_wanted(prepare: Prepare) -> None:
    """By the grammar: behind the first call there is nothing but the end."""
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    for parallel in (False, True):
        params = prepare("Qwen-Qwen3-0.6B", tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel).params
        with Sampler(params, demo(), is_masked=True) as sampler:
            accept_all(sampler, demo().tokenizer.encode(call, add_special=False))
            allowed = bits(sampler.allowed_mask(), sampler.n_vocab)
            assert (demo().tokenizer.encode("<", add_special=False)[-1] in allowed) == parallel
            assert demo().tokenizer.special_tokens["eot"] in allowed


def test_control_tokens_that_the_parser_reads_are_shown(prepare: Prepare) -> None:
    """The vocabulary's control tokens; a mark of several tokens is text in any case."""
    request = prepare(None, tools=TOOLS)
    pieces = demo().tokenizer.pieces(True)
    texts = [pieces[token].decode() for token in request.preserved_tokens]
    assert set(texts) <= set(request.rendered.preserved_tokens)
    known = {text for text in request.rendered.preserved_tokens if demo().tokenizer.token_id(text) is not None}
    assert len(texts) == len(known)


def test_a_schema_constrains_the_content_alone_where_it_stands_bare(prepare: Prepare) -> None:
    """It stays the caller's schema; in formats with marks around the content it is part of the format's grammar."""
    bare = prepare("Qwen-Qwen3-0.6B", json_schema=SCHEMA)
    assert (bare.params.grammar, bare.params.json_schema is not None) == (None, True)
    assert bare.params == prepare("Qwen-Qwen3-0.6B", SamplingParams(json_schema=SCHEMA)).params
    marked = prepare("openai-gpt-oss-120b", json_schema=SCHEMA)
    assert (marked.params.grammar is not None, marked.params.json_schema) == (True, None)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**SCHEMA, "minProperties": 5}, "#/minProperties"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "#/uniqueItems"),
    ],
)
def test_a_schema_within_the_formats_grammar_is_enforced_whole(prepare: Prepare, schema: Any, place: str) -> None:
    """A keyword that the grammar would leave out is refused by its name and place."""
    with pytest.raises(GrammarError, match=f"json_schema: {place}: "):
        prepare("openai-gpt-oss-120b", json_schema=schema)


@pytest.mark.parametrize("name", ["regex", "choice", "grammar"])
def test_other_constraints_need_bare_content_and_no_tools(prepare: Prepare, name: str) -> None:
    """The message names the constraint, and the way out."""
    params = SamplingParams(**{name: ("a",) if name == "choice" else 'root ::= "a"'})
    assert getattr(prepare("Qwen-Qwen3-0.6B", params).params, name) == getattr(params, name)
    with pytest.raises(Unsupported, match=f"^{name}: .* constrain a completion"):
        prepare("openai-gpt-oss-120b", params)
    with pytest.raises(InvalidParams, match=f"^{name} and tools exclude each other"):
        prepare("Qwen-Qwen3-0.6B", params, tools=TOOLS)
    assert prepare("Qwen-Qwen3-0.6B", params, tools=TOOLS, tool_choice="none").params.grammar == params.grammar


@pytest.mark.parametrize(
    ("name", "call", "content"),
    [
        (
            "Qwen-Qwen3-0.6B",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
            '<think>\nHm.\n</think>\n\n{"answer": "rain"}',
        ),
        (
            "Qwen3-Coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
            '{"answer": "rain"}',
        ),
    ],
)
def test_a_schema_with_tools_allows_either(prepare: Prepare, name: str, call: str, content: str) -> None:
    """A call of a tool, or content of the schema; nothing else. The parser of the tools reads both."""
    request = prepare(name, tools=TOOLS, json_schema=SCHEMA)
    encode = demo().tokenizer.encode
    for text in (call, content):
        with Sampler(request.params, demo(), is_masked=True) as sampler:
            accept_all(sampler, encode(text, add_special=False))
            assert demo().tokenizer.special_tokens["eot"] in bits(sampler.allowed_mask(), sampler.n_vocab)
    for other in (content.replace("answer", "other"), content.replace('{"', 'No {"')):
        with (
            Sampler(request.params, demo(), is_masked=True) as sampler,
            pytest.raises(InvalidParams, match="does not allow"),
        ):
            accept_all(sampler, encode(other, add_special=False))
    parser = MessageParser(request.rendered)
    assert [item.name for item in parser.parse(call).tool_calls] == ["weather"]
    assert parser.parse(content).content.strip() == '{"answer": "rain"}'


def test_a_call_that_is_required_wins_over_a_schema(prepare: Prepare) -> None:
    """A call has no content; a warning says that the schema was left out."""
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        plain = prepare("Qwen-Qwen3-0.6B", tools=TOOLS, tool_choice=choice)
        both = prepare("Qwen-Qwen3-0.6B", tools=TOOLS, tool_choice=choice, json_schema=SCHEMA)
        assert (both.params, both.rendered) == (plain.params, plain.rendered)
        assert [warning.partition(",")[0] for warning in both.warnings] == ["json_schema: the schema was left out"]


@pytest.mark.parametrize("schema", ["true", "5", "[]"])
def test_a_schema_in_a_marked_format_is_an_object(prepare: Prepare, schema: str) -> None:
    """Others are refused with the field, and not taken for anything."""
    with pytest.raises(PacelineError, match="json_schema"):
        prepare("openai-gpt-oss-120b", SamplingParams(json_schema=schema))


def test_a_chat_that_is_not_parsed_is_content(prepare: Prepare) -> None:
    """Tools are in the prompt, nothing constrains calls, and none can be required."""
    request = prepare("Qwen-Qwen3-0.6B", tools=TOOLS, skip_parsing=True)
    assert '"name": "weather"' in request.rendered.text
    assert (request.params.grammar, request.preserved_tokens, request.rendered.parser) == (None, (), "")
    with pytest.raises(Unsupported, match="tool_choice"):
        prepare("Qwen-Qwen3-0.6B", tools=TOOLS, tool_choice="required", skip_parsing=True)
    assert prepare(None, SamplingParams(choice=("a", "b")), skip_parsing=True).params.choice == ("a", "b")


@pytest.mark.parametrize(
    ("start", "ends", "prompt", "is_open"),
    [
        ("<think>", ("</think>",), "<|im_start|>assistant\n<think>\n", True),
        ("<think>", ("</think>",), "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>", ("</think>",), "<|im_start|>assistant\n", False),
        ("<think>", ("</think>",), "<think>a</think>b<think>c", True),
        ("<think>", ("</end>", "</think>"), "<think>a</think>", False),
        ("", ("</think>",), "anything", False),
    ],
)
def test_thinking_is_open_where_the_prompt_has_begun_it(
    start: str, ends: tuple[str, ...], prompt: str, is_open: bool
) -> None:
    """By the last mark of the prompt's end."""
    rendered = RenderedPrompt(text=prompt, thinking_start=start, thinking_ends=ends, generation_prompt=prompt)
    assert is_thinking_open(rendered) is is_open


def test_a_format_without_tools_refuses_them() -> None:
    """Before anything is generated."""
    with pytest.raises(Unsupported, match=SAYS_NOTHING_OF_TOOLS):
        prepare_chat(ChatFormat(demo(), CHATML), next_turn(ASKED), ChatOptions(tools=TOOLS))


def test_a_budget_of_nothing_turns_thinking_off_where_the_template_can(prepare: Prepare) -> None:
    """Unless a variable says otherwise."""
    off = prepare("Qwen-Qwen3-0.6B", kwargs={"enable_thinking": False})
    assert prepare("Qwen-Qwen3-0.6B", thinking_budget=0).rendered.text == off.rendered.text
    kept = prepare("Qwen-Qwen3-0.6B", thinking_budget=0, kwargs={"enable_thinking": True})
    assert kept.rendered.text != off.rendered.text
    assert prepare("Qwen-Qwen3-0.6B", thinking_budget=5).rendered.text == kept.rendered.text


def test_thinking_is_pointed_out_to_what_depends_on_it(prepare: Prepare) -> None:
    """A schema, a lazy grammar and a budget; not for free text, and not if the prompt ends after thinking."""
    name = "Qwen-Qwen3-0.6B"
    assert prepare(name).params.thinking is None
    expected = ThinkingParams(start="<think>", ends=("</think>",))
    for options in ({"json_schema": SCHEMA}, {"tools": TOOLS}):
        assert prepare(name, **options).params.thinking == expected
        assert prepare(name, **options, kwargs={"enable_thinking": False}).params.thinking is None
    limited = prepare(name, thinking_budget=7, thinking_message="So.").params.thinking
    assert limited == ThinkingParams(start="<think>", ends=("</think>",), budget=7, message="So.")
    begun = prepare("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", thinking_budget=7)
    assert isinstance(begun.params.thinking, ThinkingParams)
    assert begun.params.thinking.is_open == is_thinking_open(begun.rendered)
    assert prepare("openai-gpt-oss-120b", thinking_budget=7).params.thinking is not None
    own = SamplingParams(thinking=ThinkingParams(start="<a>", ends=("</a>",)))
    assert prepare(name, own, thinking_budget=7).params.thinking == own.thinking


JSON = '{"answer": "x"}'
ALL_OF_A_SCHEMA = ({}, {"kwargs": {"enable_thinking": False}}, {"reasoning_format": "none"}, {"tools": TOOLS})


def is_complete(params: SamplingParams, text: str) -> bool:
    """Return whether the text may come, and be all."""
    with Sampler(params, demo(), is_masked=True) as sampler, suppress(InvalidParams):
        accept_all(sampler, demo().tokenizer.encode(text, add_special=False))
        return sampler.may_end
    return False


@pytest.mark.parametrize("index", range(len(ALL_OF_A_SCHEMA)))
def test_a_schema_holds_for_the_content_of_every_format(llama_cpp_source: Path, index: int) -> None:
    """Not within thinking that the prompt has begun: it sleeps meanwhile, or the format's grammar has thinking end first."""
    num_open = num_constrained = 0
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        options = ChatOptions(json_schema=SCHEMA, **ALL_OF_A_SCHEMA[index])
        try:
            request = prepare_chat(format_of(path.read_text()), next_turn(ASKED), options)
        except Unsupported:
            continue
        params, num_constrained = request.params, num_constrained + 1
        is_open = is_thinking_open(request.rendered)
        num_open += is_open
        if params.grammar is None:
            assert params.json_schema is not None
            assert not is_open or (params.thinking is not None and params.thinking.is_open), path.stem
        elif is_open:
            assert not is_complete(params, JSON), path.stem
        else:
            with Sampler(params, demo(), is_masked=True) as sampler:
                assert sampler.allowed_mask().any(), path.stem
    assert num_constrained >= (50 if "tools" in ALL_OF_A_SCHEMA[index] else 69)
    assert num_open >= (8 if "kwargs" in ALL_OF_A_SCHEMA[index] else 20)


@pytest.mark.parametrize(("name", "end"), [("Qwen3.5-4B", "</think>"), ("StepFun3.5-Flash", "</think>")])
def test_content_of_a_schema_comes_behind_thinking_with_tools(prepare: Prepare, name: str, end: str) -> None:
    """If the format's own grammar makes the end optional."""
    params = prepare(name, tools=TOOLS, json_schema=SCHEMA).params
    assert is_complete(params, f"Hm.\n{end}\n\n{JSON}")
    assert not is_complete(params, f"Hm.\n{JSON}")


def test_a_begun_content_goes_on_by_the_schema(llama_cpp_source: Path) -> None:
    """In every format; one that does not fit is refused in terms of the chat. Other constraints hold behind it."""
    num_bare = 0
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = format_of(path.read_text())

        def continued(text: str, chat: ChatFormat = chat, **constraint: Any) -> SamplingParams:
            talk = [*ASKED, {"role": "assistant", "content": text}]
            return prepare_chat(chat, next_turn(talk, continues=True), None, SamplingParams(**constraint)).params

        try:
            assert is_complete(continued('{"answer": "', json_schema=SCHEMA), 'yes"}'), path.stem
            with pytest.raises(InvalidParams, match="the begun message does not fit the schema"):
                continued("Sure, the answer", json_schema=SCHEMA)
            assert continued("Sure, ", regex="[a-z]+").regex == "[a-z]+"
            assert is_complete(continued("Sure, ", grammar='root ::= "yes"'), "yes"), path.stem
        except Unsupported:
            continue
        num_bare += 1
    assert num_bare > 60


def test_a_grammar_of_the_format_has_its_own_root(prepare: Prepare) -> None:
    """Whatever root the caller's has."""
    params = SamplingParams(grammar_root="x")
    for options in (
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "json_schema": SCHEMA},
    ):
        request = prepare("Qwen-Qwen3-0.6B", params, **options)
        assert request.params.grammar_root == "root"
        Sampler(request.params, demo(), is_masked=True).close()
    assert prepare("openai-gpt-oss-120b", params, json_schema=SCHEMA).params.grammar_root == "root"


def test_a_required_call_is_one_whatever_is_parsed_of_thinking(prepare: Prepare) -> None:
    """The grammar has the place of thinking that the prompt has begun."""
    request = prepare("Qwen3.5-4B", tools=TOOLS, tool_choice="required", reasoning_format="none")
    with Sampler(request.params, demo(), is_masked=True) as sampler:
        assert sampler.allowed_mask().any()


class StoppingFormat(ChatFormat):
    """A format with three stops: two control tokens, of which the parser reads one, and a text."""

    def render_turn(
        self, turn: Turn, options: ChatOptions | None = None, *, has_call_grammar: bool = False
    ) -> RenderedPrompt:
        """Render with the stops."""
        stops, preserved = ("<|im_start|>", "<|fim_prefix|>", "END"), ("<|fim_prefix|>",)
        return replace(
            super().render_turn(turn, options, has_call_grammar=has_call_grammar),
            stops=stops,
            preserved_tokens=preserved,
        )


def test_stops_that_are_control_tokens_end_a_message() -> None:
    """Their text is hidden, so that no stop text is found in it. Tokens that the parser reads are shown."""
    request = prepare_chat(StoppingFormat(demo(), CHATML), next_turn(ASKED), None, SamplingParams(stop_token_ids=(5,)))
    start = demo().tokenizer.token_id("<|im_start|>")
    assert request.rendered.stop_token_ids == (start,)
    assert request.params.stop_token_ids == (5, start)
    assert request.params.stop == ("<|im_start|>", "<|fim_prefix|>", "END")


def test_rules_are_renamed_and_nothing_else() -> None:
    """Not in literals, classes, repetitions, comments and tokens."""
    grammar = 'root ::= "a b" [^"\\]a-z] x{2,3} <think> !<[12]> # a "comment\nx ::= "z"'
    renamed = 'a-root ::= "a b" [^"\\]a-z] a-x{2,3} <think> !<[12]> # a "comment\na-x ::= "z"'
    assert _prefixed(grammar, "a-") == renamed
