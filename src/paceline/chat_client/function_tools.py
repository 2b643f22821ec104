"""Python functions as tools: their schemas by signature, type hints and docstring, and their calls by the model.

A failure of a call becomes its result, which the model reads: an unknown name, arguments that do not fit, an exception.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

from paceline import validation
from paceline.chat import Tool, ToolCall, parse_tools
from paceline.errors import InvalidParams, InvalidType

_log = logging.getLogger("paceline.chat")

_MAX_RESULT_CHARS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(
    r"((?:Keyword )?Arg(?:ument)?s|(?:Other )?Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes)(:?)\s*"
)
_PARAMETERS = frozenset(("Args", "Arguments", "Keyword Args", "Keyword Arguments", "Parameters", "Other Parameters"))
_UNDERLINE = re.compile(r"-{3,}\s*")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_NUMPY_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_FIELD = re.compile(r":(?:(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?[\\*]*(\w+)|\w+[^:]*):\s*(.*)")


@dataclass(frozen=True, slots=True)
class FunctionTool(Tool):
    """A tool with the Python function that it calls. Usually the function itself is enough: `tools=[function]`.

    Attributes:
        name: Its name, which the model writes.
        description: Its effect, for the model.
        parameters: JSON Schema of its arguments, an object.
        function: The function, plain or async.
    """

    function: Callable[..., Any] = field(kw_only=True)
    _arguments: _Arguments = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> FunctionTool:
        """Derive a tool from a function.

        Its type hints define the schema (all types that pydantic knows, `Annotated` and `Literal` included; no hint allows
        any JSON). Its docstring describes it: the text before the first section, and the parameters in the style of Google,
        NumPy or Sphinx. `Annotated[str, "text"]` and pydantic's `Field(description=...)` describe a parameter, too.

        Args:
            function: The function. It may be async, for `AsyncLLM`.
            name: The tool's name, 1 to 64 ASCII letters, digits, _ and -; None: the name of the function. A partial has the name
                of its function.
            description: Its description; None: of the docstring.

        Raises:
            InvalidParams: The function takes *args or **kwargs, has a hint of which there is no JSON schema, or has no name that
                a tool can have.
        """
        if not callable(function):
            raise InvalidType(f"a tool must be a function, a Tool or an object, not {type(function).__name__}")
        called = _name_of(function) if name is None else _checked_name(validation.text("name", name))
        text, of_arguments = _documentation(function)
        arguments = _Arguments(function, called, of_arguments)
        described = text if description is None else description
        return cls(called, described, arguments.schema, function=function, _arguments=arguments)

    @property
    def is_async(self) -> bool:
        """Whether the function has to be awaited."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 - of an object that can be called
        )

    def bind(self, arguments: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments by JSON. Raises `ValueError` if it does not fit the schema."""
        return self._arguments.bind(arguments)


class _Arguments:
    """The parameters of a function as a pydantic model. Its fields have aliases, so that a parameter may have any name."""

    def __init__(self, function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> None:
        import pydantic
        from pydantic.fields import FieldInfo

        from paceline.chat_client.response_models import closed_schema

        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise InvalidParams(f"tool {name!r} has no signature to derive a schema from: {error}") from None
        for parameter in parameters:
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise InvalidParams(f"tool {name!r} takes {parameter}, which has no JSON schema; name its parameters")
        hints = _hints(function, name)
        self._by_position = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        }
        self._fields = {parameter.name: f"field_{index}" for index, parameter in enumerate(parameters)}
        self._with_field = {parameter.name for parameter in parameters if isinstance(parameter.default, FieldInfo)}
        defined: dict[str, Any] = {}
        for parameter in parameters:
            about: dict[str, Any] = {"alias": parameter.name}
            hint, default = hints.get(parameter.name, Any), parameter.default
            if parameter.name in self._with_field:  # pydantic makes the default, and always passes it
                hint = Annotated[hint, default]
            elif default is not inspect.Parameter.empty:  # a default that is no JSON stays out of the schema
                about |= {"default": default} if _is_plain_json(default) else {"default_factory": lambda: None}
            description = _annotated_description(hint) or descriptions.get(parameter.name)
            if description is not None:  # None would replace the description of a field within the hint
                about["description"] = description
            defined[self._fields[parameter.name]] = (hint, pydantic.Field(**about))
        try:
            self._model = pydantic.create_model(
                "Arguments", __config__=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False), **defined
            )
            self.schema = closed_schema(self._model.model_json_schema())
        except Exception as error:  # noqa: BLE001 - pydantic has many, with no common base
            raise InvalidParams(f"tool {name!r}: its signature has no JSON schema: {error}") from None

    def bind(self, arguments: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = self._model.model_validate_json(arguments or "{}")
        given = values.model_fields_set
        by_name = {
            name: getattr(values, its) for name, its in self._fields.items() if its in given or name in self._with_field
        }
        positional = []
        for name, default in self._by_position.items():
            if not any(other in by_name for other in self._by_position):
                break
            positional.append(by_name.pop(name, default))
        return tuple(positional), by_name


def _plain(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name_of(function: Callable[..., Any]) -> str:
    plain = _plain(function)
    name = str(getattr(plain, "__name__", None) or type(plain).__name__)
    if name == "<lambda>":
        raise InvalidParams("a lambda has no name for the model; give it one: FunctionTool.of(function, name=...)")
    return _checked_name(name)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidParams(
            f"the name of a tool must have 1 to 64 ASCII letters, digits, _ and -, not {name[:80]!r}; give it another one: "
            "FunctionTool.of(function, name=...)"
        )
    return name


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    plain = _plain(function)
    text, arguments = parse_docstring(inspect.getdoc(plain) or "")
    if not inspect.isroutine(plain):  # an object or a class
        method = plain.__init__ if inspect.isclass(plain) else type(plain).__call__
        more = parse_docstring(inspect.getdoc(method) or "") if inspect.isfunction(method) else ("", {})
        text, arguments = text or more[0], more[1] | arguments
    return text, arguments


def _annotated_description(hint: Any) -> str | None:
    """Return the text of `Annotated[..., "text"]`, or the description of a pydantic field in there."""
    for extra in reversed(getattr(hint, "__metadata__", ())):
        text = extra if isinstance(extra, str) else getattr(extra, "description", getattr(extra, "documentation", None))
        if isinstance(text, str):
            return text
    return None


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the evaluated hints of the parameters. The hint of the result may name a type for type checkers alone."""
    plain = _plain(function)
    if inspect.isclass(plain):
        plain = plain.__init__
    target: Any = inspect.unwrap(plain if inspect.isroutine(plain) else type(plain).__call__)
    written = {name: hint for name, hint in getattr(target, "__annotations__", {}).items() if name != "return"}
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=written), getattr(target, "__globals__", {}), include_extras=True
        )
    except Exception as error:  # noqa: BLE001 - whatever evaluating a hint raises
        raise InvalidParams(f"tool {name!r}: its type hints cannot be evaluated: {error}") from None


