"""One conversation of a call of `chat`: what is generated next, and what becomes of it. One thread at a time.

Rendering and parsing take time: not on an event loop.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import msgspec

from paceline.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFormat,
    ChatOptions,
    ChatReader,
    ChatRequest,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    Turn,
    chat_completion_of,
    parse_messages,
    prepare_chat,
)
from paceline.chat.chat_request import TokenHistory
from paceline.chat.conversation import ChatMedia, Segment
from paceline.chat_client.chat_arguments import ChatArguments
from paceline.chat_client.function_tools import Toolbox
from paceline.completion import Completion, completion_of
from paceline.engine.prompts import chat_too_long
from paceline.errors import (
    ChatParseError,
    Closed,
    EngineStopped,
    GrammarError,
    InvalidParams,
    PacelineError,
    PromptTooLong,
    ResponseModelError,
)
from paceline.media import Attachment, Audio, Image, is_attachment
from paceline.request import cache_scope
from paceline.sequence import Request
from paceline.streaming import FinishReason, StreamChunk, Usage

if TYPE_CHECKING:
    from paceline.engine import EngineClient
    from paceline.engine.prompts import Prompt
    from paceline.sequence import Limits

T = TypeVar("T")

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChatReply(ChatCompletion, Generic[T]):
    """What `LLM.chat` returns: the completion, the conversation up to it, and its content as an instance of response_model.

    Attributes:
        messages: The whole conversation: the messages that were passed, calls of tools and their results, the reply of the
            first choice. A list for the next call.
        rounds: The completions before this one: their calls were run by run_tools, or their content was no instance of
            response_model. Their usage is not in `usage`, but in `total_usage`.
        attempts: How many completions were parsed as response_model: 1 more than max_retries at most.
    """

    messages: list[Message]
    rounds: tuple[ChatCompletion, ...] = ()
    attempts: int = 1
    _parsed: T | None = None
    _is_parsed: bool = False

    @property
    def parsed(self) -> T:
        """Instance of response_model; without one None.

        Raises:
            ResponseModelError: The reply is calls of tools, and so there is no content to parse.
        """
        if not self._is_parsed and self.tool_calls:
            raise ResponseModelError(
                "the reply calls tools, so there is nothing to parse; add their results to its messages and go on",
                self.content,
                self,
            )
        return cast("T", self._parsed)  # which is None without a response_model

    @property
    def total_usage(self) -> Usage:
        """Token counts and times of this completion and its rounds together; the first round's `ttft_s`."""
        usages = [completion.usage for completion in (*self.rounds, self)]
        numbers = (field.name for field in fields(Usage) if isinstance(getattr(self.usage, field.name), (int, float)))
        sums: dict[str, Any] = {
            name: sum(getattr(usage, name) for usage in usages) for name in numbers if name != "ttft_s"
        }
        return replace(usages[0], cached_from=self.usage.cached_from, **sums)


def reply_of(
    completion: ChatCompletion,
    messages: Sequence[Message],
    rounds: Sequence[ChatCompletion],
    *,
    attempts: int = 1,
    parsed: object = None,
    is_parsed: bool = False,
) -> ChatReply[Any]:
    """Return a completion with its conversation. messages: up to and with it."""
    known = {field.name: getattr(completion, field.name) for field in fields(ChatCompletion)}
    return ChatReply(
        **known, messages=list(messages), rounds=tuple(rounds), attempts=attempts, _parsed=parsed, _is_parsed=is_parsed
    )


def is_whole(completion: ChatCompletion) -> bool:
    """Return whether the first choice has come to its own end."""
    return completion.finish_reason in _WHOLE


def reply_message(message: ParsedMessage) -> Message:
    """Return a generated message as one of a conversation.

    Line breaks around the thinking are left out: the template has its own.
    """
    made: Message = {"role": "assistant", "content": message.content}
    reasoning = message.reasoning_content.strip("\n")
    if reasoning:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [_call_message(call) for call in message.tool_calls]
    return made


