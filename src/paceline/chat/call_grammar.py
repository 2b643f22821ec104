"""From llama.cpp's parser of tool calls to a Lark grammar that holds arguments to their JSON schemas.

llama.cpp's chat layer gets tools with numbered names and with types in place of schemas. Its parser describes the spelling of
calls and the places of arguments; at these places the grammar has the schemas of the tools. Pure; any thread.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from paceline.chat.tools import CallTool
from paceline.constraints import check_constraint
from paceline.constraints.llguidance_schemas import DATE_PATTERN, MAX_DIGITS, OCTET, TIME_PATTERN, max_digits
from paceline.constraints.schema_walk import (
    TYPES,
    Resolve,
    escaped,
    part_of,
    pattern_problem,
    quoted_pattern,
    reference_resolver,
    resolved,
    type_of,
)
from paceline.errors import GrammarError
from paceline.params import SamplingParams
from paceline.request import cached_in_scope

ALIAS: Final = re.compile(r"pacelinetool(\d+)x(?:arg(\d+)x)?")
"""An alias of a tool, or of a tool's property."""

_PARSER_TEXT: Final = re.compile(r'"literal":"(?:[^"\\]|\\.)*"|"delimiters":\[(?:"(?:[^"\\]|\\.)*",?)*\]', re.DOTALL)
_GBNF_TEXT: Final = re.compile(r'\[(?:\\.|[^\]\\])*\]|"(?:\\.|[^"\\])*"', re.DOTALL)
_LOOSE_RULES: Final[Mapping[str, str]] = {
    "object": '"{" blanks (string blanks ":" blanks value (blanks "," blanks string blanks ":" blanks value)* blanks)? "}"',
    "array": '"[" blanks (value (blanks "," blanks value)* blanks)? "]"',
    "integral-part": "[0-9]{1,%d}",
    "number": '("-"? integral-part) ("." decimal-part)? ([eE] [-+]? [0-9]{1,2})?',
    "decimal-part": "[0-9]{1,%d} [1-9]?",  # the last digit for numbers that cannot end with zeros
}
_JSON_RULE: Final = re.compile(rf"^({'|'.join(_LOOSE_RULES)}) ::= .*$", re.MULTILINE)


Form = Literal["objects", "properties", "schemas"]
Types = frozenset[str] | None


