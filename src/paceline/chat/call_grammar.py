"""From llama.cpp's parser of tool calls to a Lark grammar that holds arguments to their JSON schemas.

llama.cpp's chat layer gets tools with numbered names and with types in place of schemas. Its parser describes the spelling of
calls and the places of arguments; at these places the grammar has the schemas of the tools. Pure; any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.chat.argument_texts import quoted_pattern, text_terminal
from paceline.chat.call_names import ALIAS, CallNames, resolved, types_of
from paceline.chat.tool_schemas import escaped, part_of
from paceline.constraints import check_constraint
from paceline.constraints.nesting import reference_resolver
from paceline.errors import GrammarError
from paceline.params import SamplingParams
from paceline.request import cached_in_scope

_LIMITS: Final = frozenset(("enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf"))
_CONTROL_TOKEN: Final = re.compile(r"<\[\d+\]>")
_TOO_LARGE: Final = "the schemas of all tools together do not compile; offer fewer tools"
_SPACE: Final = r"SPACE: / |\n{1,2}[ \t]{0,20}/"  # the rule of that name in llama.cpp's grammars


Unenforced = tuple[int, str, str]
"""A part of a schema that is not enforced: the number of the tool, the JSON pointer and the reason."""


class Untranslatable(Exception):
    """A part of the parser has no equivalent in a Lark grammar."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The spelling of calls, with the real names of the tools.

    Attributes:
        parser: llama.cpp's parser of the format, serialised.
        grammar: GBNF grammar that allows any JSON as arguments; None: the format has no grammar.
        lark: Lark grammar of the calls alone, with the schemas of their arguments; None: it does not compile.
        unenforced: Parts of schemas that the Lark grammar does not enforce.
    """

    parser: str
    grammar: str | None
    lark: str | None
    unenforced: tuple[Unenforced, ...]


@cached_in_scope(maxsize=64)
def call_syntax(
    parser: str, grammar: str | None, names: CallNames, control_ids: tuple[tuple[str, int], ...]
) -> CallSyntax | None:
    """Return the spelling of calls; None if no Lark grammar can be written from the parser.

    Args:
        parser: llama.cpp's parser of the format, serialised, with the names of `CallNames`.
        grammar: Its GBNF grammar, with these names.
        names: The tools and their aliases.
        control_ids: Ids of the control tokens that the parser reads as text, by that text.
    """
    writer = _Writer(json.loads(parser), names, dict(control_ids))
    try:
        lark: str | None = writer.grammar()
    except Untranslatable:
        return None
    unenforced = tuple(writer.unenforced)
    try:  # with a vocabulary of bytes, whose control token stands for all others
        check_constraint(SamplingParams(lark=_CONTROL_TOKEN.sub("<[256]>", str(lark))))
    except GrammarError:
        lark, unenforced = None, tuple((index, "#", _TOO_LARGE) for index, _ in enumerate(names.tools))
    named = None if grammar is None else names.in_grammar(grammar, is_loose=True)
    return CallSyntax(names.in_parser(parser), named, lark, unenforced)


@dataclass(frozen=True, slots=True)
class _Until:
    """Text that ends where one of the delimiters begins."""

    delimiters: tuple[str, ...]
    place: str  # the alias of the argument that it is, or nothing


@dataclass(frozen=True, slots=True)
class _Optional:
    """Optional parts that end with free text."""

    items: tuple[Any, ...]


_Item = str | tuple[str] | _Until | _Optional  # an expression, a literal in a tuple, or what the next literal ends


class _Writer:
    def __init__(self, arena: Mapping[str, Any], names: CallNames, control_ids: Mapping[str, int]) -> None:
        self._nodes, self._rule_ids = arena["parsers"], arena["rules"]
        self._names, self._control_ids = names, control_ids
        self._rules: dict[tuple[int, str], str] = {}  # names of written rules, by node and argument
        self._lines: dict[str, str] = {}
        self._line_names: dict[str, str] = {}  # of terminals and schemas, by their bodies
        self._place = ""  # alias of the argument whose value comes next
        self._num_repeated = 0  # open repetitions
        self._held: set[tuple[int, str]] = set()  # tools and pointers of the schemas that the grammar holds
        self.unenforced: dict[Unenforced, None] = {}
        if control_ids:
            self._control = re.compile("|".join(sorted(map(re.escape, control_ids), key=len, reverse=True)))

    def grammar(self) -> str:
        roots = [rule_id for rule_id in self._rule_ids.values() if self._nodes[rule_id].get("trigger")]
        if not roots:
            raise Untranslatable("no rule of the parser begins calls")
        starts = [self._rule(rule_id) for rule_id in sorted(roots)]
        for index, tool in enumerate(self._names.tools):
            pointers = [f"#/properties/{escaped(name)}" for name in tool.properties]
            if (index, "#") in self._held:
                continue
            if tool.has_too_many_properties or any((index, pointer) not in self._held for pointer in pointers):
                raise Untranslatable("arguments of which the parser does not say that they conform to a schema")
        return "\n".join(
            [f"start: {' | '.join(starts)}", *(f"{name}: {body}" for name, body in self._lines.items()), _SPACE]
        )

    # ---- rules and terminals

    def _rule(self, node_id: int) -> str:
        place = self._place
        key = (node_id, place)
        if key not in self._rules:
            name = self._rules[key] = f"r{len(self._rules)}"
            body = self._expression(self._nodes[node_id]["child"])
            self._lines[name] = body or '""'
            self._place = place
        return self._rules[key]

    def _named(self, prefix: str, body: str) -> str:
        """Return the name of the terminal or schema with this body; write it if it is new."""
        name = self._line_names.setdefault(body, f"{prefix}{len(self._lines)}")
        self._lines[name] = body
        return name

    # ---- expressions

    def _expression(self, node_id: int) -> str:
        """Return the expression of a node; empty if the node consumes no text."""
        return self._joined(self._items(node_id))

    def _joined(self, items: Sequence[_Item]) -> str:
        """Return the expression of a sequence of parts. Free text becomes one terminal with the literal that follows it."""
        rest = _merged(items)
        found = []
        while rest:
            item, *rest = rest
            following = rest[0][0] if rest and isinstance(rest[0], tuple) else None
            if isinstance(item, tuple):
                found.append(self._literal(item[0]))
            elif isinstance(item, str):
                found.append(item)
            elif following is not None and isinstance(item, _Optional):
                found.append(f"({self._joined([*item.items, (following,)])} | {self._literal(following)})")
                rest = rest[1:]
            elif following is not None and isinstance(item, _Until):
                text, left = self._until(item, following)
                found.append(text)
                rest = [(left,), *rest[1:]]
            elif isinstance(item, _Until) and all(isinstance(part, str) and part.endswith("?") for part in rest):
                found.append("/(?s:.+)/?")  # at the end, where it is content
            else:
                raise Untranslatable("free text without a text that ends it")
        return " ".join(part for part in found if part)

    def _items(self, node_id: int) -> list[_Item]:
        node = self._nodes[node_id]
        kind = node["type"]
        write = getattr(self, f"_items_{kind}", None)
        if write is None:
            raise Untranslatable(f"a part of the type {kind!r}")
        found: list[_Item] = write(node, node_id)
        return found

    def _items_epsilon(self, _: Any, __: int) -> list[_Item]:
        return []

    _items_start = _items_end = _items_and = _items_not = _items_epsilon

    def _items_literal(self, node: Any, _: int) -> list[_Item]:
        text = node["literal"]
        for match in ALIAS.finditer(text):
            if match[2]:
                self._place = match[0]
                self._note_required(match[0])
        return [(self._names.in_text(text),)] if text else []

    def _items_sequence(self, node: Any, _: int) -> list[_Item]:
        return [item for child in node["children"] for item in self._items(child)]

    def _items_choice(self, node: Any, _: int) -> list[_Item]:
        place, found = self._place, []
        for child in node["children"]:
            self._place = place
            found.append(self._expression(child))
        self._place = place
        some = list(dict.fromkeys(part for part in found if part))
        if not some:
            return []
        return [f"({' | '.join(some)}){'' if len([part for part in found if part]) == len(found) else '?'}"]

    def _items_repetition(self, node: Any, _: int) -> list[_Item]:
        place, least, most = self._place, node["min_count"], node["max_count"]
        self._num_repeated += most != 1
        items = self._items(node["child"])
        if items and isinstance(items[-1], _Until) and (least, most) == (0, 1):
            if self._nodes[node["child"]].get("tag") == "content":
                return ["/(?s:.+)/?"]
            return [_Optional(tuple(items))]
        body = self._joined(items)
        self._num_repeated -= most != 1
        self._place = place
        if not body or most == 0:
            return []
        counts = {(0, 1): "?", (0, -1): "*", (1, -1): "+", (1, 1): ""}
        count = counts.get((least, most), f"{{{least},{'' if most == -1 else most}}}")
        return [f"({body}){count}"]

    def _items_any(self, _: Any, __: int) -> list[_Item]:
        return ["/(?s:.)/"]

    def _items_space(self, _: Any, __: int) -> list[_Item]:
        return ["SPACE?"]

    def _items_chars(self, node: Any, _: int) -> list[_Item]:
        ranges = "".join(f"\\u{{{bounds['start']:x}}}-\\u{{{bounds['end']:x}}}" for bounds in node["ranges"])
        least, most = node["min_count"], node["max_count"]
        body = f"[{'^' if node['negated'] else ''}{ranges}]"
        counts = f"{{{max(1, least)},{'' if most == -1 else most}}}"
        return [self._named("C", f"/{body}{counts}/") + ("" if least else "?")]

    def _items_string(self, node: Any, _: int) -> list[_Item]:
        delimiter = quoted_pattern(node["delimiter"])
        escape = rf"\\(?:[{delimiter}\\\/ bfnrt]|u[0-9a-fA-F]{{4}})"
        return [self._named("S", rf"/(?:[^{delimiter}\\]|{escape})+/") + "?"]

    def _items_until(self, node: Any, _: int) -> list[_Item]:
        return [_Until(tuple(node["delimiters"]), "")]

    def _items_ac(self, node: Any, _: int) -> list[_Item]:
        place = self._place if self._has_argument(node["child"]) else ""
        (delimiter,) = node["delimiters"] if len(node["delimiters"]) == 1 else (None,)
        if delimiter is None:
            raise Untranslatable("text that ends with one of several texts")
        return [_Until((delimiter,), place), (self._names.in_text(delimiter),)]

    def _items_schema(self, node: Any, _: int) -> list[_Item]:
        found = self._names.schema_of(node["name"])
        if found is None:
            raise Untranslatable(f"a schema of the name {node['name']!r}")
        root, schema, pointer = found
        self._held.add((self._names.tool_index(node["name"]), pointer))
        if schema is not root and isinstance(schema, dict):
            schema = part_of(root, schema, pointer)
        return [self._named("j", f"%json {json.dumps(schema, ensure_ascii=False)}")]

    def _items_rule(self, _: Any, node_id: int) -> list[_Item]:
        return [self._rule(node_id)]

    def _items_ref(self, node: Any, _: int) -> list[_Item]:
        return [self._rule(self._rule_ids[node["name"]])]

    def _items_tag(self, node: Any, _: int) -> list[_Item]:
        if node["tag"] == "tool-arg":
            self._place = ""
        items = self._items(node["child"])
        if node["tag"] == "tool-arg":
            self._place = ""
        if self._place and node["tag"] in ("tool-arg-string-value", "tool-arg-value"):
            return self._argument(items)
        return items

    def _argument(self, items: list[_Item]) -> list[_Item]:
        """Return the parts of an argument's value, held to its schema."""
        found = self._names.schema_of(self._place)
        if found is None:
            return items
        root, schema, pointer = found
        types = types_of(root, schema)
        is_text = any(isinstance(item, _Until) for item in items)
        if is_text and (types is None or "string" in types):
            return [_Until(item.delimiters, self._place) if isinstance(item, _Until) else item for item in items]
        if any(isinstance(item, str) and item.startswith("j") for item in items):
            return items
        is_plain = (
            types is not None and types <= {"boolean", "null", "string"} and not _LIMITS & resolved(root, schema).keys()
        )
        if is_plain and not is_text:
            self._held.add((self._names.tool_index(self._place), pointer))
            return items
        held = self._items_schema({"name": self._place}, 0)
        if is_text or types != frozenset(("string",)):
            return held
        allowed = self._allowed(self._place) or "/.*/"  # also between the other quotes, without anything escaped
        quoted = self._named("Q", rf"/\u{{27}}/ (({allowed}) & /[^\u{{27}}\\\n]*/) /\u{{27}}/")
        return [f"({held[0]} | {quoted})"]

    def _note_required(self, place: str) -> None:
        """Report that a format lets a required property be left out."""
        root, _, pointer = self._names.schema_of(place) or ({}, None, "")
        index = self._names.tool_index(place)
        required = resolved(root, root).get("required", ())
        if self._num_repeated and any(pointer == f"#/properties/{escaped(str(name))}" for name in required):
            self.unenforced[index, "#/required", "this chat format lets any argument be left out"] = None

    def _items_atomic(self, node: Any, _: int) -> list[_Item]:
        return self._items(node["child"])

    def _items_gbnf(self, node: Any, _: int) -> list[_Item]:
        name = node["grammar"]
        if name and name not in self._rule_ids:
            raise Untranslatable("a grammar of its own")
        return [self._rule(self._rule_ids[name])] if name else []

    # ---- texts

    def _literal(self, text: str) -> str:
        """Return the expression of a text. Its control tokens become token ids."""
        if not self._control_ids:
            return _lark_text(text)
        found, start = [], 0
        for match in self._control.finditer(text):
            found += [_lark_text(text[start : match.start()]), self._control_token(match[0])]
            start = match.end()
        return " ".join(part for part in (*found, _lark_text(text[start:])) if part)

    def _control_token(self, text: str) -> str:
        return f"<[{self._control_ids[text]}]>"

    def _until(self, item: _Until, following: str) -> tuple[str, str]:
        """Return the expression of free text with its delimiter, and the rest of the text that follows."""
        delimiters = [self._names.in_text(text) for text in item.delimiters]
        delimiter = next((text for text in delimiters if following.startswith(text)), None)
        if delimiter is None:
            raise Untranslatable("free text without a text that ends it")
        allowed = self._allowed(item.place)
        without = " ".join(f"& ~/(?s:.*){quoted_pattern(text)}(?s:.*)/" for text in delimiters)
        first = self._control.match(delimiter) if self._control_ids else None
        if first is not None:  # no text has the control token
            text = self._named("T", f"({allowed or '/(?s:.+)/'}) {without} & /(?s:.+)/")
            return f"{text}? {self._control_token(first[0])}", following[first.end() :]
        if self._control_ids and self._control.search(delimiter):
            raise Untranslatable("free text that ends with a text and a control token")
        end = quoted_pattern(delimiter)
        body = f"(({allowed or '/(?s:.*)/'}) /{end}/) & ~/(?s:.*){end}(?s:.+)/"
        for other in delimiters:
            if other != delimiter:
                body += f" & ~/(?s:.*){quoted_pattern(other)}(?s:.*)/"
        return self._named("T", body), following[len(delimiter) :]

    def _allowed(self, place: str) -> str | None:
        """Return the expression of the texts that the schema of an argument allows; None: any text."""
        found = self._names.schema_of(place)
        if found is None:
            return None
        root, schema, pointer = found
        index = self._names.tool_index(place)
        self._held.add((index, pointer))

        def report(keyword: str, reason: str) -> None:
            self.unenforced[index, f"{pointer}/{keyword}".rstrip("/"), reason] = None

        return text_terminal(schema, reference_resolver(dict(root)), report)

    def _has_argument(self, node_id: int) -> bool:
        node = self._nodes[node_id]
        if node["type"] == "tag" and node["tag"] == "tool-arg-string-value":
            return True
        children = node.get("children") or ([node["child"]] if "child" in node else [])
        return any(self._has_argument(child) for child in children)


def _merged(items: Sequence[_Item]) -> list[_Item]:
    """Join consecutive literals, and leave out empty parts."""
    merged: list[_Item] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, tuple) and isinstance(last, tuple):
            merged[-1] = (last[0] + item[0],)
        elif item != "":
            merged.append(item)
    return merged


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
