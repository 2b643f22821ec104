"""A model's chat format: renders a conversation as a prompt, and knows how its messages, thinking and tool calls are spelt.

Templates are Jinja, run by llama.cpp within limits (steps, text put together, depth, seconds of CPU), so that no
conversation and no template hangs or ends the process. llama.cpp's chat layer infers from the template how tool calls and
thinking look; it provides the grammar that constrains them and the parser that reads them.

A format is constant once made. Any thread may use it, and several at once: each rendering has variables and a stack of
its own. Keep it off the engine's thread and off an event loop, because rendering can take seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from paceline import validation
from paceline.chat.call_grammar import CallNames, Form, Unenforced, call_syntax, with_plain_types
from paceline.chat.conversation import Turn, parse_messages
from paceline.chat.message_fitter import TOOL_MARK, MessageFitter
from paceline.chat.message_parts import checked_json, checked_schema
from paceline.chat.message_rewrites import Message, for_template, joined_text, with_fitted_contents
from paceline.chat.tools import CallTool, Tool, parse_tool_choice, parse_tools
from paceline.constraints import check_constraint
from paceline.constraints.gbnf_schemas import check_keywords
from paceline.constraints.schema_walk import MAX_CHECKS, Check, relaxed
from paceline.errors import GrammarError, InvalidParams, InvalidType, TemplateError, TextTooLong, Unsupported
from paceline.params import SamplingParams
from paceline.request import cached_in_scope
from paceline.runtime import Model, Sampler
from paceline.runtime.model import ChatPrompt, CompiledTemplate
from paceline.runtime.sampler import grammar_of_schema

MAX_BYTES = 32 << 20  # of a conversation, as JSON
MAX_KWARGS_BYTES = 1 << 20
MAX_KWARGS_DEPTH = 64
_MAX_RELAXED = 32  # sets of tools that are kept with their schemas
_MAX_CACHED_CHARS = 2**20  # of a set of tools, beyond which it is not kept
_PLAIN_TYPES = "tools: this model's chat template fails on their schemas, so that it got one type for each part of them"
_FORMS: tuple[Form, ...] = ("objects", "properties")
_NESTED_ARGUMENTS = "]<]minimax[>["  # in the one template whose calls spell objects within arguments in tags
RESERVED = frozenset(("messages", "tools", "bos_token", "eos_token", "add_generation_prompt"))

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")

_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
NAMED = {"chatml": _CHATML}

_MANY_CALLS, _ONE_CALL = "\ntool-calls ::= (tool-call space)+\n", "\ntool-calls ::= tool-call space\n"

# Options of probes, which show how a template renders messages, whatever else a request asks for.
_BRIEF: Mapping[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_format": "none",
    "enable_thinking": True,
    "add_generation_prompt": True,
}
_BRIEF_TOOL = {
    "type": "function",
    "function": {"name": TOOL_MARK, "description": "", "parameters": {"type": "object", "properties": {}}},
}

# Conditions by which two templates refuse conversations that llama.cpp's chat layer makes for them, each with a mark of theirs.
_REFUSALS = {
    "<|channel|>": (
        '{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}'
    ),
    "[TOOL_CALLS]": (
        "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
        "(message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}"
    ),
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the next message of a conversation.

    Attributes:
        tools: Functions that the model may call, as `parse_tools` takes them.
        tool_choice: "auto" (also None), "none", "required", or a tool, as `parse_tool_choice` takes it. A named tool is
            offered alone, and required.
        parallel_tool_calls: Whether one message may have several calls; None: if the template can. With False only the first
            one counts, whatever the model writes.
        reasoning_format: "none": thinking stays in the content; otherwise it is parsed apart from it.
        skip_parsing: Whether all generated text stays in the content, thinking and tool calls as the model spells them; tools
            are rendered, and nothing makes the model call them.
        untagged_calls: Whether content that is nothing but the JSON of calls is read as calls; see `UntaggedCalls`.
        json_schema: JSON schema of the message's content; None: any content.
        thinking_budget: Most tokens of thinking; 0: none; None: no limit.
        thinking_message: Text that is written when the budget is used up, before the end of thinking.
        kwargs: More variables for the template, of the types that JSON has. `enable_thinking` is a bool.
    """

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    reasoning_format: str = "auto"
    skip_parsing: bool = False
    untagged_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    thinking_budget: int | None = None
    thinking_message: str = ""

    def __post_init__(self) -> None:
        validation.set_defaults(self)


