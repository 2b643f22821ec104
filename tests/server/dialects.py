"""The APIs for chats, as clients read them: bodies, streams and their ends."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from typing import Any, Self

import httpx
from tests.server.running import LONG_S

STORY = "Tell me a story about a fox."
NOTE = {"type": "object", "properties": {"text": {"type": "string", "minLength": 600}}, "required": ["text"]}
"""Arguments of a tool that take more tokens than any test reads."""

Event = dict[str, Any]


class Dialect(ABC):
    """One route for chats. name: in tests' ids; is_sse: whether streams are events and not lines."""

    name: str
    path: str
    is_sse = True

    @abstractmethod
    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        """Return a request for a story, or for a call of a tool with long arguments."""

    @abstractmethod
    def has_text(self, event: Event) -> bool:
        """Return whether an event has something that was generated."""

    @abstractmethod
    def failure(self, events: list[Event]) -> str:
        """Return the message of the error that a stream ended with; assert that it ended as this API's streams do."""

    @abstractmethod
    def ending(self, events: list[Event]) -> str:
        """Return why a stream that was whole ended; assert that it ended as this API's streams do."""

    @abstractmethod
    def error_message(self, body: Any) -> str:
        """Return the message of an error's body; assert its shape."""

    def is_busy(self, status: int) -> bool:
        """Return whether a status is this API's for a full queue."""
        return status == 429

    def event(self, line: str) -> Event | None:
        """Return the event of a line; None if it has none."""
        if not line.startswith("data: "):
            return None
        data = line.removeprefix("data: ")
        return {"done": True} if data == "[DONE]" else json.loads(data)  # type: ignore[no-any-return]


class OpenAIChat(Dialect):
    name, path = "openai-chat", "/v1/chat/completions"

    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        function = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
        more: dict[str, Any] = {"tools": [function], "tool_choice": "required"} if tool else {}
        messages = [{"role": "user", "content": STORY}]
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream, **options, **more}

    def has_text(self, event: Event) -> bool:
        deltas = [choice["delta"] for choice in event.get("choices", ())]
        return any(
            delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls") for delta in deltas
        )

    def failure(self, events: list[Event]) -> str:
        *before, failed, done = events
        assert done == {"done": True}
        assert not any(choice["finish_reason"] for payload in before for choice in payload["choices"])
        return self.error_message(failed)

    def ending(self, events: list[Event]) -> str:
        *before, usage, done = events
        assert done == {"done": True}
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] > 0
        (reason,) = [
            choice["finish_reason"] for payload in before for choice in payload["choices"] if choice["finish_reason"]
        ]
        return str(reason)

    def error_message(self, body: Any) -> str:
        assert set(body) == {"error"}
        assert {"message", "type", "param", "code"} <= set(body["error"])
        return str(body["error"]["message"])


class Responses(Dialect):
    name, path = "responses", "/v1/responses"

    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        function = {"type": "function", "name": "note", "parameters": NOTE}
        more: dict[str, Any] = {"tools": [function], "tool_choice": "required"} if tool else {}
        return {"input": STORY, "max_output_tokens": max_tokens, "temperature": 0, "stream": stream, **more}

    def has_text(self, event: Event) -> bool:
        return str(event["type"]).endswith(".delta")

    def failure(self, events: list[Event]) -> str:
        *before, error, failed = events
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))
        assert not any(event["type"] in ("response.completed", "response.incomplete") for event in before)
        assert (error["type"], failed["type"]) == ("error", "response.failed")
        response = failed["response"]
        assert (response["status"], response["error"]["message"]) == ("failed", error["message"])
        assert response["output"][-1]["status"] == "incomplete"
        return str(error["message"])

    def ending(self, events: list[Event]) -> str:
        response = events[-1]["response"]
        assert events[-1]["type"] == f"response.{response['status']}"
        assert response["usage"]["output_tokens"] > 0
        return str(response["status"])

    error_message = OpenAIChat.error_message


