"""Chats without a model: the methods of `LLM` over the fake engine, and a chat format of plain lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from paceline.chat import ChatOptions, RenderedPrompt, Turn
from paceline.chat_client.chat_methods import AsyncChatMethods, ChatMethods
from paceline.testing import FakeEngineClient
from paceline.testing.fake_backend import FakeTokenizer


class LineFormat:
    """A chat format with a line for each message in the prompt, and content alone in messages."""

    def __init__(self) -> None:
        self.tokenizer: Any = FakeTokenizer()
        self.tokenizer.token_id = lambda text: None
        self.tokenizer.decode = lambda ids, special=False: bytes(ids).decode("utf-8", "replace")
        self.turns: list[tuple[Turn, ChatOptions]] = []

    def render_turn(self, turn: Turn, options: ChatOptions, *, has_call_grammar: bool = False) -> RenderedPrompt:
        self.turns.append((turn, options))
        lines = [
            f"{message['role']}: {message['content']}{json.dumps(message.get('tool_calls', ''))}\n"
            for message in turn.messages
        ]
        return RenderedPrompt("".join(lines) + "assistant: ", eog_ids=self.tokenizer.eog_ids)

    def encode(self, rendered: RenderedPrompt) -> list[int]:
        return list(rendered.text.encode())


class FakeFormats:
    """One format, whatever the template."""

    def __init__(self) -> None:
        self.format = LineFormat()

    def get(self, template: object = None) -> Any:
        return self.format


class FakeChats(ChatMethods):
    """`LLM` without a model."""

    def __init__(self, engine: FakeEngineClient) -> None:
        self._engine = engine
        self._formats: Any = FakeFormats()


class FakeAsyncChats(AsyncChatMethods):
    """`AsyncLLM` without a model."""

    def __init__(self, engine: FakeEngineClient) -> None:
        self._fake, self._chat_template = engine, None
        self._formats: Any = FakeFormats()

    async def _engine(self) -> Any:
        return self._fake


def run_async(main: Callable[[FakeAsyncChats], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine with asynchronous chats on an engine of its own, for at most a minute."""
    engine = FakeEngineClient()
    try:
        asyncio.run(asyncio.wait_for(main(FakeAsyncChats(engine)), 60))
    finally:
        engine.close()
