"""One conversation of a call of `chat`: what is generated next, and what becomes of it. One thread at a time.

Rendering and parsing take time: not on an event loop.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from paceline.chat import (
    ChatCompletion,
    ChatFormat,
    ChatOptions,
    ChatRequest,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    Turn,
    chat_completion_of,
    prepare_chat,
)
from paceline.chat.chat_media import ChatMedia, Segment
from paceline.chat_client.chat_arguments import ChatArguments
from paceline.chat_client.chat_attachments import read_attachment
from paceline.chat_client.chat_reply import (
    ChatReply,
    Message,
    exchange_starts,
    is_whole,
    num_leading,
    plain_messages,
    reply_message,
    reply_of,
    result_message,
)
from paceline.chat_client.function_tools import Toolbox
from paceline.chat_client.token_history import TokenHistory
from paceline.completion import Completion
from paceline.engine.prompts import chat_too_long
from paceline.errors import (
    ChatParseError,
    Closed,
    EngineStopped,
    GrammarError,
    PacelineError,
    PromptTooLong,
    ResponseModelError,
)
from paceline.request import cache_scope
from paceline.scheduling.sequence import Request
from paceline.streaming import FinishReason

if TYPE_CHECKING:
    from paceline.engine import EngineClient
    from paceline.engine.prompts import Prompt
    from paceline.scheduling.limits import Limits

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