class AnthropicMessages(Dialect):
    name, path = "anthropic", "/v1/messages"

    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        tools = [{"name": "note", "input_schema": NOTE}]
        more: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}} if tool else {}
        messages = [{"role": "user", "content": STORY}]
        return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream, **more}

    def has_text(self, event: Event) -> bool:
        return bool(event["type"] == "content_block_delta")

    def failure(self, events: list[Event]) -> str:
        *before, error = events
        kinds = [event["type"] for event in before]
        assert kinds[0] == "message_start"
        assert not {"message_delta", "message_stop", "error"} & set(kinds)
        return self.error_message(error)

    def ending(self, events: list[Event]) -> str:
        *_, delta, stop = events
        assert (delta["type"], stop["type"]) == ("message_delta", "message_stop")
        assert delta["usage"]["output_tokens"] > 0
        return str(delta["delta"]["stop_reason"])

    def error_message(self, body: Any) -> str:
        assert set(body) == {"type", "error"}
        assert set(body["error"]) == {"type", "message"}
        assert body["type"] == "error"
        return str(body["error"]["message"])

    def is_busy(self, status: int) -> bool:
        return status == 529


class OllamaChat(Dialect):
    name, path, is_sse = "ollama-chat", "/api/chat", False

    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        options = {"num_predict": max_tokens, "temperature": 0}
        body = {"messages": [{"role": "user", "content": STORY}], "options": options, "stream": stream}
        # Ollama has no required calls; a format goes on for as long.
        return {**body, "format": NOTE, "think": False} if tool else body

    def has_text(self, event: Event) -> bool:
        message = event.get("message", {})
        return bool(message.get("content") or message.get("thinking"))

    def failure(self, events: list[Event]) -> str:
        *before, error = events
        assert not any(item["done"] for item in before)
        return self.error_message(error)

    def ending(self, events: list[Event]) -> str:
        *before, last = events
        assert not any(item["done"] for item in before)
        assert last["done"]
        assert last["eval_count"] > 0
        return str(last["done_reason"])

    def error_message(self, body: Any) -> str:
        assert set(body) == {"error"}
        assert isinstance(body["error"], str)
        return str(body["error"])

    def is_busy(self, status: int) -> bool:
        return status == 503

    def event(self, line: str) -> Event | None:
        return json.loads(line) if line else None


class OllamaGenerate(OllamaChat):
    name, path = "ollama-generate", "/api/generate"

    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        body = super().body(max_tokens, stream=stream, tool=tool)
        del body["messages"]
        return {**body, "prompt": STORY}

    def has_text(self, event: Event) -> bool:
        return bool(event.get("response") or event.get("thinking"))


class OllamaRaw(OllamaGenerate):
    """Without a template, and so without a chat."""

    name = "ollama-raw"

    def body(self, max_tokens: int, *, stream: bool = True, tool: bool = False) -> dict[str, Any]:
        return {**super().body(max_tokens, stream=stream, tool=tool), "raw": True}


DIALECTS: tuple[Dialect, ...] = (
    OpenAIChat(),
    Responses(),
    AnthropicMessages(),
    OllamaChat(),
    OllamaGenerate(),
    OllamaRaw(),
)


class OpenStreams:
    """Streams of every API on one server, each read by a thread of its own. A context manager that waits for their ends."""

    def __init__(self, url: str, *, max_tokens: int) -> None:
        self._url, self._max_tokens = url, max_tokens
        self._events: dict[str, list[Event]] = {dialect.name: [] for dialect in DIALECTS}
        self._begun: set[str] = set()
        self._changed = threading.Condition()
        self._failures: list[BaseException] = []

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._read, args=(dialect,), daemon=True) for dialect in DIALECTS]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.wait_ended()

    def wait_begun(self) -> None:
        """Wait until each has text."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._begun) == len(DIALECTS) or self._failures, LONG_S)
        assert not self._failures

    def wait_ended(self) -> dict[str, list[Event]]:
        """Return the events of each stream."""
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        assert not self._failures
        return self._events

    def _read(self, dialect: Dialect) -> None:
        try:
            with httpx.stream(
                "POST", self._url + dialect.path, json=dialect.body(self._max_tokens), timeout=LONG_S
            ) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    event = dialect.event(line)
                    if event is not None:
                        self._take(dialect, event)
        except BaseException as error:
            with self._changed:
                self._failures.append(error)
                self._changed.notify_all()

    def _take(self, dialect: Dialect, event: Event) -> None:
        self._events[dialect.name].append(event)
        if dialect.name not in self._begun and dialect.has_text(event):
            with self._changed:
                self._begun.add(dialect.name)
                self._changed.notify_all()
