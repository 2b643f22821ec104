"""One conversation of a call of `chat`: the next request, its reply, and both as messages. One thread at a time.

Rendering and parsing take time: not on an event loop.
"""

from __future__ import annotations

import bisect
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
    ChatReader,
    ChatRequest,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    chat_completion_of,
    parse_messages,
    prepare_chat,
)
from paceline.chat.chat_request import TokenHistory
from paceline.chat.conversation import ChatMedia, Segment
from paceline.chat.message_rewrites import joined_text, num_leading_systems, role_of
from paceline.chat_client.chat_arguments import ChatArguments
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
from paceline.streaming.chunk import Choice, Completion, completion_of, fields_of

if TYPE_CHECKING:
    from paceline.engine import EngineClient

T = TypeVar("T")

Message = dict[str, Any]
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)
_FINAL = frozenset((FinishReason.DEADLINE, FinishReason.CANCELLED, FinishReason.SHUTDOWN))
_MAX_ERROR_CHARS = 2000
_REPLY_SHARE = 4  # of the context, the part that a reply without max_tokens finds free
_EMPTY_AFTER_RESULTS = "the model's reply after the results of tools is empty; ask it again, or try a larger model"
_KINDS: Final = ("image_url", "image", "input_audio", "audio")
_log = logging.getLogger("paceline.chat")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChatReply(ChatCompletion, Generic[T]):
    """The result of `LLM.chat`: the completion, the conversation up to it, and the content as an instance of response_model.

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
        names = (field.name for field in fields(Usage) if field.name != "ttft_s")
        numbers = (name for name in names if isinstance(getattr(self.usage, name), (int, float)))
        sums: dict[str, Any] = {name: sum(getattr(usage, name) for usage in usages) for name in numbers}
        return replace(usages[0], cached_from=self.usage.cached_from, **sums)


# ---- messages of the caller, and of the model


def reply_message(message: ParsedMessage) -> Message:
    """Return a generated message as a message of a conversation. The template adds its own line breaks around the thinking."""
    made: Message = {"role": "assistant", "content": message.content}
    if reasoning := message.reasoning_content.strip("\n"):
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return made


def _plain_message(message: Any) -> Any:
    """Return a mapping in place of a generated message, or of an SDK's object (a pydantic model)."""
    if isinstance(message, ParsedMessage):
        return reply_message(message)
    is_model = not isinstance(message, (Mapping, type)) and callable(getattr(message, "model_dump", None))
    return message.model_dump() if is_model else message


def exchange_starts(messages: Sequence[Any]) -> list[int]:
    """Return the indices at which exchanges begin: after the system messages, and at each user message after another role."""
    first = num_leading_systems(messages)
    roles = [role_of(message) for message in messages]
    return [i for i in range(first, len(roles)) if i == first or (roles[i] == "user" and roles[i - 1] != "user")]


# ---- images and audio, as callers in this process give them: objects, paths, data URLs, base64


def read_attachment(name: str, part: object) -> Attachment | None:
    """Return the image or audio that a part is, or has as the member of its type's name; None for other parts."""
    if is_attachment(part):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
        return None
    kind: str = part["type"]
    if kind not in part:
        raise InvalidParams(f"{name}.{kind} is missing")
    value, name = part[kind], f"{name}.{kind}"
    if is_attachment(value):
        return value
    try:
        if kind == "image":
            return Image(value)
        if kind in ("audio", "input_audio"):
            return Audio(value) if kind == "audio" else Audio.from_part(value)
        if isinstance(value, Mapping):
            name, value = f"{name}.url", value.get("url")
        return value if isinstance(value, Image) else Image.from_url(value)
    except PacelineError as error:
        raise type(error)(f"{name}: {error}") from error


def parsed_with_attachments(messages: object) -> list[Message]:
    """Check a conversation; return it as `parse_messages` does, with an `Image` or `Audio` in place of each part that is one."""
    media = ChatMedia(messages, read_attachment)
    return media.loaded(parse_messages(media.messages))