@dataclass(frozen=True, slots=True)
class GrammarTrigger:
    """The beginning of a text that switches a lazy grammar on.

    Attributes:
        kind: "word" (a text anywhere), "token" (a token's text), "pattern" (a regular expression that is searched for) or
            "pattern_full" (one that the whole text matches).
        value: The text or expression.
    """

    kind: Literal["token", "word", "pattern", "pattern_full"]
    value: str


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as a prompt, and how to constrain and read the text that the model generates after it.

    Attributes:
        text: The prompt. The template's own bos and eos are left out if the vocabulary adds them.
        stops: Texts that end a turn in this format, beside the end-of-generation tokens of the vocabulary.
        stop_token_ids: Control tokens that end a turn, which `prepare_chat` puts in place of texts.
        inputs: Ranges (start, end) of `text` in characters that came from the messages, ascending. In these
            `ChatFormat.encode` recognises no control token.
        format: llama.cpp's name of the format, for example "peg-native".
        grammar: GBNF of the texts that the tools, or a JSON schema, allow; None: unconstrained.
        is_grammar_lazy: Whether text is free until a trigger has come.
        triggers: Texts that begin the grammar.
        preserved_tokens: Control tokens that the parser reads, and that generated text therefore has to show.
        is_continued: Whether the prompt ends within a message; the parser returns the rest alone.
        supports_thinking: Whether the format has a place for thinking.
        thinking_start: The text that begins thinking, for example "<think>"; empty if there is none.
        thinking_ends: Texts that end thinking.
        generation_prompt: The end of `text` with which the message to parse begins.
        parser: The parser of the format, serialised; see `message_parser`.
        is_one_call: Whether only the first tool call of the message counts.
        warnings: Parts of the tools' schemas that generated arguments may violate.
        eog_ids: End-of-generation tokens of the vocabulary, which end a turn as well.
        call_grammar: Lark grammar of the calls, which holds their arguments to the schemas; None: `grammar` does.
        untagged_tools: Tools whose calls may also be the JSON alone; see `UntaggedCalls`.
    """

    text: str
    stops: tuple[str, ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()
    format: str = "Content-only"
    grammar: str | None = None
    is_grammar_lazy: bool = False
    triggers: tuple[GrammarTrigger, ...] = ()
    preserved_tokens: tuple[str, ...] = ()
    is_continued: bool = False
    supports_thinking: bool = False
    thinking_start: str = ""
    thinking_ends: tuple[str, ...] = ()
    generation_prompt: str = ""
    parser: str = ""
    is_one_call: bool = False
    stop_token_ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    eog_ids: frozenset[int] = frozenset()
    call_grammar: str | None = None
    untagged_tools: tuple[CallTool, ...] = ()


class ChatFormat:
    """The chat format of one model: by its own template, or by one that replaces it.

    Attributes:
        tokenizer: The tokenizer of the model.
        source: The template's Jinja source.
        bos: The text of the beginning-of-text token (`bos_token` in templates); empty if there is none.
        eos: The text of the end-of-text token (`eos_token` in templates); empty if there is none.
        capabilities: The abilities of the template, by llama.cpp's names, for example `supports_tool_calls`; of the variant for
            tools.
    """

    def __init__(self, model: Model, template: str | None = None) -> None:
        """Compile the template, and its variant for tools if the model has one.

        Args:
            model: The model; one loaded with `vocab_only` will do.
            template: In place of the model's default template: the name of another one that the model has, "chatml", or
                Jinja source.

        Raises:
            Unsupported: The model has no template and none was given.
            TemplateError: The source does not parse, or has no Jinja in it.
        """
        self._model, self.tokenizer = model, model.tokenizer
        self._default = model.compile_chat_template(_without_refusals(_source(model, template)))
        for_tools = model.chat_template("tool_use") if template is None else None
        self._for_tools = model.compile_chat_template(_without_refusals(for_tools)) if for_tools else self._default
        self.source, self.bos, self.eos = self._default.source, self._default.bos, self._default.eos
        self.capabilities = self._for_tools.capabilities
        self._fitter = MessageFitter()
        self._relaxed = cached_in_scope(_MAX_RELAXED)(_relaxed_tools)
        self._forms: dict[str, Form] = {}  # by the source of a template, that of its latest rendering

    def render(
        self,
        messages: object,
        *,
        options: ChatOptions | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render a conversation as a prompt. The GIL is released meanwhile.

        Args:
            messages: The conversation, as `parse_messages` takes it.
            options: Tools, thinking and structure of the next message.
            add_generation_prompt: Whether the prompt ends at the beginning of the assistant's next message.
            continue_final_message: Whether the prompt ends within the last message, which the model continues;
                add_generation_prompt is ignored then.
            kwargs: In place of `options.kwargs`.

        Raises:
            InvalidParams: A message, a tool or a variable is malformed; the message names the place.
            GrammarError: `options.json_schema` has a keyword that is not enforced.
            Unsupported: A message has images or audio, or a tool is no function.
            TextTooLong: The conversation has more than 32 MiB.
            TemplateError: The template refuses the conversation, fails, or exceeds its limits of steps, time or memory.
        """
        generate = validation.boolean("add_generation_prompt", add_generation_prompt)
        continues = validation.boolean("continue_final_message", continue_final_message)
        chosen = _checked_options(options)
        if kwargs is not None:
            chosen = replace(chosen, kwargs=kwargs)
        return self.render_turn(Turn(parse_messages(messages), generate, continues), chosen)

    def render_turn(
        self, turn: Turn, options: ChatOptions | None = None, *, has_call_grammar: bool = False
    ) -> RenderedPrompt:
        """Render a turn that `next_turn` returned; otherwise as `render`.

        With `has_call_grammar` the `grammar` of a format that allows it says how calls are spelt, and `call_grammar` has the
        schemas of their arguments, of which it enforces more. Calls may be untagged then, if the options allow it.
        """
        chosen = _checked_options(options)
        tools = parse_tools(chosen.tools)
        choice, offered = parse_tool_choice(chosen.tool_choice, tools)
        template = self._for_tools if offered else self._default
        abilities, parallel = template.capabilities, chosen.parallel_tool_calls
        variables = _checked_kwargs(chosen.kwargs)
        messages = turn.messages[:-1] if turn.continue_final_message else turn.messages
        request: dict[str, Any] = {
            "tool_choice": choice,
            "parallel_tool_calls": abilities["supports_parallel_tool_calls"]
            if parallel is None
            else validation.boolean("parallel_tool_calls", parallel),
            "reasoning_format": validation.choice("reasoning_format", chosen.reasoning_format, REASONING_FORMATS),
            "enable_thinking": validation.boolean("kwargs['enable_thinking']", variables.get("enable_thinking", True)),
            "add_generation_prompt": turn.add_generation_prompt,
            "variables": variables,
        }
        if turn.continue_final_message:
            request["continued"] = _continued(turn.messages[-1])
        if offered:
            if not (abilities["supports_tools"] or abilities["supports_tool_calls"]):
                raise Unsupported(
                    "tools: this model's chat template has none; leave them out, or give a template that has tools"
                )
            shown = [tool.as_json() for tool in offered]
            request["variables"] = {**variables, "tools": shown}  # the template has them as they were given
        if chosen.json_schema is not None:
            request["json_schema"] = checked_schema("json_schema", chosen.json_schema)
            check_keywords(request["json_schema"])

        def render(described: Sequence[Mapping[str, Any]]) -> RenderedPrompt:
            given = {**request, "tools": described} if described else request
            found = self._rendered_for(template, messages, given, variables, offered)
            return replace(found, is_continued=turn.continue_final_message, eog_ids=self.tokenizer.eog_ids)

        if offered:
            rendered, removed = self._render_tools(template, render, offered, choice, has_call_grammar=has_call_grammar)
            warnings = (
                f"tools[{tools.index(offered[index])}] ({offered[index].name}): arguments may violate {pointer}: {reason}"
                for index, pointer, reason in removed
            )
            rendered = replace(rendered, warnings=(*rendered.warnings, *warnings))
            if not validation.boolean("untagged_calls", chosen.untagged_calls):
                rendered = replace(rendered, untagged_tools=())
        else:
            rendered = render([])
        if validation.boolean("skip_parsing", chosen.skip_parsing):
            if choice == "required":
                raise Unsupported("tool_choice: calls that are not parsed cannot be required; use 'auto'")
            return RenderedPrompt(rendered.text, rendered.stops, rendered.inputs, eog_ids=rendered.eog_ids)
        if choice == "required" and rendered.grammar is None:
            raise Unsupported(
                "tool_choice: this model's chat format has no grammar of tool calls, so none can be required; use 'auto'"
            )
        if parallel is not False:
            return rendered
        # llama.cpp's formats of tagged calls have no limit of calls in their grammar.
        grammar = rendered.grammar and rendered.grammar.replace(_MANY_CALLS, _ONE_CALL)
        return replace(rendered, grammar=grammar, is_one_call=True)

    def _fitted(
        self,
        template: CompiledTemplate,
        messages: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> ChatPrompt:
        """Render messages so that none of their texts is lost. request: all but the messages. variables: the caller's."""
        capabilities = template.capabilities

        def applied(options: Mapping[str, Any], shown: list[Message]) -> ChatPrompt:
            given = {**options, "messages": with_fitted_contents(shown, capabilities)}
            encoded = json.dumps(given, ensure_ascii=False).encode()
            if len(encoded) > MAX_BYTES:
                raise TextTooLong(
                    f"messages, tools and kwargs have {len(encoded)} bytes, and may have {MAX_BYTES}; leave some of it out"
                )
            return template.apply(encoded)

        has_tools, fitted = "tools" in request, for_template(messages, capabilities, template.source)
        spelt = hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).digest() if variables else b""
        return self._fitter.render(
            fitted,
            (has_tools, spelt),
            partial(applied, request),
            partial(applied, {**_BRIEF, "variables": variables, **({"tools": [_BRIEF_TOOL]} if has_tools else {})}),
            len(messages) - len(fitted),
            has_tools=has_tools,
        )

    def _rendered_for(
        self,
        template: CompiledTemplate,
        messages: Sequence[dict[str, Any]],
        request: Mapping[str, Any],
        variables: Mapping[str, Any],
        offered: Sequence[Tool],
    ) -> RenderedPrompt:
        """Render, if need be with one type for each part of the tools' schemas, as some templates expect it."""
        try:
            return _rendered(self._fitted(template, messages, request, variables))
        except TemplateError as error:
            plain = [tool.as_json() for tool in offered]
            for tool in plain:  # some templates fail on schemas without a type, or with several
                tool["function"]["parameters"] = with_plain_types(tool["function"]["parameters"])
            if plain == request["variables"].get("tools", []):
                raise
            try:
                given = {**request, "variables": {**variables, "tools": plain}}
                found = _rendered(self._fitted(template, messages, given, variables))
            except TemplateError:
                raise error from None
        return replace(found, warnings=(_PLAIN_TYPES,))

    def _render_tools(
        self,
        template: CompiledTemplate,
        render: Callable[[Sequence[Mapping[str, Any]]], RenderedPrompt],
        tools: Sequence[Tool],
        choice: str,
        *,
        has_call_grammar: bool,
    ) -> tuple[RenderedPrompt, Sequence[Unenforced]]:
        """Render with tools, whose names and schemas cannot break llama.cpp's grammar; also return the parts not enforced."""
        parameters = (json.dumps(tool.as_json()["function"]["parameters"], ensure_ascii=False) for tool in tools)
        described = tuple(zip((tool.name for tool in tools), parameters, strict=True))
        is_kept = sum(len(text) for _, text in described) <= _MAX_CACHED_CHARS
        relax = self._relaxed if is_kept else _relaxed_tools
        syntax_of = call_syntax if is_kept else call_syntax.__wrapped__
        is_nested, known = _NESTED_ARGUMENTS in template.source, self._forms.get(template.source, "objects")
        is_split = has_call_grammar and choice != "none"
        names, removed = relax(described, check_arguments)
        untagged_tools = names.tools if is_split else ()

        def named(rendered: RenderedPrompt) -> RenderedPrompt:
            triggers = tuple(replace(trigger, value=names.in_text(trigger.value)) for trigger in rendered.triggers)
            return replace(rendered, triggers=triggers, untagged_tools=untagged_tools)

        for form in sorted(_FORMS, key=lambda form: form != known) if is_split and not is_nested else ():
            rendered = render(names.described(form))
            controls = ((text, self.tokenizer.token_id(text)) for text in rendered.preserved_tokens)
            control_ids = tuple(
                (text, token) for text, token in controls if token is not None and self.tokenizer.is_control(token)
            )
            syntax = syntax_of(rendered.parser, rendered.grammar, names, control_ids)
            if syntax is not None:
                self._forms[template.source] = form
                rendered = replace(rendered, parser=syntax.parser, grammar=syntax.grammar, call_grammar=syntax.lark)
                return named(rendered), (*removed, *syntax.unenforced)
        names, removed = relax(described, self._check_followed)
        rendered = render(names.described("schemas"))
        if is_split:
            reason = "this chat format has no grammar that holds the arguments of these tools to their schemas"
            removed = tuple((index, "#", reason) for index, tool in enumerate(names.tools) if tool.has_properties)
        rendered = replace(
            rendered,
            parser=names.in_parser(rendered.parser),
            grammar=rendered.grammar and names.in_grammar(rendered.grammar, is_loose=False),
        )
        return named(rendered), () if choice == "none" else removed

    def _check_followed(self, schema: Mapping[str, Any]) -> None:
        Sampler(SamplingParams(grammar=grammar_of_schema(json.dumps(schema))), self._model).close()

    def encode(self, prompt: RenderedPrompt) -> list[int]:
        """Encode a prompt as token ids.

        Text of the messages stays text, even if it spells a control token.

        Raises:
            TextTooLong: The prompt is longer than the tokenizer can take in one piece.
        """
        return self.tokenizer.encode_prompt(prompt.text, prompt.inputs)

    def can_begin(self, params: SamplingParams) -> bool:
        """Return whether the grammar of params allows its prefix.

        Raises:
            GrammarError: The grammar itself is wrong.
        """
        Sampler(params.replace(grammar_prefix=""), self._model).close()
        try:
            Sampler(params, self._model).close()
        except GrammarError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<ChatFormat, {len(self.source)} characters>"


