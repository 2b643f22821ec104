"""A conversation that remembers its turns, as messages and as token ids: `Conversation` and `AsyncConversation`."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, Unpack, overload

from paceline import validation
from paceline.chat.chat_request import TokenHistory
from paceline.chat.message_rewrites import joined_text, num_leading_systems
from paceline.chat_client.chat_arguments import (
    ChatKeywords,
    PlainChatKeywords,
    StreamChatKeywords,
    check_chat_options,
    with_chat_keywords,
)
from paceline.chat_client.chat_call import (
    ChatCall,
    ChatReply,
    Message,
    parsed_with_attachments,
    saved_message,
)
from paceline.chat_client.chat_methods import AsyncChatMethods, ChatMethods
from paceline.chat_client.chat_streams import AsyncChatStream, ChatStream
from paceline.engine.arguments import given_options
from paceline.errors import InvalidParams, InvalidType, StateError
from paceline.media import Attachment, is_attachment
from paceline.params import SamplingParams
from paceline.runtime import Model
from paceline.streaming.chunk import record_repr

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # known to type checkers without the package

_VERSION = 1
_MAX_FILE_BYTES = 512 << 20  # of a saved conversation, with its images
_NAMED = ("llm", "system", "messages", "params")
T = TypeVar("T")
AnyLLM = TypeVar("AnyLLM")

Content: TypeAlias = str | Sequence[Attachment | Mapping[str, Any]]


class _BaseConversation(Generic[AnyLLM]):
    """The base of both kinds: messages, token ids, and turns that are added once they are whole."""

    _engine_kind: type
    _engine_hint: str

    @with_chat_keywords
    def __init__(
        self,
        llm: AnyLLM,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = (),
        params: SamplingParams | None = None,
        **options: Unpack[ChatKeywords],
    ) -> None:
        """Begin a conversation.

        Args:
            llm: An `LLM`; for an `AsyncConversation` an `AsyncLLM`.
            system: The text of a system message, which says how the model shall behave.
            messages: The earlier messages.
            params: The sampling parameters of every turn.
            **options: Keywords of `LLM.chat` for every turn, for example tools and run_tools; with
                context_overflow="drop_oldest" a full context leaves the oldest messages out of prompts; `messages` and `save`
                have all of them.

        Raises:
            InvalidParams: A message is malformed, or an option is invalid or unknown.
        """
        if not isinstance(llm, self._engine_kind):
            raise InvalidType(f"llm must be {self._engine_hint.format(type(llm).__name__)}")
        self._llm = llm
        check_chat_options(params, options, _NAMED)
        messages = () if messages is None else messages
        if system is not None:
            messages = [{"role": "system", "content": validation.text("system", system)}, *messages]
        self._messages: list[Message] = parsed_with_attachments(messages) if messages else []
        self._params = params
        self._options: dict[str, Any] = dict(options)
        self._history, self._before = TokenHistory(), TokenHistory()
        self._fingerprint = ""  # of the model whose token ids the history has
        self._turn = 0
        self._open: weakref.ref[ChatStream | AsyncChatStream] | None = None

    def __repr__(self) -> str:
        last = None
        if self._messages:
            role, content = self._messages[-1]["role"], self._messages[-1]["content"]
            last = f"{role}: {content if isinstance(content, str) else f'{len(content)} parts'}"
        return record_repr(self, messages=len(self._messages), last=last)

    @property
    def messages(self) -> list[Message]:
        """The messages so far, a copy; each image as an `Image`, audio as an `Audio`."""
        return list(self._messages)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The last prompt and the tokens generated after it; the next prompt begins so as long as the template allows it.

        Negative numbers stand for the embeddings of images.
        """
        return self._history.token_ids

    @property
    def num_left_out(self) -> int:
        """How many of the oldest messages the last prompt left out, with context_overflow="drop_oldest"."""
        return max(0, self._history.first_kept - num_leading_systems(self._messages))

    def fork(self) -> Self:
        """Return a conversation that goes on from here by itself; both share the cached prefix.

        Returns:
            The new conversation, with the same options.
        """
        other = copy.copy(self)  # a subclass may have other parameters than this class
        other._messages, other._turn, other._open = list(self._messages), 0, None
        return other

    @classmethod
    @with_chat_keywords
    def load(
        cls,
        llm: AnyLLM,
        path: str | os.PathLike[str],
        *,
        params: SamplingParams | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Self:
        """Read a conversation from a file of `save`. Token ids of another model are left out.

        Args:
            llm: An `LLM`; for an `AsyncConversation` an `AsyncLLM`.
            path: Of the file.
            params: As for a new conversation.
            **options: As for a new conversation.

        Returns:
            The conversation.

        Raises:
            StateError: The file is no saved conversation, or is damaged.
            OSError: The file cannot be read.
        """
        made = cls(llm, params=params, **options)
        try:
            record = json.loads(validation.read_file(Path(path), _MAX_FILE_BYTES))
            if record["paceline_conversation"] != _VERSION:
                raise StateError(f"{path}: version {record['paceline_conversation']!r} of a conversation is not known")
            made._messages = parsed_with_attachments(record["messages"]) if record["messages"] else []
            ids = [validation.integer("token_ids", token, 0) for token in record["token_ids"]]
            made._history = TokenHistory(ids, validation.text("text", record["text"]))
            made._fingerprint = validation.text("model", record["model"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is not a saved conversation: {error}") from None
        return made

    def undo(self) -> Content | None:
        """Take back the last message of the user and the messages after it.

        Returns:
            The content of that message, to be said again or changed: its text, or its parts if it has images; None if
            there is none.
        """
        self._check_turn()
        places = [index for index, message in enumerate(self._messages) if message["role"] == "user"]
        if not places:
            return None
        said: str | list[Any] = self._messages[places[-1]]["content"]
        self._messages = self._messages[: places[-1]]
        self._history, self._before = self._before, TokenHistory()
        if isinstance(said, str) or any(map(is_attachment, said)):
            return said
        return joined_text(said, "\n\n")

    def clear(self) -> None:
        """Forget everything but system messages at the beginning."""
        self._check_turn()
        kept = next((i for i, message in enumerate(self._messages) if message["role"] != "system"), len(self._messages))
        self._messages = self._messages[:kept]
        self._history, self._before = TokenHistory(), TokenHistory()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a file, as JSON, images as data URLs. Options are not saved.

        Args:
            path: Of the file, which is replaced at once.

        Raises:
            OSError: The file cannot be written.
        """
        target = Path(path)
        history = TokenHistory() if self._history.has_images else self._history  # ids of images cannot be read back
        record = {
            "paceline_conversation": _VERSION,
            "messages": [saved_message(message) for message in self._messages],
            "model": self._fingerprint,
            "text": history.text,
            "token_ids": history.token_ids,
        }
        written = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            written.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
            written.replace(target)
        finally:
            written.unlink(missing_ok=True)

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the conversation, changed by the options of a turn that are not None."""
        return self._options | given_options(options)

    def _check_turn(self) -> None:
        running = None if self._open is None else self._open()
        if running is not None and running.is_open:
            raise InvalidParams(
                "the last turn of this conversation has not ended; read its stream to the end, or close it"
            )

    def _begin(self, content: Content) -> list[Message]:
        """Begin a turn and return its messages."""
        self._check_turn()
        if isinstance(content, str):
            validation.text("content", content)
        said = parsed_with_attachments([{"role": "user", "content": content}])
        self._turn += 1
        self._open = None
        return [*self._messages, *said]

    def _known(self, model: Model) -> TokenHistory:
        """Return a history for a turn to go on with: a new one if the token ids are another model's."""
        if self._fingerprint != model.fingerprint.hex():
            return TokenHistory()
        return self._history.copy()

    def _add(self, turn: int, messages: Sequence[Message], history: TokenHistory, model: Model) -> None:
        """Add a turn that has ended, unless another has begun meanwhile."""
        if turn == self._turn:
            self._messages = list(messages)
            self._before, self._history = self._history, history
            self._fingerprint = model.fingerprint.hex()

    def _add_streamed(self, turn: int, call: ChatCall, model: Model) -> None:
        completion = call.completion
        if completion is not None and completion.choices[0].error is None and not call.is_cut_off:
            self._add(turn, call.messages, call.history, model)


class Conversation(_BaseConversation[ChatMethods]):
    """A conversation with a model, which remembers its messages and computes only new tokens.

    A prompt begins with exactly the tokens of the turn before, prompt and generated, so that the prefix cache has them. If
    the chat template renders earlier turns otherwise than they were generated (many leave out their thinking), the prompt is
    rendered anew, and the cache serves it up to the first difference.

    A turn is added when it is whole: a call that raises, or a stream that is left before its terminal chunk, changes nothing.
    One thread at a time.

        talk = Conversation(llm, system="You are a pirate.")
        print(talk.say("Hello!").content)
        other = talk.fork()
        print(other.say([Image("map.png"), {"type": "text", "text": "Where is it?"}]).content)
    """

    _engine_kind = ChatMethods
    _engine_hint = "an LLM, not {}; an AsyncLLM takes an AsyncConversation"

    @overload
    def say(
        self, content: Content, *, response_model: TypeForm[T], **options: Unpack[PlainChatKeywords]
    ) -> ChatReply[T]: ...
    @overload
    def say(self, content: Content, **options: Unpack[ChatKeywords]) -> ChatReply[Any]: ...

    @with_chat_keywords
    def say(self, content: Content, **options: Unpack[ChatKeywords]) -> ChatReply[Any]:
        """Say something and return the reply.

        Args:
            content: The user's message: a text, or a list of parts as `LLM.chat` takes them, images among them. Files are
                read at once.
            **options: Keywords of `LLM.chat` for this turn, over those of the conversation.

        Returns:
            The reply.

        Raises:
            PacelineError: As `LLM.chat`; the conversation is as it was before.
        """
        messages, turn, llm = self._begin(content), self._turn, self._llm
        model = llm._engine.model
        call = llm._begin(messages, self._params, self._with(options), self._known(model))
        reply = llm._run(call)
        self._add(turn, reply.messages, call.history, model)
        return reply

    @with_chat_keywords
    def stream(self, content: Content, **options: Unpack[StreamChatKeywords]) -> ChatStream:
        """Say something and stream the reply.

        Args:
            content: The user's message, as for `say`.
            **options: Keywords of `LLM.stream_chat` for this turn, over those of the conversation.

        Returns:
            The stream. Its turn is added when its terminal chunk is read, also that of a stream that was cancelled, but not
            between calls and their results.

        Raises:
            PacelineError: As `LLM.stream_chat`; the conversation is as it was before.
        """
        messages, turn, llm = self._begin(content), self._turn, self._llm
        model = llm._engine.model
        call = llm._begin(messages, self._params, self._with(options), self._known(model), is_streamed=True)
        stream = llm._stream(call, on_end=lambda ended: self._add_streamed(turn, ended, model))
        self._open = weakref.ref(stream)
        return stream


class AsyncConversation(_BaseConversation[AsyncChatMethods]):
    """As `Conversation`, for an event loop and an `AsyncLLM`. One task at a time.

    talk = AsyncConversation(llm)
    print((await talk.say("Hello!")).content)
    """

    _engine_kind = AsyncChatMethods
    _engine_hint = "an AsyncLLM, not {}; an LLM takes a Conversation"

    @overload
    async def say(
        self, content: Content, *, response_model: TypeForm[T], **options: Unpack[PlainChatKeywords]
    ) -> ChatReply[T]: ...
    @overload
    async def say(self, content: Content, **options: Unpack[ChatKeywords]) -> ChatReply[Any]: ...

    @with_chat_keywords
    async def say(self, content: Content, **options: Unpack[ChatKeywords]) -> ChatReply[Any]:
        """Say something and return the reply, as `Conversation.say` does."""
        messages, turn, llm = self._begin(content), self._turn, self._llm
        model = (await llm._engine()).model
        call = await llm._begin(messages, self._params, self._with(options), self._known(model))
        reply = await llm._run(call)
        self._add(turn, reply.messages, call.history, model)
        return reply

    @with_chat_keywords
    def stream(self, content: Content, **options: Unpack[StreamChatKeywords]) -> AsyncChatStream:
        """Say something and stream the reply, as `Conversation.stream` does; submitted when it is entered or first read."""
        messages, turn = self._begin(content), self._turn
        stream = self._llm._stream(
            messages,
            self._params,
            self._with(options),
            make_history=self._known,
            on_end=lambda call, model: self._add_streamed(turn, call, model),
        )
        self._open = weakref.ref(stream)
        return stream
