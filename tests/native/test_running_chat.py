"""The chat of a request: messages are parsed beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.native.test_chat_completion import CALL, USAGE, message_of, rendered

from paceline import SamplingParams
from paceline.chat import ChatChunk, ChatRequest, MessageParser, ParsedMessage
from paceline.server.dialects.dialect import RunningChat
from paceline.streaming import FinishReason, StreamChunk


class OneBatch:
    """A running request with all of its chunks at once."""

    request_id, tenant, prompts, heartbeat_s = "r", None, ((1,),), 10.0

    def __init__(self, texts: list[str]) -> None:
        self._chunks = [StreamChunk(index=0, text=text, token_ids=(1,)) for text in texts]
        self._chunks.append(StreamChunk(index=0, finish_reason=FinishReason.STOP, usage=USAGE))

    async def batches(self) -> AsyncIterator[list[tuple[int, StreamChunk]]]:
        """Yield the batch."""
        yield [(0, chunk) for chunk in self._chunks]


def test_a_mark_in_two_chunks_of_a_batch_is_not_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a chunk depends on earlier chunks in the batch."""
    threads = []
    plain = MessageParser.parse

    def noted(self: MessageParser, text: str, *, is_partial: bool = False) -> ParsedMessage:
        threads.append((len(text), threading.current_thread()))
        return plain(self, text, is_partial=is_partial)

    async def read(running: Any) -> list[ChatChunk]:
        chat = RunningChat(running, ChatRequest(rendered(), [1], SamplingParams()))
        return [chunk async for batch in chat.batches() for _, chunk in batch]

    monkeypatch.setattr(MessageParser, "parse", noted)
    texts = ["Wait. ", "It rains. " * 400, CALL[:6], CALL[6:]]
    chunks = asyncio.run(read(OneBatch(texts)))
    assert message_of(chunks) == chunks[-1].message
    assert len(chunks) == len(texts) + 1
    long = {thread for length, thread in threads if length > 1024}
    assert long and threading.main_thread() not in long


def test_warnings_about_a_chat_are_limited() -> None:
    """A schema may have any number of parts that are not enforced."""
    sentences = tuple(f"sentence {index}" for index in range(500))
    request = ChatRequest(rendered(), [1], SamplingParams(), warnings=sentences)
    running: Any = OneBatch([])
    assert RunningChat(running, request).warnings == (*sentences[:32], "and 468 more warnings")