def _is_plain_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before its first section, and the descriptions of its parameters by name.

    The parameters may be described in the style of Google, NumPy or Sphinx.
    """
    described: list[str] = []
    found: dict[str, str] = {}
    section, style, depth, last = "", "", None, list[str]()
    lines = text.splitlines()
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        is_outer, header, is_field = line[:1] not in (" ", "\t"), _SECTION.fullmatch(line), _FIELD.fullmatch(line)
        if header and (header[2] or _UNDERLINE.fullmatch(following)):
            section, style, depth, last = header[1], "google" if header[2] else "numpy", None, []
        elif is_field and (style == "sphinx" or not section):
            section, style, last = "Parameters", "sphinx", [is_field[1]] if is_field[1] else []
            found |= dict.fromkeys(last, is_field[2].strip())
        elif not section:
            described.append(line)
        elif section in _PARAMETERS and line.strip() and not _UNDERLINE.fullmatch(line):
            indent = len(line) - len(line.lstrip())
            depth = indent if depth is None else depth
            entry = None
            if style == "google" and not is_outer and indent <= depth:
                entry = _ENTRY.fullmatch(line.strip())
            elif style == "numpy" and is_outer:
                entry = _NUMPY_ENTRY.fullmatch(line)
            if entry:
                last = [name.strip("* ") for name in entry[1].split(",")]
                found |= dict.fromkeys(last, entry[2].strip() if style == "google" else "")
            elif not is_outer and (style != "google" or indent > depth):
                found |= {name: f"{found[name]} {line.strip()}".strip() for name in last}
    return "\n".join(described).strip(), {name: described for name, described in found.items() if described}


class Toolbox:
    """The tools of a chat, and how calls of them are run. Constant; any thread."""

    def __init__(self, tools: object) -> None:
        """tools: a list of functions, `Tool`s and objects as OpenAI's API has them; None for none."""
        self.tools: tuple[Tool, ...] = ()
        if tools is None:
            return
        if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
            raise InvalidType(f"tools must be a list, not {type(tools).__name__}")
        made = [
            tool if isinstance(tool, (Tool, Mapping)) or not callable(tool) else FunctionTool.of(tool) for tool in tools
        ]
        names = [tool.name for tool in made if isinstance(tool, FunctionTool)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidParams(
                f"two tools have the name {twice[0]!r}; give one another name: FunctionTool.of(function, name=...)"
            )
        parsed = parse_tools(made)  # also checks that their names differ
        self.tools = tuple(
            given if isinstance(given, FunctionTool) else tool for given, tool in zip(made, parsed, strict=True)
        )

    @property
    def has_functions(self) -> bool:
        """Whether any of the tools can be run."""
        return any(isinstance(tool, FunctionTool) for tool in self.tools)

    @property
    def has_async_functions(self) -> bool:
        """Whether any of them has to be awaited."""
        return any(isinstance(tool, FunctionTool) and tool.is_async for tool in self.tools)

    def name_of(self, function: Callable[..., Any]) -> str:
        """Return the name of a function's tool. Raises `InvalidParams` if it is none of the tools."""
        for tool in self.tools:
            if isinstance(tool, FunctionTool) and tool.function == function:
                return tool.name
        return _name_of(function)

    def can_run(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether no call is of a tool without a function. Unknown names count as run."""
        plain = {tool.name for tool in self.tools if not isinstance(tool, FunctionTool)}
        return not any(call.name in plain for call in calls)

    def run(self, call: ToolCall) -> str:
        """Run a call and return its result, or its failure, as text."""
        bound = self._bound(call)
        if isinstance(bound, str):
            return bound
        tool, positional, named = bound
        try:
            return _as_text(tool.function(*positional, **named))
        except Exception as error:  # noqa: BLE001 - the model reads it
            return _failed(call, error)

    async def run_async(self, call: ToolCall, in_thread: Callable[..., Awaitable[Any]]) -> str:
        """As `run`; a plain function runs by `in_thread`, an async one on the event loop."""
        bound = await in_thread(self._bound, call)
        if isinstance(bound, str):
            return bound
        tool, positional, named = bound
        try:
            if tool.is_async:
                value = await tool.function(*positional, **named)
            else:
                value = await in_thread(lambda: tool.function(*positional, **named))
            return str(await in_thread(_as_text, value))
        except Exception as error:  # noqa: BLE001 - the model reads it
            return _failed(call, error)

    def _bound(self, call: ToolCall) -> str | tuple[FunctionTool, tuple[Any, ...], dict[str, Any]]:
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if not isinstance(tool, FunctionTool):
            known = ", ".join(tool.name for tool in self.tools)
            return f"Error: there is no tool {call.name[:80]!r}; the tools are: {known}"
        try:
            positional, named = tool.bind(call.arguments)
        except ValueError as error:  # pydantic's has errors, here without the links to its documentation
            reasons = error.errors(include_url=False) if hasattr(error, "errors") else ()
            places = (f"{'.'.join(map(str, reason['loc'])) or 'arguments'}: {reason['msg']}" for reason in reasons)
            return f"Error: the arguments do not fit: {'; '.join(places) or error}"
        return tool, positional, named


def _failed(call: ToolCall, error: Exception) -> str:
    _log.info("the tool %s failed, and the model reads the error as its result: %r", call.name, error)
    text = f"Error: {type(error).__name__}: {error}"[:_MAX_RESULT_CHARS]
    return text.encode("utf-8", "replace").decode()  # a lone surrogate could not be rendered


def _as_text(value: object) -> str:
    if isinstance(value, str):
        text = value
    else:
        import pydantic_core

        text = json.dumps(pydantic_core.to_jsonable_python(value, fallback=str), ensure_ascii=False)
    if len(text) > _MAX_RESULT_CHARS:
        raise InvalidParams(f"the result has {len(text)} characters, and may have {_MAX_RESULT_CHARS}")
    text.encode()  # a lone surrogate could not be rendered
    return text