class CallNames:
    """The aliases of tools and their properties."""

    def __init__(self, tools: Sequence[CallTool]) -> None:
        self.tools = tuple(tools)
        self._properties = [list(tool.properties) for tool in tools]

    def described(self, form: Form) -> list[dict[str, Any]]:
        """Return the tools for llama.cpp's chat layer: with any object, with typed properties, or with their whole schemas."""
        return [
            {
                "type": "function",
                "function": {
                    "name": f"pacelinetool{index}x",
                    "description": "",
                    "parameters": tool.schema
                    if form == "schemas"
                    else self._typed_properties(index)
                    if form == "properties"
                    else {"type": "object"},
                },
            }
            for index, tool in enumerate(self.tools)
        ]

    def _typed_properties(self, index: int) -> dict[str, Any]:
        tool, typed = self.tools[index], dict[str, Any]()
        required = resolved(tool.schema, tool.schema).get("required", ())
        names = {name: f"pacelinetool{index}xarg{number}x" for number, name in enumerate(self._properties[index])}
        for name, schema in tool.properties.items():
            types = types_of(tool.schema, schema) or ()
            known = [kind for kind in TYPES if kind in types]
            typed[names[name]] = {"type": known[0] if len(known) == 1 else known} if known else {}
        return {"type": "object", "properties": typed, "required": [names[name] for name in names if name in required]}

    def in_text(self, text: str) -> str:
        """Replace the aliases in a text by the real names."""
        return ALIAS.sub(self._name, text)

    def in_parser(self, parser: str) -> str:
        """Replace the aliases in a serialised parser by the real names."""

        def spelt(alias: re.Match[str]) -> str:
            return json.dumps(self._name(alias), ensure_ascii=False)[1:-1]

        return _PARSER_TEXT.sub(lambda match: ALIAS.sub(spelt, match[0]), parser)

    def in_grammar(self, grammar: str, *, is_loose: bool) -> str:
        """Replace the aliases in a GBNF grammar by the real names.

        With `is_loose` the grammar allows every spelling of JSON's white space and numbers, but for too many digits. Two
        grammars with different spellings would come to texts that neither of them continues.
        """
        if is_loose:
            limit = str(max((max_digits(tool.schema) for tool in self.tools), default=MAX_DIGITS))
            loose = {name: rule.replace("%d", limit) for name, rule in _LOOSE_RULES.items()}
            grammar = _JSON_RULE.sub(lambda match: f"{match[1]} ::= {loose[match[1]]}", grammar)
            grammar = f"{grammar.rstrip()}\nblanks ::= [ \\t\\n\\r]*\n"

        def spelt(alias: re.Match[str]) -> str:
            name = self._name(alias).replace("\\", "\\\\").replace('"', '\\"')
            return name.replace("\n", "\\n").replace("\r", "\\r")

        return _GBNF_TEXT.sub(lambda match: ALIAS.sub(spelt, match[0]), grammar)

    def schema_of(self, text: str) -> tuple[Mapping[str, Any], Any, str] | None:
        """Return root schema, schema and JSON pointer of the last alias in a text. Aliases of properties come first."""
        found = list(ALIAS.finditer(text))
        if not found:
            return None
        match = next((alias for alias in reversed(found) if alias[2]), found[-1])
        tool = self.tools[int(match[1])]
        if not match[2]:
            return tool.schema, tool.schema, "#"
        name = self._properties[int(match[1])][int(match[2])]
        return tool.schema, tool.properties[name], f"#/properties/{escaped(name)}"

    def tool_index(self, text: str) -> int:
        """Return the number of the tool of the first alias in a text."""
        found = ALIAS.search(text)
        return int(found[1]) if found else 0

    def _name(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return self._properties[index][int(match[2])] if match[2] else self.tools[index].name


def types_of(root: Any, schema: Any, seen: dict[int, Types] | None = None) -> Types:
    """Return the JSON types that a part of the schema `root` allows; None: any. `seen` has the types of visited objects by id."""
    seen = {} if seen is None else seen
    node = resolved(root, schema)
    if id(node) in seen:
        return seen[id(node)]
    seen[id(node)] = found = None
    given = node.get("type")
    if isinstance(given, (str, list)):
        found = frozenset([given] if isinstance(given, str) else [name for name in given if isinstance(name, str)])
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        found = _both(found, frozenset(map(type_of, values)))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(node.get(keyword), list):
            each = [types_of(root, child, seen) for child in node[keyword]]
            known = [types for types in each if types is not None]
            found = _both(found, frozenset().union(*known) if len(known) == len(each) else None)
    for child in node["allOf"] if isinstance(node.get("allOf"), list) else ():
        found = _both(found, types_of(root, child, seen))
    seen[id(node)] = found
    return found


def _both(first: Types, other: Types) -> Types:
    if first is None or other is None:
        return other if first is None else first
    return (first & other) | ({"integer"} if {"integer", "number"} <= first | other else frozenset())


def with_plain_types(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with one named type for each schema object, for templates that need it."""

    def plain(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        found = dict(node)
        for keyword, value in node.items():
            if keyword == "properties" and isinstance(value, dict):
                found[keyword] = {name: plain(child) for name, child in value.items()}
            elif keyword in ("items", "additionalProperties"):
                found[keyword] = plain(value)
        if not isinstance(node.get("type"), str):
            types = types_of(parameters, node) or frozenset(("string",))
            found["type"] = min(types, key=lambda name: (name == "null", name not in TYPES, name))
        return found

    schema: dict[str, Any] = plain(dict(parameters))
    return schema


_MAX_LENGTH: Final = 10_000
_MAX_PARTS: Final = 200  # schema objects of one argument
_OF_TEXTS: Final = frozenset("pattern format minLength maxLength enum const minimum maximum".split())
_LIMITS: Final = frozenset("enum const pattern format minLength maxLength anyOf oneOf allOf".split())
_OPEN: Final = "(?s:.*)"
_HOST: Final = (
    r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?){0,8}"
)
_FORMATS: Final[Mapping[str, str]] = {
    "date": DATE_PATTERN,
    "time": TIME_PATTERN,
    "date-time": f"{DATE_PATTERN}[Tt]{TIME_PATTERN}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": rf"{OCTET}(?:\.{OCTET}){{3}}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_'+\-]+(?:\.[A-Za-z0-9_'+\-]+){{0,8}}@{_HOST}",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[A-Za-z0-9\-._~:\/?#\[\]@!$&'()*+,;=%]+",
}
_ANCHOR: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|(?P<anchor>[\^$])|(?P<either>\|)|(?P<open>\()|(?P<close>\))", re.DOTALL
)


class _NotEnforcedError(Exception):
    """Plain text cannot be held to a keyword."""


def text_terminal(schema: Any, resolve: Resolve, report: Callable[[str, str], None]) -> str | None:
    """Return an expression of the texts that a schema allows; None: any text.

    `report` takes the keyword, or "" for the whole schema, and the reason of each part that is not enforced.
    """
    parts = itertools.count(1)

    def terminal(node: Any) -> str | None:
        while isinstance(node, dict):
            if next(parts) > _MAX_PARTS:
                raise _NotEnforcedError("the argument is plain text with too many alternatives")
            if not isinstance(node.get("$ref"), str):
                break
            node = resolve(node["$ref"])
        if not isinstance(node, dict):
            return None
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list) and values:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return "(" + " | ".join(f"/{quoted_pattern(text)}/" for text in texts) + ")"
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(node.get(keyword), list):
                found = [terminal(child) for child in node[keyword]]
                if keyword == "allOf":
                    return " & ".join(f"({part})" for part in found if part is not None) or None
                return None if None in found else "(" + " | ".join(f"({part})" for part in found) + ")"
        return _limited(node, report)

    try:
        return terminal(schema)
    except _NotEnforcedError as error:
        report("", str(error))
        return None


def _limited(node: Mapping[str, Any], report: Callable[[str, str], None]) -> str | None:
    if node.get("type") != "string":
        for keyword in sorted(_OF_TEXTS & node.keys()):
            report(keyword, "in this chat format the argument is plain text, whose type is decided afterwards")
        return None
    parts = []
    least, most, pattern = node.get("minLength", 0), node.get("maxLength"), node.get("pattern")
    if isinstance(least, (int, float)) and isinstance(most, (int, float, type(None))):
        if least > _MAX_LENGTH or (most or 0) > _MAX_LENGTH:
            keyword = "minLength" if least > _MAX_LENGTH else "maxLength"
            report(keyword, f"lengths of plain text are enforced up to {_MAX_LENGTH}")
        elif least or most is not None:
            parts.append(f"(?s:.{{{int(least)},{'' if most is None else int(most)}}})")
    if isinstance(pattern, str) and pattern:
        try:
            parts.append(_unanchored(pattern))
        except _NotEnforcedError as error:
            report("pattern", str(error))
    name = str(node.get("format"))
    if name in ("duration", "ipv6"):
        report("format", f"{name!r} is not enforced in plain text")
    elif name in _FORMATS:
        parts.append(_FORMATS[name])
    return " & ".join(f"/{part}/" for part in parts) or None


def _unanchored(pattern: str) -> str:
    """Return a pattern of whole texts without anchors."""
    if reason := pattern_problem(pattern):
        raise _NotEnforcedError(reason)
    begins, ends, has_either, depth = False, False, False, 0
    for match in _ANCHOR.finditer(pattern):
        depth += bool(match["open"]) - bool(match["close"])
        has_either |= bool(match["either"]) and depth == 0
        if match["anchor"]:
            is_first, is_last = (
                match.span() == (0, 1) and match[0] == "^",
                match[0] == "$" and match.end() == len(pattern),
            )
            begins, ends = begins or is_first, ends or is_last
            if not (is_first or is_last):
                raise _NotEnforcedError("in plain text ^ and $ are known at its beginning and its end alone")
    if has_either and (begins or ends):
        raise _NotEnforcedError("in plain text ^ and $ are not known beside |; put the alternatives into a group")
    inner = pattern[begins : len(pattern) - ends]
    inner = inner.replace("/", r"\/") if r"\/" not in inner else inner
    return ("" if begins else _OPEN) + f"(?:{inner})" + ("" if ends else _OPEN)


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
    """Return the spelling of calls by llama.cpp's parser and grammar; None if no Lark grammar can be written from the parser.

    Both have the aliases of `names`. `control_ids` are the ids of the control tokens that the parser reads, by their text.
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
    """Text that ends at the first delimiter."""

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
        node, place = self._nodes[node_id], self._place
        match node["type"]:
            case "epsilon" | "start" | "end" | "and" | "not":
                return []
            case "literal":
                text = node["literal"]
                for match in ALIAS.finditer(text):
                    if match[2]:
                        self._place = match[0]
                        self._note_required(match[0])
                return [(self._names.in_text(text),)] if text else []
            case "sequence":
                return [item for child in node["children"] for item in self._items(child)]
            case "choice":
                return self._choice(node["children"])
            case "repetition":
                return self._repetition(node)
            case "any":
                return ["/(?s:.)/"]
            case "space":
                return ["SPACE?"]
            case "chars":
                ranges = "".join(f"\\u{{{part['start']:x}}}-\\u{{{part['end']:x}}}" for part in node["ranges"])
                least, most = node["min_count"], node["max_count"]
                counts = f"{{{max(1, least)},{'' if most == -1 else most}}}"
                body = f"/[{'^' if node['negated'] else ''}{ranges}]{counts}/"
                return [self._named("C", body) + ("" if least else "?")]
            case "string":
                delimiter = quoted_pattern(node["delimiter"])
                escape = rf"\\(?:[{delimiter}\\\/ bfnrt]|u[0-9a-fA-F]{{4}})"
                return [self._named("S", rf"/(?:[^{delimiter}\\]|{escape})+/") + "?"]
            case "until":
                return [_Until(tuple(node["delimiters"]), "")]
            case "ac":
                if len(node["delimiters"]) != 1:
                    raise Untranslatable("text that ends with one of several texts")
                (delimiter,) = node["delimiters"]
                place = place if self._has_argument(node["child"]) else ""
                return [_Until((delimiter,), place), (self._names.in_text(delimiter),)]
            case "schema":
                return [self._schema(node["name"])]
            case "rule":
                return [self._rule(node_id)]
            case "ref":
                return [self._rule(self._rule_ids[node["name"]])]
            case "tag":
                is_argument = node["tag"] == "tool-arg"
                self._place = "" if is_argument else place
                items = self._items(node["child"])
                self._place = "" if is_argument else self._place
                is_value = self._place and node["tag"] in ("tool-arg-string-value", "tool-arg-value")
                return self._argument(items) if is_value else items
            case "atomic":
                return self._items(node["child"])
            case "gbnf":
                name = node["grammar"]
                if name and name not in self._rule_ids:
                    raise Untranslatable("a grammar of its own")
                return [self._rule(self._rule_ids[name])] if name else []
            case kind:
                raise Untranslatable(f"a part of the type {kind!r}")

    def _choice(self, children: Sequence[int]) -> list[_Item]:
        place, found = self._place, []
        for child in children:
            self._place = place
            found.append(self._expression(child))
        self._place = place
        some = list(dict.fromkeys(filter(None, found)))
        return [f"({' | '.join(some)}){'' if all(found) else '?'}"] if some else []

    def _repetition(self, node: Any) -> list[_Item]:
        place, least, most = self._place, node["min_count"], node["max_count"]
        self._num_repeated += most != 1
        items = self._items(node["child"])
        if items and isinstance(items[-1], _Until) and (least, most) == (0, 1):
            is_content = self._nodes[node["child"]].get("tag") == "content"
            return ["/(?s:.+)/?" if is_content else _Optional(tuple(items))]
        body = self._joined(items)
        self._num_repeated -= most != 1
        self._place = place
        if not body or most == 0:
            return []
        counts = {(0, 1): "?", (0, -1): "*", (1, -1): "+", (1, 1): ""}
        count = counts.get((least, most), f"{{{least},{'' if most == -1 else most}}}")
        return [f"({body}){count}"]

    def _schema(self, name: str) -> str:
        found = self._names.schema_of(name)
        if found is None:
            raise Untranslatable(f"a schema of the name {name!r}")
        root, schema, pointer = found
        self._held.add((self._names.tool_index(name), pointer))
        if schema is not root and isinstance(schema, dict):
            schema = part_of(root, schema, pointer)
        return self._named("j", f"%json {json.dumps(schema, ensure_ascii=False)}")

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
        held = self._schema(self._place)
        if is_text or types != frozenset(("string",)):
            return [held]
        allowed = self._allowed(self._place) or "/.*/"  # also between the other quotes, without anything escaped
        quoted = self._named("Q", rf"/\u{{27}}/ (({allowed}) & /[^\u{{27}}\\\n]*/) /\u{{27}}/")
        return [f"({held} | {quoted})"]

    def _note_required(self, place: str) -> None:
        """Report that a format lets a required property be left out."""
        root, _, pointer = self._names.schema_of(place) or ({}, None, "")
        index = self._names.tool_index(place)
        required = resolved(root, root).get("required", ())
        if self._num_repeated and any(pointer == f"#/properties/{escaped(str(name))}" for name in required):
            self.unenforced[index, "#/required", "this chat format lets any argument be left out"] = None

    # ---- texts

    def _literal(self, text: str) -> str:
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