def saved_message(message: Message) -> Message:
    """Return a message as JSON can have it, which `parsed_with_attachments` reads again: with files in base64."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts: list[Any] = []
    for part in content:
        if isinstance(part, Image):
            parts.append({"type": "image_url", "image_url": {"url": part.to_url()}})
        elif isinstance(part, Audio):
            parts.append({"type": "input_audio", "input_audio": {"data": part.to_base64(), "format": part.format}})
        else:
            parts.append(part)
    return {**message, "content": parts}


# ---- the call


class ChatCall:
    """A conversation from its messages to the reply, over as many rounds as its tools take.

    Attributes:
        messages: The conversation so far.
        history: Token ids of the conversation so far.
        toolbox: The tools, which run calls.
        completion: The latest generated message; None before the first.
        is_cut_off: Whether it ended at calls without their results; see `cut_off`.
    """

    def __init__(
        self, messages: object, arguments: ChatArguments, chat_format: ChatFormat, history: TokenHistory | None = None
    ) -> None:
        """Begin. The messages are checked when they are rendered. `history` has the turns before."""
        is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))  # else `prepare` refuses it
        self.messages: Any = [_plain_message(message) for message in cast("Any", messages)] if is_list else messages
        self.history = TokenHistory() if history is None else history
        self.toolbox = arguments.toolbox
        self.completion: ChatCompletion | None = None
        self.is_cut_off = False
        self._arguments, self._format = arguments, chat_format
        self._rounds: list[ChatCompletion] = []
        self._request: ChatRequest | None = None
        self._segments: list[Segment] | None = None  # of a prompt with images
        self._parsed: Any = None
        self._failed: ValueError | None = None  # why the last reply was refused, if another one was asked for
        self._messages_before: list[Message] | None = None  # the first reply that was refused
        self._num_retries = 0

    @property
    def request(self) -> ChatRequest:
        """The latest request."""
        assert self._request is not None  # noqa: S101 - our own invariant
        return self._request

    @property
    def rendered(self) -> RenderedPrompt:
        """The prompt of the latest request."""
        return self.request.rendered

    @property
    def may_run_tools(self) -> bool:
        """Whether calls of the next message would be run."""
        return len(self._rounds) < self._arguments.max_tool_rounds

    @property
    def _last(self) -> ChatCompletion:
        assert self.completion is not None  # noqa: S101 - our own invariant
        return self.completion

    # ---- requests

    def prepare(self, engine: EngineClient) -> Request:
        """Prepare the next round for an engine. Raises the errors of the conversation, its options or its length.

        With context_overflow="drop_oldest" the oldest exchanges after the system message are left out of a prompt that would
        leave the reply too little room. The prompt then takes at most half of the context if it can, so that this is rare.
        """
        try:
            return self._fitted(engine)
        except Closed:  # the chat format is closed with its model
            raise EngineStopped("the engine was shut down and takes no requests; make a new one") from None

    def _fitted(self, engine: EngineClient) -> Request:
        first = self.history.first_kept
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
        exchanges = exchange_starts(self.messages if self._messages_before is None else self._messages_before)
        later = [start for start in exchanges if start > first]
        if not later:
            return self._prepared_from(engine, first) if request is None else request

        def fits(start: int) -> bool:
            try:
                return len(self._prepared_from(engine, start).prompt) <= most // 2
            except PromptTooLong:
                return False

        chosen = later[min(bisect.bisect_left(later, True, key=fits), len(later) - 1)]
        more = chosen - max(first, num_leading_systems(self.messages))
        _log.info("the context is full: the oldest messages of a chat, %d more, are left out of its prompt", more)
        return self._prepared_from(engine, chosen)

    def _prepared_from(self, engine: EngineClient, first: int) -> Request:
        kept = num_leading_systems(self.messages) if first else 0  # the first attempt checks the messages
        left_out = self.messages[kept:first] if first else []
        shown = [*self.messages[:kept], *self.messages[max(first, kept) :]] if left_out else self.messages
        images = ChatMedia(shown, read_attachment, self.history.nonce, engine.model.modalities)
        arguments, num_rounds = self._arguments, len(self._rounds)
        turn = arguments.turn(images.messages, num_rounds)
        restored = images.restored(turn.messages)
        self.messages = [*restored[:kept], *left_out, *restored[kept:]]
        self.history.first_kept = first
        turn, options, asked = arguments.shown(turn), arguments.options_after(num_rounds), arguments.request_options
        most, params, response = engine.limits.max_positions, arguments.params, arguments.response
        try:
            with cache_scope(asked.tenant, asked.cache_salt):
                try:
                    prepared = prepare_chat(self._format, turn, options, params, max_positions=most)
                except GrammarError:  # chat formats enforce less of a response_model, which is parsed in any case
                    if response is None:
                        raise
                    params = params.replace(json_schema=response.schema_in_chat_grammars)
                    prepared = prepare_chat(self._format, turn, options, params, max_positions=most)
            if not self._rounds:
                for warning in (*images.warnings, *prepared.warnings):
                    _log.warning("%s", warning)
            if images.attachments:
                self._request = prepared
                self._segments = self.history.segments(prepared.rendered, images, self._format.tokenizer)
            else:
                self._request = self.history.continued(prepared, self._format.tokenizer)
                self._segments = None
            asked = replace(asked, preserved_tokens=prepared.preserved_tokens, add_special=False)
            prompt = self._request.token_ids if self._segments is None else self._segments
            return engine.prepare(prompt, prepared.params, asked)
        except PromptTooLong as error:
            may_drop = not arguments.drops_oldest and len(exchange_starts(self.messages)) > 1
            drop = 'context_overflow="drop_oldest" leaves the oldest messages out of the prompt; or '
            raise chat_too_long(error, engine.limits, drop if may_drop else "") from None

    # ---- replies

    def take(self, completion: Completion, index: int = 0) -> tuple[ToolCall, ...]:
        """Read the completion of the latest request; return the calls to run before the next round, none if this is the reply."""
        return self.take_read(replace(chat_completion_of(completion, self.rendered), index=index))

    def take_read(self, completion: ChatCompletion) -> tuple[ToolCall, ...]:
        """As `take`, for a completion with messages that were read while they came."""
        self.history.record(
            self.request, completion.prompt_token_ids, completion.choices[0], self._format.tokenizer, self._segments
        )
        if self._rounds and self._num_retries == 0 and not (completion.content or completion.tool_calls):
            (choice,) = completion.choices
            warning = choice.warning or ChatParseError(_EMPTY_AFTER_RESULTS)
            completion = replace(completion, choices=(replace(choice, warning=warning),))
        for choice in completion.choices:
            if choice.warning is not None:
                _log.warning("%s", choice.warning)
        self.completion = completion
        self.messages = self._with(completion.message)
        calls = completion.tool_calls
        if calls:
            self._messages_before = None  # the calls follow the reply that was refused
        runs = calls and self.may_run_tools and completion.finish_reason in _WHOLE
        return calls if runs and self.toolbox.can_run(calls) else ()

    def _with(self, message: ParsedMessage) -> list[Message]:
        """Return the conversation with a message. A message that continues the last message has the text of both."""
        before: list[Message] = [dict(earlier) for earlier in self.messages]
        made = reply_message(message)
        if self.rendered.is_continued:
            begun = before.pop()
            made["content"] = joined_text(begun["content"], "\n\n") + made["content"]
            if begun.get("reasoning_content"):
                made["reasoning_content"] = begun["reasoning_content"] + made.get("reasoning_content", "")
        return [*before, made]

    def add_results(self, results: Iterable[tuple[ToolCall, str]]) -> None:
        """Take the results of the calls; the next round follows."""
        self._rounds.append(self._last)
        self.messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results]

    def cut_off(self, reason: FinishReason, error: PacelineError | None = None) -> ChatCompletion:
        """End at the calls of the last message, for another reason than the message itself had; return it so."""
        self.is_cut_off = True
        (choice,) = self._last.choices
        self.completion = replace(self._last, choices=(replace(choice, finish_reason=reason, error=error),))
        return self.completion

    def asks_again(self) -> bool:
        """Return whether another round follows, since the content is no instance of response_model.

        A deadline, a cancel, the end of the engine and a full context end the call.
        """
        problem = self._problem()
        if problem is None or self._num_retries == self._arguments.max_retries:
            return False
        if self._last.finish_reason in _FINAL or self._has_full_context():
            return False
        self._failed, self._num_retries = problem, self._num_retries + 1
        if self._messages_before is None:
            self._messages_before = self.messages[:-1]
        self._rounds.append(self._last)
        lines = [line for line in str(problem).splitlines() if "For further information" not in line]
        reasons = "\n".join(lines)[:_MAX_ERROR_CHARS]
        correction = f"The reply is not valid:\n{reasons}\nWrite the corrected reply."
        self.messages = [*self.messages, {"role": "user", "content": correction}]
        return True

    def _has_full_context(self) -> bool:
        """Return whether the context ended the last reply, and not `max_tokens`."""
        most, last = self._arguments.params.max_tokens, self._last
        return last.finish_reason is FinishReason.LENGTH and (most is None or last.usage.completion_tokens < most)

    def error_of_round(self, error: PacelineError) -> PacelineError:
        """Return the error of a round that was refused; if it was to correct a reply, a `ResponseModelError` with that reply."""
        response = self._arguments.response
        if self._messages_before is None or response is None or not isinstance(error, PromptTooLong):
            return error
        return ResponseModelError(
            f"the reply is not a valid {response.name}: {self._failed}; the context has no room for another attempt: {error}",
            self._last.content,
            self._reply([*self._messages_before, self.messages[-2]], self._rounds[:-1], attempts=self._num_retries),
        )

    def _problem(self) -> ValueError | None:
        """Parse the content of a reply; return why it is no instance of response_model, if it is none."""
        last, response = self._last, self._arguments.response
        if response is None or last.tool_calls:
            return None
        if last.finish_reason not in _WHOLE:
            return ValueError(
                f"it was cut off ({last.finish_reason}) after {last.usage.completion_tokens} tokens, before "
                f"it was a whole {response.name}"
            )
        try:
            self._parsed = response.parse(last.content)
        except ValueError as error:
            return error
        return None

    def _reply(self, messages: Sequence[Message], rounds: Sequence[ChatCompletion], **facts: Any) -> ChatReply[Any]:
        return ChatReply(**fields_of(self._last), messages=list(messages), rounds=tuple(rounds), **facts)

    def reply(self) -> ChatReply[Any]:
        """Return the reply. Raises `ResponseModelError` if its content is no instance of response_model."""
        last, response, messages = self._last, self._arguments.response, self.messages
        if self._messages_before is not None:  # the replies that were refused are no part of the conversation
            messages = [*self._messages_before, messages[-1]]
        problem = self._problem()
        is_parsed = response is not None and problem is None and not last.tool_calls
        whole = self._reply(
            messages,
            self._rounds,
            attempts=self._num_retries + 1,
            _parsed=self._parsed if is_parsed else None,
            _is_parsed=is_parsed,
        )
        if problem is None or response is None:
            return whole
        tried = f" after {self._num_retries + 1} attempts" if self._num_retries else ""
        advice = ""
        if last.finish_reason is FinishReason.DEADLINE:
            advice = "; a larger timeout_s may help"
        elif last.finish_reason is FinishReason.LENGTH:
            advice = f"; a larger {'n_ctx' if self._has_full_context() else 'max_tokens'} may help"
        raise ResponseModelError(
            f"the reply is not a valid {response.name}{tried}: {problem}{advice}", last.content, whole
        ) from problem


class ChatAssembly:
    """Reads the chunks of one request as chunks of a chat, and puts them together at the end. One thread at a time.

    Attributes:
        call: The chat.
        completion: The whole message; None before its end.
        pending: Calls of the message that are run before another request.
    """

    def __init__(
        self, call: ChatCall, prompt: Sequence[int], on_end: Callable[[ChatCall], object] = lambda _: None
    ) -> None:
        """Begin to read. The thread that reads the terminal chunk calls `on_end` with the chat."""
        self.call, self._prompt, self._on_end = call, prompt, on_end
        self._reader = ChatReader(call.rendered, call.request.params.n)
        self.needs_parser = self._reader.needs_parser
        self._received: list[StreamChunk] = []
        self._last_chunks: dict[int, ChatChunk] = {}
        self.completion: ChatCompletion | None = None
        self.pending: tuple[ToolCall, ...] = ()

    @property
    def may_go_on(self) -> bool:
        """Whether calls are run before another request, as far as it is known."""
        return self.call.may_run_tools if self.completion is None else bool(self.pending)

    def read(self, chunk: StreamChunk) -> list[ChatChunk]:
        """Return the chunks of the chat that a chunk brings."""
        self._received.append(chunk)
        chunks = self._reader.read(chunk)
        self._last_chunks |= {ended.choice: ended for ended in chunks if ended.finish_reason is not None}
        if chunk.usage is not None:
            self.pending = self.call.take_read(self._assembled())
            self.completion = completion = self.call.completion
            last = chunks[-1]
            if self.pending:  # then this is not the stream's end
                chunks[-1] = msgspec.structs.replace(last, finish_reason=None, usage=None)
            elif completion is not None:
                warning = next(choice.warning for choice in completion.choices if choice.index == last.choice)
                chunks[-1] = msgspec.structs.replace(last, warning=warning)
                self._on_end(self.call)
        return chunks

    def cut_off(self, reason: FinishReason, error: PacelineError | None = None) -> ChatChunk:
        """End the chat before another request; return its terminal chunk."""
        self.pending = ()
        self.completion = completion = self.call.cut_off(reason, error)
        self._on_end(self.call)
        return ChatChunk(
            choice=0, finish_reason=reason, usage=completion.usage, error=error, message=completion.message
        )

    def _assembled(self) -> ChatCompletion:
        """Return the completion with the streamed messages, in which calls have their ids."""
        params = self.call.request.params
        whole = completion_of(
            self._received,
            prompt=self._prompt,
            wants_logprobs=params.logprobs is not None,
            wants_prompt_logprobs=params.prompt_logprobs is not None,
            index=0,
        )
        self._received.clear()
        generated = {choice.index: choice for choice in whole.choices}
        choices = []
        for index, last in sorted(self._last_chunks.items()):
            assert last.message is not None  # noqa: S101 - a choice's last chunk has its message
            assert last.finish_reason is not None  # noqa: S101 - and its reason
            choice = generated.get(index) or Choice(
                index=index, text="", token_ids=(), finish_reason=last.finish_reason
            )
            facts = fields_of(choice) | {"finish_reason": last.finish_reason, "stop": last.stop, "error": last.error}
            choices.append(ChatChoice(**facts, message=last.message, warning=last.warning))
        return ChatCompletion(**fields_of(whole) | {"choices": tuple(choices)})