def check_arguments(schema: Mapping[str, Any]) -> None:
    """Raise `GrammarError` for a schema that a Lark grammar does not enforce."""
    check_constraint(SamplingParams(json_schema=schema))


def _relaxed_tools(tools: tuple[tuple[str, str], ...], check: Check) -> tuple[CallNames, tuple[Unenforced, ...]]:
    """Return tools with the parts of their parameters that pass a check, and the parts that do not."""
    found, removed, budget = [], list[Unenforced](), iter(range(MAX_CHECKS))
    for index, (name, text) in enumerate(tools):
        schema, parts = relaxed(json.loads(text), check, budget)
        found.append(CallTool(name, schema))
        removed += [(index, pointer, reason) for pointer, reason in parts]
    return CallNames(found), tuple(removed)


def template_kwargs(variables: Mapping[str, Any], reasoning_effort: str | None) -> dict[str, Any]:
    """Add a request's `reasoning_effort` to the variables of a template, as llama-server does.

    "none" sets `enable_thinking` to False; "default" drops the effort from the variables, so that the template decides;
    any other text is passed on. None and "" change nothing.
    """
    if not reasoning_effort:
        return dict(variables)
    others = {name: value for name, value in variables.items() if name != "reasoning_effort"}
    if reasoning_effort == "none":
        return others | {"enable_thinking": False}
    return others if reasoning_effort == "default" else others | {"reasoning_effort": reasoning_effort}