def plain_messages(messages: object) -> object:
    """Return a conversation with mappings in place of generated messages and of SDKs' objects (pydantic models)."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        return messages  # refused when it is parsed
    return [_plain_message(message) for message in messages]


def num_leading(messages: Sequence[Any]) -> int:
    """Return the number of system and developer messages at the beginning of a conversation."""
    return next((i for i, one in enumerate(messages) if _role_of(one) not in _SYSTEM), len(messages))


def exchange_starts(messages: Sequence[Any]) -> list[int]:
    """Return the indices at which exchanges begin: after the system messages, and at each user message after another role."""
    first = num_leading(messages)
    roles = [_role_of(message) for message in messages]
    return [i for i in range(first, len(roles)) if i == first or (roles[i] == "user" and roles[i - 1] != "user")]


def _role_of(message: Any) -> object:
    return (
        message.get("role") if isinstance(message, Mapping) else None
    )  # what is malformed is refused when it is parsed


def _plain_message(message: Any) -> Any:
    if isinstance(message, ParsedMessage):
        return reply_message(message)
    is_model = not isinstance(message, (Mapping, type)) and callable(getattr(message, "model_dump", None))
    return message.model_dump() if is_model else message


def _call_message(call: ToolCall) -> Mapping[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def result_message(call: ToolCall, result: str) -> Message:
    """Return the result of a call as a message."""
    return {"role": "tool", "tool_call_id": call.id, "content": result}


_KINDS: Final = ("image_url", "image", "input_audio", "audio")


def read_attachment(name: str, part: object) -> Attachment | None:
    """Return the image or audio that a part is, or has as the member of its type's name; None for other parts.

    Raises `InvalidParams` for one that is none, naming the part.
    """
    if is_attachment(part):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
        return None
    kind: str = part["type"]
    if kind not in part:
        raise InvalidParams(f"{name}.{kind} is missing")
    value = part[kind]
    read = _audio_of if kind in ("input_audio", "audio") else _image_of
    return value if is_attachment(value) else read(f"{name}.{kind}", kind, value)


def parsed_with_attachments(messages: object) -> list[dict[str, Any]]:
    """Check a conversation; return it as `parse_messages` does, with an `Image` or `Audio` in place of each part that is one."""
    media = ChatMedia(messages, read_attachment)
    return media.loaded(parse_messages(media.messages))


def saved_part(part: Any) -> Any:
    """Return a part as JSON can have it, which `read_attachment` reads again."""
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.to_url()}}
    if isinstance(part, Audio):
        return {"type": "input_audio", "input_audio": {"data": part.to_base64(), "format": part.format}}
    return part


def _image_of(name: str, kind: str, value: Any) -> Image:
    try:
        if kind == "image":
            return Image(value)
        if isinstance(value, Mapping):
            name, value = f"{name}.url", value.get("url")
        return value if isinstance(value, Image) else Image.from_url(value)
    except PacelineError as error:
        raise type(error)(f"{name}: {error}") from error


def _audio_of(name: str, kind: str, value: Any) -> Audio:
    try:
        return Audio(value) if kind == "audio" else Audio.from_part(value)
    except PacelineError as error:
        raise type(error)(f"{name}: {error}") from error


_MAX_ERROR_CHARS = 2000
_FINAL = frozenset((FinishReason.DEADLINE, FinishReason.CANCELLED, FinishReason.SHUTDOWN))
_REPLY_SHARE = 4  # of the context, the part that a reply without max_tokens finds free
_EMPTY_AFTER_RESULTS = "the model's reply after the results of tools is empty; ask it again, or try a larger model"
_log = logging.getLogger("paceline.chat")


class ChatCall:
    """A conversation from its messages to the reply, over as many rounds as its tools take."""

    def __init__(
        self, messages: object, arguments: ChatArguments, chat_format: ChatFormat, history: TokenHistory | None = None
    ) -> None:
        """Begin.

        Args:
            messages: The conversation; checked when it is rendered.
            arguments: Of the call.
            chat_format: The format of its template.
            history: Of the conversation, if there were turns before.
        """
        self._messages = cast("Sequence[Any]", plain_messages(messages))  # `prepare` checks them
        self._arguments = arguments
        self._format = chat_format
        self._history = TokenHistory() if history is None else history
        self._rounds: list[ChatCompletion] = []
        self._request: ChatRequest | None = None
        self._segments: list[Segment] | None = None  # of a prompt with images
        self._completion: ChatCompletion | None = None
        self._is_cut_off = False
        self._parsed: Any = None
        self._failed: ValueError | None = None  # why the last reply was refused, if another one was asked for
        self._messages_before: list[Message] | None = None  # the first reply that was refused
        self._num_retries = 0

    @property
    def request(self) -> ChatRequest:
        """What was prepared last."""
        assert self._request is not None  # noqa: S101 - our own invariant
        return self._request

    @property
    def rendered(self) -> RenderedPrompt:
        """The prompt that was prepared last."""
        return self.request.rendered

    @property
    def messages(self) -> list[Message]:
        """The conversation as far as it is known."""
        return list(self._messages)

    @property
    def history(self) -> TokenHistory:
        """Token ids of the conversation, as far as it is known."""
        return self._history

    @property
    def toolbox(self) -> Toolbox:
        """What runs calls."""
        return self._arguments.toolbox

    @property
    def may_run_tools(self) -> bool:
        """Whether calls of the next message would be run."""
        return len(self._rounds) < self._arguments.max_tool_rounds

    @property
    def completion(self) -> ChatCompletion | None:
        """What was generated last."""
        return self._completion

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended at calls without their results; see `cut_off`."""
        return self._is_cut_off

    def prepare(self, engine: EngineClient) -> Request:
        """Prepare the next round for an engine. Raises what is wrong with the conversation, its options or its length.

        With context_overflow="drop_oldest" the oldest messages after the system message are left out of a prompt that would
        leave the reply too little room, in whole exchanges: the user's messages with the replies, calls and results that follow
        them. Then the prompt takes at most half of the context if it can, so that this is not done every turn.
        """
        try:
            return self._fitted(engine)
        except Closed:  # the chat format is closed with its model
            raise EngineStopped("the engine was shut down and takes no requests; make a new one") from None

    def _fitted(self, engine: EngineClient) -> Request:
        first = self._history.first_kept
        if not self._arguments.drops_oldest:
            return self._prepared_from(engine, first)
        most, max_tokens = engine.limits.max_positions, self._arguments.params.max_tokens
        reserved = most // _REPLY_SHARE if max_tokens is None else min(max_tokens, most // 2)
        try:
            request = self._prepared_from(engine, first)
        except PromptTooLong:
            request = None
        if request is not None and len(request.prompt) <= most - reserved:
            return request
        # A correction of a reply is no exchange of its own.
        exchanges = exchange_starts(self._messages if self._messages_before is None else self._messages_before)
        later = [start for start in exchanges if start > first]
        if not later:
            return self._prepared_from(engine, first) if request is None else request

        def fits(start: int) -> bool:
            try:
                return len(self._prepared_from(engine, start).prompt) <= most // 2
            except PromptTooLong:
                return False

        chosen = later[min(bisect.bisect_left(later, True, key=fits), len(later) - 1)]
        num_left_out = chosen - max(first, num_leading(self._messages))
        _log.info(
            "the context is full: the oldest messages of a chat, %d more, are left out of its prompt", num_left_out
        )
        return self._prepared_from(engine, chosen)

    def _prepared_from(self, engine: EngineClient, first: int) -> Request:
        """Prepare the next round with the system message and the messages from index `first` on."""
        kept = num_leading(self._messages) if first else 0  # the first attempt checks the messages
        left_out = self._messages[kept:first] if first else []
        shown = [*self._messages[:kept], *self._messages[max(first, kept) :]] if left_out else self._messages
        images = ChatMedia(shown, read_attachment, self._history.nonce, engine.model.modalities)
        turn = self._arguments.turn(images.messages, len(self._rounds))
        restored = images.restored(turn.messages)
        self._messages = [*restored[:kept], *left_out, *restored[kept:]]
        self._history.first_kept = first
        options = self._arguments.options_after(len(self._rounds))
        asked = self._arguments.request_options
        try:
            with cache_scope(asked.tenant, asked.cache_salt):
                prepared = self._prepared(self._arguments.shown(turn), options, engine.limits.max_positions)
        except PromptTooLong as error:
            raise self._too_long(error, engine.limits) from None
        if not self._rounds:
            for warning in (*images.warnings, *prepared.warnings):
                _log.warning("%s", warning)
        prompt = self._prompt(prepared, images)
        wanted = dataclasses.replace(
            self._arguments.request_options, preserved_tokens=prepared.preserved_tokens, add_special=False
        )
        try:
            return engine.prepare(prompt, prepared.params, wanted)
        except PromptTooLong as error:
            raise self._too_long(error, engine.limits) from None

    def _too_long(self, error: PromptTooLong, limits: Limits) -> PromptTooLong:
        may_drop = not self._arguments.drops_oldest and len(exchange_starts(self._messages)) > 1
        drop = 'context_overflow="drop_oldest" leaves the oldest messages out of the prompt; or ' if may_drop else ""
        return chat_too_long(error, limits, drop)

    def _prepared(self, turn: Turn, options: ChatOptions, max_positions: int) -> ChatRequest:
        """Prepare a turn. A grammar of the chat format enforces less of a response_model, which is parsed in any case."""
        params, response = self._arguments.params, self._arguments.response
        try:
            return prepare_chat(self._format, turn, options, params, max_positions=max_positions)
        except GrammarError:
            if response is None:
                raise
        params = params.replace(json_schema=response.schema_in_chat_grammars)
        return prepare_chat(self._format, turn, options, params, max_positions=max_positions)

    def _prompt(self, prepared: ChatRequest, images: ChatMedia) -> Prompt:
        """Note what is generated next, and return its prompt, which begins as the history does if it can."""
        if images.attachments:
            self._request = prepared
            self._segments = self._history.segments(prepared.rendered, images, self._format.tokenizer)
            return self._segments
        self._request = self._history.continued(prepared, self._format.tokenizer)
        self._segments = None
        return self._request.token_ids

    def take(self, completion: Completion, index: int = 0) -> tuple[ToolCall, ...]:
        """Read what was generated; return the calls to run before the next round, none if this is the reply.

        index: of the conversation among those of the call.
        """
        return self.take_read(dataclasses.replace(chat_completion_of(completion, self.rendered), index=index))

    def take_read(self, completion: ChatCompletion) -> tuple[ToolCall, ...]:
        """As `take`, for a completion whose messages were read while they came."""
        self._history.record(
            self.request, completion.prompt_token_ids, completion.choices[0], self._format.tokenizer, self._segments
        )
        if self._rounds and self._num_retries == 0 and not (completion.content or completion.tool_calls):
            completion = _with_warning(completion, _EMPTY_AFTER_RESULTS)
        for choice in completion.choices:
            if choice.warning is not None:
                _log.warning("%s", choice.warning)
        self._completion = completion
        self._messages = self._with(completion.message)
        if completion.tool_calls:
            self._messages_before = None  # the calls follow the reply that was refused
        calls = completion.tool_calls
        runs = calls and self.may_run_tools and is_whole(completion)
        return calls if runs and self._arguments.toolbox.can_run(calls) else ()

    def add_results(self, results: Iterable[tuple[ToolCall, str]]) -> None:
        """Take the results of the calls; the next round follows."""
        assert self._completion is not None  # noqa: S101 - our own invariant
        self._rounds.append(self._completion)
        self._messages = [*self._messages, *(result_message(call, result) for call, result in results)]

    def cut_off(self, reason: FinishReason, error: PacelineError | None = None) -> ChatCompletion:
        """End at the calls of the last message, for another reason than the message itself had; return it so."""
        assert self._completion is not None  # noqa: S101 - our own invariant
        self._is_cut_off = True
        (choice,) = self._completion.choices
        choices = (dataclasses.replace(choice, finish_reason=reason, error=error),)
        self._completion = dataclasses.replace(self._completion, choices=choices)
        return self._completion

    def asks_again(self) -> bool:
        """Return whether another round follows, since the content is no instance of response_model.

        A deadline, a cancel, the end of the engine and a full context end the call.
        """
        problem = self._problem()
        if problem is None or self._num_retries == self._arguments.max_retries:
            return False
        assert self._completion is not None  # noqa: S101 - our own invariant
        if self._completion.finish_reason in _FINAL or self._has_full_context():
            return False
        self._failed, self._num_retries = problem, self._num_retries + 1
        if self._messages_before is None:
            self._messages_before = list(self._messages[:-1])
        self._rounds.append(self._completion)
        self._messages = [*self._messages, {"role": "user", "content": _correction(problem)}]
        return True

    def _has_full_context(self) -> bool:
        """Return whether the context ended the last reply, and not `max_tokens`."""
        completion, most = self._completion, self._arguments.params.max_tokens
        assert completion is not None  # noqa: S101 - our own invariant
        is_cut = completion.finish_reason is FinishReason.LENGTH
        return is_cut and (most is None or completion.usage.completion_tokens < most)

    def error_of_round(self, error: PacelineError) -> PacelineError:
        """Return the error of a round that was refused; if it was to correct a reply, a `ResponseModelError` with that reply."""
        response, completion = self._arguments.response, self._completion
        if self._messages_before is None or response is None or not isinstance(error, PromptTooLong):
            return error
        assert completion is not None  # noqa: S101 - our own invariant
        return ResponseModelError(
            f"the reply is not a valid {response.name}: {self._failed}; the context has no room for another attempt: {error}",
            completion.content,
            reply_of(
                completion, [*self._messages_before, self._messages[-2]], self._rounds[:-1], attempts=self._num_retries
            ),
        )

    def _problem(self) -> ValueError | None:
        """Parse the content of a reply; return why it is no instance of response_model, if it is none."""
        completion, response = self._completion, self._arguments.response
        assert completion is not None  # noqa: S101 - our own invariant
        if response is None or completion.tool_calls:
            return None
        if not is_whole(completion):
            return ValueError(
                f"it was cut off ({completion.finish_reason}) after {completion.usage.completion_tokens} tokens, before "
                f"it was a whole {response.name}"
            )
        try:
            self._parsed = response.parse(completion.content)
        except ValueError as error:
            return error
        return None

    def reply(self) -> ChatReply[Any]:
        """Return the reply. Raises `ResponseModelError` if its content is no instance of response_model."""
        completion, response = self._completion, self._arguments.response
        assert completion is not None  # noqa: S101 - our own invariant
        messages = self._messages
        if self._messages_before is not None:  # the replies that were refused are no part of the conversation
            messages = [*self._messages_before, self._messages[-1]]
        problem = self._problem()
        is_parsed = response is not None and problem is None and not completion.tool_calls
        whole = reply_of(
            completion,
            messages,
            self._rounds,
            attempts=self._num_retries + 1,
            parsed=self._parsed if is_parsed else None,
            is_parsed=is_parsed,
        )
        if problem is None or response is None:
            return whole
        tried = f" after {self._num_retries + 1} attempts" if self._num_retries else ""
        advice = ""
        if completion.finish_reason is FinishReason.DEADLINE:
            advice = "; a larger timeout_s may help"
        elif completion.finish_reason is FinishReason.LENGTH:
            advice = f"; a larger {'n_ctx' if self._has_full_context() else 'max_tokens'} may help"
        raise ResponseModelError(
            f"the reply is not a valid {response.name}{tried}: {problem}{advice}", completion.content, whole
        ) from problem

    def _with(self, message: ParsedMessage) -> list[Message]:
        """Return the conversation with a message; one that continues the last message has its text, too."""
        before: list[Message] = [dict(one) for one in self._messages]
        made = reply_message(message)
        if self.rendered.is_continued:
            begun = before.pop()
            parts = begun["content"]
            text = parts if isinstance(parts, str) else "\n\n".join(part["text"] for part in parts)
            made["content"] = text + made["content"]
            if begun.get("reasoning_content"):
                made["reasoning_content"] = begun["reasoning_content"] + made.get("reasoning_content", "")
        return [*before, made]


