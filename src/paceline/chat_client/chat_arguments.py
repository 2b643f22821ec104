"""The keywords of a chat, sorted for the template, the engine and the reader of the reply; and the chat formats of a model."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from paceline import validation
from paceline.chat import ChatFormat, ChatOptions, Tool, Turn, next_turn, parse_tool_choice, template_kwargs
from paceline.chat_client.function_tools import Toolbox
from paceline.engine.arguments import collected_arguments, given_options, names_elsewhere, request_arguments
from paceline.errors import InvalidParams, InvalidType
from paceline.keywords import ChatRequestKeywords, Int, ReadingKeywords, with_keywords
from paceline.params import FIELDS, ChatSamplingKeywords, SamplingParams
from paceline.request import OPTION_NAMES, RequestOptions
from paceline.runtime import Model

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # known to type checkers without the package

    from paceline.chat_client.response_models import ResponseModel, SchemaNotice

DEFAULT_TOOL_ROUNDS = 8
DEFAULT_RETRIES = 1
MAX_RETRIES = 100
MAX_TOOL_ROUNDS = 1000
CONTEXT_OVERFLOW = ("error", "drop_oldest")


class ChatOwnKeywords(TypedDict, total=False):
    """Keywords of chats alone. `response_model` is in `ChatKeywords`."""

    tools: Sequence[Callable[..., object] | Tool | Mapping[str, object]] | None
    tool_choice: str | Callable[..., object] | Tool | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    run_tools: bool | None
    max_tool_rounds: Int | None
    context_overflow: Literal["error", "drop_oldest"] | None
    response_format: Mapping[str, object] | None
    schema_in_prompt: bool | None
    max_retries: Int | None
    reasoning_format: Literal["auto", "none"] | None
    reasoning_effort: str | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, object] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


class PlainChatKeywords(ChatOwnKeywords, ChatSamplingKeywords, ChatRequestKeywords, total=False):
    """Keywords of a chat without response_model, from which the type of the reply follows."""


class ChatKeywords(PlainChatKeywords, total=False):
    """Keywords of `LLM.chat`."""

    response_model: TypeForm[object] | None


class StreamChatKeywords(ChatKeywords, ReadingKeywords, total=False):
    """Keywords of `LLM.stream_chat`."""


with_chat_keywords = with_keywords(
    SamplingParams,
    RequestOptions,
    ChatOptions,
    max_tokens=None,
    run_tools=False,
    context_overflow=CONTEXT_OVERFLOW[0],
    max_tool_rounds=DEFAULT_TOOL_ROUNDS,
)
CHAT_NAMES = frozenset({*ChatOwnKeywords.__annotations__, "response_model"})
_MEANINGLESS = ("echo", "add_special", "parse_special", "suffix", "preserved_tokens")  # the chat format defines them
_MAX_FORMATS = 8


class ChatFormats:
    """The chat formats of one model: each template is compiled once and kept. Any thread."""

    def __init__(self, model: Model, template: str | None = None) -> None:
        self._model = model
        self._default = _optional_text("chat_template", template)
        self._lock = threading.Lock()
        self._formats: OrderedDict[str | None, ChatFormat] = OrderedDict()

    def get(self, template: object = None) -> ChatFormat:
        """Return the format of a template, the default one for None. Raises as `ChatFormat`."""
        source = self._default if template is None else validation.text("chat_template", template)
        with self._lock:
            if source not in self._formats:
                self._formats[source] = ChatFormat(self._model, source)
                if len(self._formats) > _MAX_FORMATS:
                    self._formats.popitem(last=False)
            self._formats.move_to_end(source)
            return self._formats[source]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArguments:
    """The checked keywords of a call.

    params: how to generate; a schema of response_format or response_model is in it. response: the type of the content.
    notice: the sentence that shows the schema to the model; None: the prompt has no schema.
    max_tool_rounds: how often calls are run; 0: never. max_retries: how often the model is asked again for a reply that is no
    instance of response_model. drops_oldest: whether the oldest messages are left out of a prompt that would fill the context.
    """

    template: str | None
    chat_options: ChatOptions
    params: SamplingParams
    request_options: RequestOptions
    continues: bool | None
    generates: bool | None
    toolbox: Toolbox
    response: ResponseModel[Any] | None
    notice: SchemaNotice | None
    max_tool_rounds: int
    max_retries: int
    drops_oldest: bool

    def turn(self, messages: object, num_rounds: int) -> Turn:
        """Return the next turn of a conversation after so many rounds of tools; only the first one continues a message."""
        if num_rounds:
            return next_turn(messages)
        return next_turn(messages, continues=self.continues, generates=self.generates)

    def shown(self, turn: Turn) -> Turn:
        """Return a turn with the schema in its prompt, if it has one."""
        return turn if self.notice is None else dataclasses.replace(turn, messages=self.notice.added_to(turn.messages))

    def options_after(self, num_rounds: int) -> ChatOptions:
        """Return the options of a round; after the first, no call is required, since the model would never reply."""
        choice = self.chat_options.tool_choice
        if num_rounds == 0 or choice in (None, "auto", "none"):
            return self.chat_options
        return dataclasses.replace(self.chat_options, tool_choice="auto")


def chat_arguments(
    defaults: SamplingParams, params: SamplingParams | None, options: Mapping[str, Any], *, is_streamed: bool
) -> ChatArguments:
    """Sort and check the keywords of a chat.

    Sampling keywords change `params`; without params, the defaults, with max_tokens None, because a message ends by itself.
    None changes nothing.

    Raises `InvalidParams`, and `InvalidType`, a `TypeError`, for an unknown keyword, with the nearest known one.
    """
    known = CHAT_NAMES | frozenset(FIELDS) | OPTION_NAMES
    _check_names(options, known)
    options = given_options(options)
    if "truncate" in options:
        raise InvalidParams(
            "truncate would cut the system message or the question of a chat; "
            'context_overflow="drop_oldest" leaves the oldest messages out'
        )
    for name in _MEANINGLESS:
        if name in options:
            raise InvalidParams(f"{name} has no effect in a chat, since the chat format decides it; leave it out")
    of_engine = {name: value for name, value in options.items() if name not in CHAT_NAMES}
    sort = request_arguments if is_streamed else collected_arguments
    sampling, rest = sort(defaults.replace(max_tokens=None), params, of_engine)
    if sampling.echo:
        raise InvalidParams("echo has no effect in a chat; prompt_token_ids of the reply is the prompt")
    response: ResponseModel[Any] | None = None
    if options.get("response_model") is not None:
        from paceline.chat_client.response_models import ResponseModel  # imports pydantic

        response = ResponseModel(options["response_model"])
    toolbox = Toolbox(options.get("tools"))
    sampling = _with_schema(sampling, options.get("response_format"), response)
    template = _optional_text("chat_template", options.get("chat_template"))
    choice = _tool_choice(options.get("tool_choice"), toolbox)
    variables = options.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise InvalidType(f"chat_template_kwargs must be a mapping of names to values, not {type(variables).__name__}")
    return ChatArguments(
        template=template,
        chat_options=ChatOptions(
            tools=toolbox.tools or None,
            tool_choice=choice,
            parallel_tool_calls=options.get("parallel_tool_calls"),
            reasoning_format=options.get("reasoning_format", "auto"),
            kwargs=template_kwargs(
                variables or {}, _optional_text("reasoning_effort", options.get("reasoning_effort"))
            ),
        ),
        params=sampling,
        request_options=rest,
        continues=_optional_bool("continue_final_message", options.get("continue_final_message")),
        generates=_optional_bool("add_generation_prompt", options.get("add_generation_prompt")),
        toolbox=toolbox,
        response=response,
        notice=_schema_notice(options, sampling, response, toolbox),
        max_tool_rounds=_tool_rounds(options, toolbox, sampling),
        max_retries=_max_retries(options, sampling, response, is_streamed=is_streamed),
        drops_oldest=validation.choice("context_overflow", options.get("context_overflow", "error"), CONTEXT_OVERFLOW)
        == "drop_oldest",
    )


def check_chat_options(params: SamplingParams | None, options: Mapping[str, Any], named: Collection[str] = ()) -> None:
    """Check keywords of later chats, as `chat_arguments` does. named: other parameters of the caller, for the nearest name."""
    known = CHAT_NAMES | frozenset(FIELDS) | OPTION_NAMES | frozenset(named)
    _check_names(options, known)
    read = {name: value for name, value in options.items() if name not in ReadingKeywords.__annotations__}
    RequestOptions(**{name: value for name, value in options.items() if name not in read})
    chat_arguments(SamplingParams(), params, read, is_streamed=False)


def _check_names(options: Mapping[str, Any], known: Collection[str]) -> None:
    for name in ("response_format", "text_format", "json_schema"):
        if isinstance(options.get(name), type):
            raise InvalidType(f"{name} takes no class; give a type as response_model={options[name].__name__}")
    validation.reject_unknown(options, known, "chat, SamplingParams and RequestOptions", names_elsewhere())


def _tool_rounds(options: Mapping[str, Any], toolbox: Toolbox, params: SamplingParams) -> int:
    limit = validation.integer(
        "max_tool_rounds", options.get("max_tool_rounds", DEFAULT_TOOL_ROUNDS), 1, MAX_TOOL_ROUNDS
    )
    if not validation.boolean("run_tools", options.get("run_tools", False)):
        if "max_tool_rounds" in options:
            raise InvalidParams("max_tool_rounds has no effect without run_tools=True")
        return 0
    if not toolbox.has_functions:
        raise InvalidParams("run_tools needs Python functions among tools; there are none")
    if params.n != 1:
        raise InvalidParams(f"run_tools follows one choice, and n is {params.n}; leave n out")
    return limit


def _max_retries(
    options: Mapping[str, Any], params: SamplingParams, response: ResponseModel[Any] | None, *, is_streamed: bool
) -> int:
    may_retry = response is not None and params.n == 1 and not is_streamed
    limit = validation.integer("max_retries", options.get("max_retries", DEFAULT_RETRIES * may_retry), 0, MAX_RETRIES)
    if limit and is_streamed:
        raise InvalidParams(
            "max_retries: a stream is not asked for again, since its text was read; use chat, or leave it out"
        )
    if limit and response is None:
        raise InvalidParams("max_retries needs a response_model, by which replies are checked")
    if limit and params.n != 1:
        raise InvalidParams(f"max_retries asks again for one choice, and n is {params.n}; leave one of them out")
    return limit


def _tool_choice(choice: object, toolbox: Toolbox) -> object:
    """Return the choice as OpenAI's API spells it; a function, or a name that is no word of that API, names a tool."""
    name = choice.name if isinstance(choice, Tool) else toolbox.name_of(choice) if callable(choice) else choice
    if isinstance(name, str) and name not in ("auto", "none", "required"):
        name = {"type": "function", "function": {"name": name}}
    parse_tool_choice(name, toolbox.tools)  # raises here what it would raise when the template is rendered
    return name


