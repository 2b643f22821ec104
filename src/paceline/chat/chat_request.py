"""From a turn of a conversation to a request of an engine: prompt, stop texts, grammar, and the reader of the result."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.chat.chat_completion import ChatChoice
from paceline.chat.chat_format import ChatFormat, ChatOptions, RenderedPrompt
from paceline.chat.conversation import ChatMedia, Segment, Turn
from paceline.chat.message_parser import MessageParser
from paceline.chat.message_parts import IgnoredMembers
from paceline.chat.tools import Tool, ToolChoice, parse_tool_choice, parse_tools
from paceline.errors import ChatParseError, InvalidParams, PromptTooLong, Unsupported
from paceline.media import is_attachment
from paceline.params import CallGrammar, PatternTrigger, SamplingParams, ThinkingParams
from paceline.runtime import Tokenizer
from paceline.runtime.sampler import grammar_of_schema, spaced_grammar

_MAX_PATTERN_CHARS = 2**14
_SPACE = r"(?: |\n{1,2}[ \t]{0,20})?"  # the rule of that name in llama.cpp's grammars of JSON
_BARE_CALL = re.compile(
    r"""
    ^tool-\S+\ ::=\ "\{"\ space\ (?P<type>\("\\"type\\""\ space\ ":"\ space\ "\\"function\\""\ space\ ","\ space\)\?\ )?
    "\\"name\\""\ space\ ":"\ space\ \("\\""\ "(?P<name>[^"]+)"\ "\\""\)
""",
    re.VERBOSE | re.MULTILINE,
)
# llama.cpp's begins the grammar at the mark, which the grammar does not have, and never at the start of a message, where the
# prompt has the mark already. Behind other text its parser reads no call, so the start is all that counts.
_REPLACED = {">>>(?!all)": r"^(?!a$|al$|all$|all\n)"}


_LazyGrammar = tuple[str, str, tuple[str | int | PatternTrigger, ...]]
"""A grammar of calls, its root and its triggers; see `SamplingParams`."""


def _lazy_grammar_of(
    rendered: RenderedPrompt, names: Sequence[str], tokenizer: Tokenizer, render_required: Callable[[], RenderedPrompt]
) -> _LazyGrammar | None:
    """Return the grammar of the calls in a message that may have calls; None if the format has no grammar of them.

    `rendered` is the prompt without required calls; `render_required` renders it with a required call.
    """
    if rendered.grammar is None:
        try:
            required = render_required()
        except Unsupported:  # no calls can be required, since the format has no grammar of them
            return None
        return _bare_calls(required.grammar, names)
    triggers: list[str | int | PatternTrigger] = []
    for trigger in rendered.triggers:
        if rendered.is_continued and trigger.value in _REPLACED:  # a continued message has begun as content
            continue
        if trigger.kind.startswith("pattern"):
            pattern = _REPLACED.get(trigger.value, trigger.value)
            triggers.append(PatternTrigger(pattern, is_full=trigger.kind == "pattern_full"))
        else:
            token_id = tokenizer.token_id(trigger.value) if trigger.kind == "token" else None
            triggers.append(trigger.value if token_id is None else token_id)
    return (rendered.grammar, "root", tuple(triggers)) if triggers else None


def _bare_calls(grammar: str | None, names: Sequence[str]) -> _LazyGrammar | None:
    """Return the grammar of calls that are JSON objects without a mark in front, as in Llama 3.

    llama.cpp has no trigger for them. A call has begun if the first object of the text has the name of a tool: other
    objects stay free, since an answer may be an object.
    """
    found = list(_BARE_CALL.finditer(grammar or ""))
    if grammar is None or {call["name"] for call in found} != set(names):
        return None
    name = "|".join(re.escape(tool) for tool in sorted(names))
    optional = (
        rf'(?:"type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?' if all(call["type"] for call in found) else ""
    )
    pattern = rf'^[^{{]*(\{{{_SPACE}{optional}"name"{_SPACE}:{_SPACE}"(?:{name})")'
    return None if len(pattern) > _MAX_PATTERN_CHARS else (grammar, "tool-call", (PatternTrigger(pattern),))


_NO_CONTENT = "json_schema: the schema was left out, since tool_choice demands a call, and a call has no content"
_PROBE, _WORD = '{"a":1}', "x"
_TEXT_BEFORE_CALLS = re.compile(r"\buntil-\d+\?? (?=(?:space )?tool-call)")
_RULE_NAME = re.compile(
    r"""
    \#[^\n]* | <[^<>\s]*> | "(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\] | \{[0-9,]*\} | (?P<name>[A-Za-z0-9-]+)
""",
    re.VERBOSE | re.DOTALL,
)  # fmt: skip - names outside of comments, tokens, literals, classes of characters and numbers of repetitions


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A turn that is ready to be generated.

    Attributes:
        rendered: The prompt as text, and the facts by which the message after it is read.
        token_ids: The prompt; of one with images, with their marks.
        params: The caller's, with the stop texts, the grammar and the constraints of the chat format.
        preserved_tokens: Control tokens that the generated text has to show (`RequestOptions.preserved_tokens`).
        media: The images of the prompt; None if it has none.
        warnings: Sentences about parts of the conversation or its tools that were left out or altered.
    """

    rendered: RenderedPrompt
    token_ids: list[int]
    params: SamplingParams
    preserved_tokens: tuple[int, ...] = ()
    media: ChatMedia | None = None
    warnings: tuple[str, ...] = ()

    def prompt(self, tokenizer: Tokenizer) -> Sequence[int] | list[Segment]:
        """Return the prompt for an engine, without special tokens to add: token ids, or segments with images.

        Raises `TemplateError` if the template has not rendered each image once, and in order.
        """
        return (
            self.token_ids
            if self.media is None
            else self.media.segments(self.rendered.text, self.rendered.inputs, tokenizer)
        )


def prepare_chat(
    chat_format: ChatFormat,
    turn: Turn,
    options: ChatOptions | None = None,
    params: SamplingParams | None = None,
    *,
    max_positions: int = 0,
) -> ChatRequest:
    """Render and encode a turn, and decide how its message is constrained.

    Tools make the grammar of their calls: from the first token on if a call is required, otherwise from the point at which the
    model begins one. A constraint of `params` (json_schema, regex, choice, grammar) applies to the content; a JSON schema
    becomes part of the format's own grammar if the content stands between marks. If the prompt has the beginning
    of the content already, a JSON schema applies to the whole content, and other constraints to the generated part.

    Takes time: not on the engine's thread and not on an event loop.

    Args:
        chat_format: The model's.
        turn: Of `next_turn`.
        options: Tools, thinking and variables. Their json_schema counts if `params` have none.
        params: How to generate.
        max_positions: Tokens that a prompt may have. A rendered text with more bytes than that many tokens can have is not
            encoded. 0: no limit.

    Raises:
        PromptTooLong: The text has more tokens than `max_positions` for certain. A prompt may be longer than that without this
            error.
        InvalidParams: A message, a tool or an option is malformed, or options exclude each other.
        GrammarError: The schema cannot be enforced.
        Unsupported: The format has no place for tools, or for constrained content.
        TemplateError: The template refuses the conversation, or fails.
        TextTooLong: The conversation is too long.
    """
    chosen, params = options or ChatOptions(), params or SamplingParams()
    if params.json_schema is None and chosen.json_schema is not None:
        params = params.replace(json_schema=chosen.json_schema)
    ignored = IgnoredMembers()
    tools = parse_tools(chosen.tools, ignored)
    chosen, warnings = replace(chosen, json_schema=None), (*turn.warnings, *ignored.warnings())
    may_call = bool(chosen.tools) and not chosen.skip_parsing  # and calls are read as calls
    choice, offered = parse_tool_choice(chosen.tool_choice, tools) if may_call else ("none", ())
    if params.json_schema is not None and choice == "required":
        params, warnings = params.replace(json_schema=None), (*warnings, _NO_CONTENT)
    if chosen.thinking_budget == 0:  # templates that can say so keep the model from wanting to
        chosen = replace(chosen, kwargs={"enable_thinking": False, **(chosen.kwargs or {})})
    preparation = _Preparation(chat_format, turn, chosen, params)
    if choice != "none":
        preparation.add_tools(choice, offered)
    elif preparation.constraint is not None:
        preparation.add_constraint()
    rendered, tokenizer = preparation.rendered, chat_format.tokenizer
    hidden = _ids_of((stop for stop in rendered.stops if stop not in rendered.preserved_tokens), tokenizer)
    # The text of stops that are control tokens is not searched for stop texts.
    rendered = replace(rendered, stop_token_ids=tuple(token for token in hidden if tokenizer.is_control(token)))
    if max_positions:
        text = rendered.text if turn.media is None else turn.media.with_marker(rendered.text, "")
        if (at_least := tokenizer.min_tokens(text)) > max_positions:
            raise PromptTooLong(
                f"the prompt (at least {at_least} tokens) exceeds the available context size ({max_positions} tokens); "
                "shorten the messages",
                at_least,
                max_positions,
                is_counted=False,
            )
    token_ids, params = chat_format.encode(rendered), preparation.params
    stops = (*params.stop, *(stop for stop in rendered.stops if stop not in params.stop))
    ids = (*params.stop_token_ids, *(token for token in rendered.stop_token_ids if token not in params.stop_token_ids))
    if (stops, ids) != (params.stop, params.stop_token_ids):
        params = params.replace(stop=stops, stop_token_ids=ids)
    return ChatRequest(
        rendered,
        token_ids,
        _with_thinking(params, rendered, chosen),
        _ids_of(rendered.preserved_tokens, tokenizer),
        turn.media,
        (*warnings, *(rendered.warnings if choice != "none" else ())),
    )


def is_thinking_open(rendered: RenderedPrompt) -> bool:
    """Return whether a prompt ends within thinking, so that the message begins with it."""
    start, prompt = rendered.thinking_start, rendered.generation_prompt
    if not start or start not in prompt:
        return False
    after = prompt[prompt.rindex(start) + len(start) :]
    return not any(end in after for end in rendered.thinking_ends)


def _constraint_of(params: SamplingParams) -> str | None:
    names = ("json_schema", "grammar", "regex", "choice", "lark", "constraint")
    return next((name for name in names if getattr(params, name) is not None), None)


class _Preparation:
    """Renders a turn, and puts the constraints of the chat format into the params."""

    def __init__(self, chat_format: ChatFormat, turn: Turn, options: ChatOptions, params: SamplingParams) -> None:
        self.params, self.constraint = params, _constraint_of(params)
        self._format, self._turn, self._options = chat_format, turn, options
        self.rendered = self._render(options, has_call_grammar=self.constraint is None)

    def _render(self, options: ChatOptions, *, has_call_grammar: bool = False) -> RenderedPrompt:
        return self._format.render_turn(self._turn, options, has_call_grammar=has_call_grammar)

    def _fix(self, grammar: str, prefix: str) -> None:
        """Set a grammar in place of a schema. It holds for the text after the prefix."""
        self.params = self.params.replace(json_schema=None, grammar=grammar, grammar_root="root", grammar_prefix=prefix)

    def _check_fits(self) -> None:
        """Raise `InvalidParams` if the prompt has the beginning of a content that the params do not allow."""
        if self.rendered.is_continued and not self._format.can_begin(self.params):
            raise InvalidParams("json_schema: the begun message does not fit the schema; leave one of them out")

    def _spaced(self, grammar: str) -> str:
        return spaced_grammar(grammar, is_compact=self.params.disable_any_whitespace)

    def _schema(self) -> Mapping[str, Any]:
        schema = json.loads(str(self.params.json_schema))  # SamplingParams keeps it as text
        if not isinstance(schema, Mapping):
            raise InvalidParams(f"json_schema must be an object in a chat, not {schema!r}")
        return schema

    def add_tools(self, choice: ToolChoice, offered: Sequence[Tool]) -> None:
        if self.constraint == "json_schema":
            self._add_either(offered)
            return
        if self.constraint is not None:
            raise InvalidParams(
                f"{self.constraint} and tools exclude each other: the tools have a grammar of their own; leave one of them out"
            )
        self._add_calls(choice, offered)

    def _add_either(self, offered: Sequence[Tool]) -> None:
        # A grammar has the place of thinking wherever that is shown.
        options = replace(self._options, tools=offered, tool_choice="auto", reasoning_format="auto")
        content = self._render(replace(options, tools=None, json_schema=self._schema()))
        calls = self.rendered
        if calls.grammar is not None:
            calls = self._render(replace(options, tool_choice="required"))
        prompts = {prompt.generation_prompt for prompt in (self.rendered, content, calls)}
        if calls.grammar is None or content.grammar is None or content.is_grammar_lazy or len(prompts) > 1:
            raise Unsupported(
                "json_schema with tools: this model's chat format has no grammar for both; leave one of them out, or set "
                "tool_choice to 'none'"
            )
        # Free text before a call would be a way around the schema.
        first = _TEXT_BEFORE_CALLS.sub("", calls.grammar)
        second = _with_thinking_ended(self._spaced(content.grammar), content)
        grammar = f"root ::= a-root | b-root\n{_prefixed(first, 'a-')}\n{_prefixed(second, 'b-')}\n"
        self._fix(grammar, self.rendered.generation_prompt)
        self._check_fits()

    def add_constraint(self) -> None:
        name, begun = self.constraint, _begun_content(self.rendered)
        if begun is None and name == "json_schema":
            self.rendered = rendered = self._render(replace(self._options, json_schema=self._schema()))
            if rendered.grammar is not None and not rendered.is_grammar_lazy:
                self._fix(_with_thinking_ended(self._spaced(rendered.grammar), rendered), rendered.generation_prompt)
                self._check_fits()
                return
        if begun is None:
            raise Unsupported(
                f"{name}: in this model's chat format the content stands between marks, and it has no grammar for them; "
                "constrain a completion of a prompt instead"
            )
        if begun and name == "json_schema":
            self._fix(self._spaced(grammar_of_schema(str(self.params.json_schema))), begun)
            self._check_fits()

    def _add_calls(self, choice: ToolChoice, offered: Sequence[Tool]) -> None:
        """Set the grammar of the format's tool calls, and the schemas that hold for their arguments."""
        options = replace(self._options, tools=offered, tool_choice=choice)

        def render(choice: str, *, has_call_grammar: bool = True) -> RenderedPrompt:
            shown = replace(options, tool_choice=choice, reasoning_format="auto")  # as in `_add_either`
            return self._render(shown, has_call_grammar=has_call_grammar)

        source, rendered = self.rendered, self.rendered
        if source.grammar is not None and options.reasoning_format == "none":
            source = render(choice)
        is_required = source.grammar is not None and not source.is_grammar_lazy
        lazy = _lazy_grammar_of(
            render("auto") if is_required else source,
            [tool.name for tool in offered],
            self._format.tokenizer,
            lambda: source if is_required else render("required"),
        )
        if lazy is not None and source.call_grammar is not None:
            self.params = self.params.replace(call_grammar=CallGrammar(source.call_grammar, lazy[2]))
        if is_required:
            if source.call_grammar is not None and lazy is None:  # nothing says where the calls begin
                source = render(choice, has_call_grammar=False)
            # Text without end could put off a call that is required.
            self._fix(_TEXT_BEFORE_CALLS.sub("", str(source.grammar)), source.generation_prompt)
        elif lazy is not None:
            grammar, root, triggers = lazy
            self.params = self.params.replace(
                grammar=grammar, grammar_root=root, grammar_lazy=True, grammar_triggers=triggers
            )
        if (
            rendered.grammar is None and self.params.grammar_lazy
        ):  # calls are bare JSON, which the format's parser reads
            self.rendered = replace(rendered, untagged_tools=())


def _prefixed(grammar: str, prefix: str) -> str:
    return _RULE_NAME.sub(lambda found: found[0] if found["name"] is None else prefix + found["name"], grammar)


def _with_thinking_ended(grammar: str, rendered: RenderedPrompt) -> str:
    """Return a format's grammar in which open thinking has to end. With an optional end all text would be thinking."""
    if not is_thinking_open(rendered):
        return grammar
    for end in rendered.thinking_ends:
        literal = json.dumps(end, ensure_ascii=False)
        grammar = grammar.replace(f"({literal} | )", literal).replace(f"{literal}?", literal)
    return grammar


def _begun_content(rendered: RenderedPrompt) -> str | None:
    """Return the part of the content that the prompt has; None if a text after it and open thinking is no content as it is."""
    parser = MessageParser(rendered)
    lead = rendered.thinking_ends[0] if is_thinking_open(rendered) else ""
    try:
        before, parsed = parser.parse(lead + _WORD), parser.parse(lead + _PROBE)
    except ChatParseError:
        return None
    begun = before.content.removesuffix(_WORD)
    is_content = (
        parsed.content.rstrip() == begun + _PROBE
    )  # white space at the end of the lead is a matter of the parser
    if not is_content or parsed.tool_calls or before != replace(parsed, content=begun + _WORD):
        return None
    if lead or not rendered.is_continued:
        return ""
    for end in rendered.thinking_ends:  # which some parsers leave in the content
        begun = begun.rpartition(end)[2]
    return begun


def _with_thinking(params: SamplingParams, rendered: RenderedPrompt, options: ChatOptions) -> SamplingParams:
    """Return the params with the place of thinking, if a constraint, a lazy grammar or a budget depends on it.

    The params stay if the caller has said it, the format has no place of thinking, or the prompt has thinking that ended.
    """
    start, is_open = rendered.thinking_start, is_thinking_open(rendered)
    has_place = bool(start and rendered.thinking_ends) and (is_open or start not in rendered.generation_prompt)
    calls = params.call_grammar
    triggers = (*params.grammar_triggers, *(calls.triggers if isinstance(calls, CallGrammar) else ()))
    # If the beginning of a call ends thinking, as in Qwen 3.5, it has to be looked for in there.
    depends = bool(triggers) and not any(trigger in rendered.thinking_ends for trigger in triggers)
    depends |= _constraint_of(params) is not None and params.grammar is None
    if params.thinking is not None or not has_place or not (depends or options.thinking_budget is not None):
        return params
    thinking = ThinkingParams(
        start=start,
        ends=rendered.thinking_ends,
        is_open=is_open,
        budget=options.thinking_budget,
        message=options.thinking_message,
    )
    return params.replace(thinking=thinking)


def _ids_of(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the texts that are one token; the others are text in any case."""
    found = (tokenizer.token_id(text) for text in texts)
    return tuple(sorted({token for token in found if token is not None}))


class TokenHistory:
    """The last prompt with the text that was generated after it. One thread at a time.

    Attributes:
        token_ids: Prompt and generated tokens, negative in the cells of images.
        text: Their text, with marks of the nonce in place of images.
        nonce: Random text of the marks.
        first_kept: The index of the first message after the system message that the last prompt has.
    """

    def __init__(self, token_ids: Sequence[int] = (), text: str = "") -> None:
        self.token_ids, self.text = tuple(token_ids), text
        self.nonce = secrets.token_hex(16)
        self.first_kept = 0
        self._segments: tuple[Segment, ...] = (list(token_ids),) if token_ids else ()

    @property
    def has_images(self) -> bool:
        """Whether there are images in the prompt."""
        return any(is_attachment(segment) for segment in self._segments)

    def copy(self) -> TokenHistory:
        """Return a history that goes on from here by itself."""
        return copy.copy(self)

    def continued(self, request: ChatRequest, tokenizer: Tokenizer) -> ChatRequest:
        """Return the request with the known ids in front, if its prompt begins with their text.

        Otherwise return it as it is: the template has changed earlier turns, by leaving out their thinking for example, or
        the rest does not begin with a control token, which separates the tokens on both sides of it.
        """
        rendered = request.rendered
        if not self.token_ids or not rendered.text.startswith(self.text):
            return request
        start = len(self.text)
        inputs = [(max(begin, start) - start, end - start) for begin, end in rendered.inputs if end > start]
        rest = tokenizer.encode_prompt(rendered.text[start:], inputs)
        if tokenizer.add_bos and rest[:1] == [tokenizer.bos]:
            rest = rest[1:]
        if not rest or not tokenizer.is_control(rest[0]):
            return request
        return replace(request, token_ids=[*self.token_ids, *rest])

    def segments(self, rendered: RenderedPrompt, images: ChatMedia, tokenizer: Tokenizer) -> list[Segment]:
        """Return a prompt with images as segments. It begins with the known segments, as in `continued`."""

        def hashes(attachments: Iterable[Segment]) -> list[bytes]:
            return [attachment.content_hash for attachment in attachments if is_attachment(attachment)]

        known = hashes(self._segments)
        is_same = known == hashes(images.attachments[: len(known)])
        if self.token_ids and rendered.text.startswith(self.text) and is_same:
            rest = images.segments(rendered.text, rendered.inputs, tokenizer, len(self.text), len(known))
            if rest and isinstance(rest[0], list) and tokenizer.is_control(rest[0][0]):
                return [*self._segments, *rest]
        return images.segments(rendered.text, rendered.inputs, tokenizer)

    def record(
        self,
        request: ChatRequest,
        prompt_token_ids: Sequence[int],
        choice: ChatChoice,
        tokenizer: Tokenizer,
        segments: Sequence[Segment] | None = None,
    ) -> None:
        """Take a reply to a prompt; begin anew if the text is not the text of its tokens, because a stop text has cut it.

        segments: of a prompt with images, which is never truncated.
        """
        is_whole = segments is not None or list(prompt_token_ids) == list(request.token_ids)
        generated = tokenizer.decode(choice.token_ids, special=True)
        if is_whole and generated == choice.text:
            self.token_ids = (*prompt_token_ids, *choice.token_ids)
            self.text = request.rendered.text + choice.text
            before = (list(prompt_token_ids),) if segments is None else tuple(segments)
            self._segments = (*before, list(choice.token_ids)) if choice.token_ids else before
        else:
            self.token_ids, self.text, self._segments = (), "", ()
