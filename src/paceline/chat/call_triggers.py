"""Where a format's tool calls begin in a message that may also have none: what switches the grammar of calls on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.chat.chat_format import GrammarTrigger, RenderedPrompt
from paceline.errors import Unsupported
from paceline.params import PatternTrigger
from paceline.runtime import Tokenizer

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


@dataclass(frozen=True, slots=True)
class LazyGrammar:
    """A grammar of calls and what begins it; see `SamplingParams`."""

    text: str
    root: str
    triggers: tuple[str | int | PatternTrigger, ...]


def lazy_grammar_of(
    rendered: RenderedPrompt, names: Sequence[str], tokenizer: Tokenizer, render_required: Callable[[], RenderedPrompt]
) -> LazyGrammar | None:
    """Return the grammar of the calls in a message that may have some; None where the format has no such grammar.

    Args:
        rendered: Of a turn whose calls are not required.
        names: Of the offered tools.
        tokenizer: Of the model.
        render_required: Renders the turn with a call that is required.
    """
    if rendered.grammar is None:
        try:
            required = render_required()
        except Unsupported:  # no calls can be required, since the format has no grammar of them
            return None
        return _bare_calls(required.grammar, names)
    triggers = tuple(
        _trigger(one, tokenizer)
        for one in rendered.triggers
        if not (rendered.is_continued and one.value in _REPLACED)  # a continued message has begun as content
    )
    return LazyGrammar(rendered.grammar, "root", triggers) if triggers else None


def _trigger(trigger: GrammarTrigger, tokenizer: Tokenizer) -> str | int | PatternTrigger:
    if trigger.kind.startswith("pattern"):
        pattern = _REPLACED.get(trigger.value, trigger.value)
        return PatternTrigger(pattern, is_full=trigger.kind == "pattern_full")
    token_id = tokenizer.token_id(trigger.value) if trigger.kind == "token" else None
    return trigger.value if token_id is None else token_id


def _bare_calls(grammar: str | None, names: Sequence[str]) -> LazyGrammar | None:
    """Return the grammar of calls that are JSON objects without a mark in front, as in Llama 3.

    llama.cpp has no trigger for them. A call has begun where the first object of the text has the name of a tool: other
    objects stay free, since an answer may be one.
    """
    found = list(_BARE_CALL.finditer(grammar or ""))
    if grammar is None or {one["name"] for one in found} != set(names):
        return None
    space = _SPACE
    kind = rf'"type"{space}:{space}"function"{space},{space}'
    name = "|".join(re.escape(one) for one in sorted(names))
    optional = f"(?:{kind})?" if all(one["type"] for one in found) else ""
    pattern = rf'^[^{{]*(\{{{space}{optional}"name"{space}:{space}"(?:{name})")'
    if len(pattern) > _MAX_PATTERN_CHARS:
        return None
    return LazyGrammar(grammar, "tool-call", (PatternTrigger(pattern),))