def _with_schema(
    params: SamplingParams, response_format: object, response: ResponseModel[Any] | None
) -> SamplingParams:
    schema = _schema_of_format(response_format)
    if response is not None:
        if schema is not None or params.json_schema is not None:
            other = "json_schema" if schema is None else "response_format"
            raise InvalidParams(f"response_model and {other} exclude each other; leave one of them out")
        return params.replace(json_schema=response.json_schema)
    if schema is None:
        return params
    if params.json_schema is not None:
        raise InvalidParams("response_format and json_schema exclude each other; leave one of them out")
    return params.replace(json_schema=schema)


def _schema_notice(
    options: Mapping[str, Any], params: SamplingParams, response: ResponseModel[Any] | None, toolbox: Toolbox
) -> SchemaNotice | None:
    if not validation.boolean("schema_in_prompt", options.get("schema_in_prompt", response is not None)):
        return None
    if params.json_schema is None:
        raise InvalidParams("schema_in_prompt needs a schema: response_model, response_format or json_schema")
    from paceline.chat_client.response_models import SchemaNotice  # imports pydantic

    schema = json.loads(str(params.json_schema)) if response is None else response.shown_schema
    has_tools = bool(toolbox.tools) and options.get("tool_choice") != "none"
    return SchemaNotice(schema, has_tools=has_tools, response=response)


def _schema_of_format(response_format: object) -> Mapping[str, Any] | None:
    """Return the JSON schema of a response_format as OpenAI's API has it; None for text."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise InvalidType(f"response_format must be an object with a type, not {type(response_format).__name__}")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and "schema" not in response_format:
        return {"type": "object"}
    described = response_format if kind == "json_object" else response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
        raise InvalidParams(
            'response_format must be {"type": "text"}, {"type": "json_object"}, with or without a "schema", or '
            f'{{"type": "json_schema", "json_schema": {{"schema": ...}}}}, not {response_format!r:.80}'
        )
    return schema


def _optional_text(name: str, value: object) -> str | None:
    return None if value is None else validation.text(name, value)


def _optional_bool(name: str, value: object) -> bool | None:
    return None if value is None else validation.boolean(name, value)