def _source(model: Model, template: str | None) -> str:
    if template is None:
        own = model.chat_template() or model.chat_template("tool_use")
        if not own:
            raise Unsupported(
                'this model has no chat template; give one as chat_template= (Jinja source, or "chatml" if it was trained so)'
            )
        return own
    name = validation.text("template", template)
    source = model.chat_templates.get(name) or NAMED.get(name, name)
    if "{{" not in source and "{%" not in source:
        names = ", ".join(map(repr, [*model.chat_templates, *NAMED]))
        raise TemplateError(f"template has no Jinja in it: {source[:80]!r}; give the source of a template, or {names}")
    return source


def _without_refusals(source: str) -> str:
    for mark, condition in _REFUSALS.items():
        if mark in source:
            source = source.replace(condition, "{%- if false %}")
    return source


def _checked_options(options: ChatOptions | None) -> ChatOptions:
    if options is None:
        return ChatOptions()
    if not isinstance(options, ChatOptions):
        raise InvalidType(f"options must be a ChatOptions, not {type(options).__name__}")
    if options.json_schema is not None and options.tool_choice not in (None, "auto", "none"):
        raise InvalidParams(
            "json_schema and a tool_choice that requires a call exclude each other; leave one of them out"
        )
    return options


def _continued(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the last message, which the model continues. Parts are joined as llama-server joins them here."""
    text = joined_text(message["content"], "\n\n")
    reasoning = message.get("reasoning_content", "")
    if message["role"] != "assistant" or message.get("tool_calls") or not (text.strip() or reasoning):
        raise InvalidParams(
            "continue_final_message needs a last message of the role assistant that has some text and no tool calls"
        )
    return {"content": text if text.strip() else "", "reasoning_content": reasoning}


def _checked_kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidType(f"kwargs must be a mapping, not {type(kwargs).__name__}")
    if taken := RESERVED.intersection(kwargs):
        raise InvalidParams(f"kwargs cannot set {min(taken)!r}, which the conversation itself decides")
    checked: dict[str, Any] = checked_json("kwargs", kwargs, MAX_KWARGS_DEPTH, MAX_KWARGS_BYTES)
    return checked


def _rendered(prompt: ChatPrompt) -> RenderedPrompt:
    parts = prompt.parts
    ends = [*itertools.accumulate(len(text) for text, _ in parts)]
    spans = zip(parts, [0, *ends], ends, strict=False)
    return RenderedPrompt(
        text="".join(text for text, _ in parts),
        stops=tuple(prompt.stops),
        inputs=tuple((start, end) for (text, is_input), start, end in spans if is_input and text),
        format=prompt.format,
        grammar=prompt.grammar or None,
        is_grammar_lazy=prompt.is_grammar_lazy,
        triggers=tuple(GrammarTrigger(kind, value) for kind, value in prompt.triggers),  # type: ignore[arg-type]
        preserved_tokens=tuple(prompt.preserved_tokens),
        supports_thinking=prompt.supports_thinking,
        thinking_start=prompt.thinking_start,
        thinking_ends=tuple(prompt.thinking_ends),
        generation_prompt=prompt.generation_prompt,
        parser=prompt.parser,
    )