def _with_warning(completion: ChatCompletion, text: str) -> ChatCompletion:
    """Return a completion of one choice with a warning, unless it has one."""
    (choice,) = completion.choices
    warning = choice.warning or ChatParseError(text)
    return dataclasses.replace(completion, choices=(dataclasses.replace(choice, warning=warning),))


def _correction(problem: ValueError) -> str:
    """Return the message that tells the model why its reply is no instance of response_model."""
    lines = [line for line in str(problem).splitlines() if "For further information" not in line]
    return "The reply is not valid:\n" + "\n".join(lines)[:_MAX_ERROR_CHARS] + "\nWrite the corrected reply."


class ChatAssembly:
    """Reads the chunks of one request as chunks of a chat, and puts them together at the end. One thread at a time.

    completion: the whole, once it is; pending: its calls, if they are run before another request.
    """

    def __init__(
        self, call: ChatCall, prompt: Sequence[int], on_end: Callable[[ChatCall], object] | None = None
    ) -> None:
        """Begin to read.

        Args:
            call: The chat, prepared.
            prompt: Its prompt as it is computed.
            on_end: Called with the chat on the thread that reads the terminal chunk.
        """
        self._call, self._prompt = call, prompt
        self._reader = ChatReader(call.rendered, call.request.params.n)
        self._received: list[StreamChunk] = []
        self._last_chunks: dict[int, ChatChunk] = {}
        self._on_end = on_end
        self.completion: ChatCompletion | None = None
        self.pending: tuple[ToolCall, ...] = ()

    def needs_parser(self, chunk: StreamChunk) -> bool:
        """Return whether reading this chunk takes time."""
        return self._reader.needs_parser(chunk)

    def read(self, chunk: StreamChunk) -> list[ChatChunk]:
        """Return what a chunk brings."""
        self._received.append(chunk)
        chunks = self._reader.read(chunk)
        self._last_chunks |= {one.choice: one for one in chunks if one.finish_reason is not None}
        if chunk.usage is not None:
            self.pending = self._call.take_read(self._assembled())
            self.completion = completion = self._call.completion
            assert completion is not None  # noqa: S101 - it was taken
            if self.pending:  # then this is not the stream's end
                chunks[-1] = msgspec.structs.replace(chunks[-1], finish_reason=None, usage=None)
            else:
                last = chunks[-1]
                warnings = {choice.index: choice.warning for choice in completion.choices}
                chunks[-1] = msgspec.structs.replace(last, warning=warnings[last.choice])
                self._has_ended()
        return chunks

    @property
    def may_go_on(self) -> bool:
        """Whether calls are run before another request, as far as it is known."""
        return self._call.may_run_tools if self.completion is None else bool(self.pending)

    @property
    def call(self) -> ChatCall:
        """The chat."""
        return self._call

    def cut_off(self, reason: FinishReason, error: PacelineError | None = None) -> ChatChunk:
        """End the chat in front of another request; return its terminal chunk."""
        self.pending = ()
        self.completion = completion = self._call.cut_off(reason, error)
        self._has_ended()
        return ChatChunk(
            choice=0, finish_reason=reason, usage=completion.usage, error=error, message=completion.message
        )

    def _has_ended(self) -> None:
        if self._on_end is not None:
            self._on_end(self._call)

    def reply(self) -> ChatReply[Any]:
        """Return the reply of a chat that has ended. Raises `ResponseModelError`."""
        return self._call.reply()

    def _assembled(self) -> ChatCompletion:
        params = self._call.request.params
        whole = completion_of(
            self._received,
            prompt=self._prompt,
            wants_logprobs=params.logprobs is not None,
            wants_prompt_logprobs=params.prompt_logprobs is not None,
            index=0,
        )
        self._received.clear()
        return ChatCompletion(
            choices=tuple(self._choices(whole)),
            prompt_token_ids=whole.prompt_token_ids,
            usage=whole.usage,
            prompt_logprobs=whole.prompt_logprobs,
        )

    def _choices(self, whole: Completion) -> Iterable[ChatChoice]:
        """Yield the choices with the messages that were streamed, whose calls have their ids."""
        texts = {choice.index: choice for choice in whole.choices}
        for index, last in sorted(self._last_chunks.items()):
            generated = texts.get(index)
            assert last.message is not None  # noqa: S101 - a choice's last chunk has its message
            assert last.finish_reason is not None  # noqa: S101 - and its reason
            yield ChatChoice(
                index=index,
                message=last.message,
                finish_reason=last.finish_reason,
                text="" if generated is None else generated.text,
                token_ids=() if generated is None else generated.token_ids,
                stop=last.stop,
                logprobs=None if generated is None else generated.logprobs,
                error=last.error,
                warning=last.warning,
            )
