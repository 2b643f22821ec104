"""Runs the requests of a workload against one server."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from pathlib import Path
from random import Random

from benchmarks.peers.client import Call, Dialect, Reply, stream
from benchmarks.peers.servers import Running
from benchmarks.peers.workloads import SCHEMA, PlannedRequest, Segment, Workload
from paceline import Model

_WORD = re.compile(rb" [a-z]{2,}")
WARM_UP_TOKENS = 24
_VARIATION = 1_000_003  # of seeds, which are smaller
KILL_AFTER_EVENTS = 16


class PromptMaker:
    """Makes prompts of whole words, so that their text splits into the same ids again."""

    def __init__(self, model: Path) -> None:
        pieces = Model.load(model, vocab_only=True).tokenizer.pieces(special=False)
        self._words = [(token, piece.decode()) for token, piece in enumerate(pieces) if _WORD.fullmatch(piece)]
        self._pieces = pieces

    def token_ids(self, segments: tuple[Segment, ...], variation: int = 0) -> list[int]:
        """Return the ids of the segments in a row; each variation has other ids, in the same pattern."""
        ids: list[int] = []
        for segment in segments:
            draw = Random(segment.seed + _VARIATION * variation)
            ids += [self._words[draw.randrange(len(self._words))][0] for _ in range(segment.length)]
        return ids

    def text(self, token_ids: list[int]) -> str:
        """Return the ids as text."""
        return b"".join(self._pieces[token] for token in token_ids).decode(errors="replace")


def check_counts(call: Call, dialect: Dialect, reply: Reply) -> None:
    """Let a complete reply fail that is not of the whole prompt, or shorter than was asked for."""
    if reply.status != "complete":
        return
    is_short = call.schema is None and reply.num_generated != call.max_tokens
    if is_short or (dialect.takes_ids and reply.num_prompt != len(call.token_ids)):
        reply.status = "failed"
        prompt = f"{reply.num_prompt} of {len(call.token_ids)} of the prompt"
        reply.problem = f"{reply.num_generated} of {call.max_tokens} tokens, for {prompt}"


class Run:
    """One run of a workload against a server. `variation`: number of its set of prompts, since servers cache prompts."""

    def __init__(
        self, workload: Workload, prompts: PromptMaker, server: Running, dialect: Dialect, variation: int = 0
    ) -> None:
        self._replies: list[Reply | None] = [None] * len(workload.requests)
        self._workload, self._prompts, self._server, self._dialect = workload, prompts, server, dialect
        self._variation = variation
        self._events = defaultdict[int, int](int)
        self._progress = asyncio.Condition()
        self._turns = asyncio.Semaphore(workload.width or len(workload.requests))
        self._has_killed = False
        self._watches_events = any(request.after_events is not None for request in workload.requests)
        self._ids: dict[int, list[int]] = {}

    async def all(self) -> list[Reply]:
        """Run every request to its end, and return the replies in the order of the workload's requests."""
        await self._warm_up()
        await asyncio.gather(*(self._one(number) for number in range(len(self._replies))))
        return [reply for reply in self._replies if reply is not None]

    async def _warm_up(self) -> None:
        """Run one short request: the first pass allocates."""
        ids = self._prompts.token_ids((Segment(0, WARM_UP_TOKENS),))
        call = Call(token_ids=ids, text=self._prompts.text(ids), max_tokens=4)
        reply = await stream(self._server.port, self._dialect, call, on_events=lambda _: None)
        if reply.status != "complete":
            raise SystemExit(f"the first request failed: {reply.problem}")

    async def _one(self, number: int) -> None:
        request = self._workload.requests[number]
        async with self._progress:
            await self._progress.wait_for(lambda: all(self._holds(request, other) for other in request.after))
        if request.at_s:
            await asyncio.sleep(request.at_s)
        async with self._turns:
            call = self._call(number, request)
            reply = await stream(
                self._server.port,
                self._dialect,
                call,
                on_events=lambda count: self._note(number, count),
                leaves_after=request.leaves_after,
            )
        check_counts(call, self._dialect, reply)
        self._replies[number] = reply
        await self._notify()

    def _holds(self, request: PlannedRequest, other: int) -> bool:
        if self._replies[other] is not None:
            return True
        return request.after_events is not None and self._events[other] >= request.after_events

    def _call(self, number: int, request: PlannedRequest) -> Call:
        ids = self._prompts.token_ids(request.segments, self._variation)
        if request.continues is not None:
            earlier = self._replies[request.continues]
            assert earlier is not None
            ids = self._ids[request.continues] + earlier.token_ids + ids
        self._ids[number] = ids
        return Call(
            token_ids=ids,
            text=self._prompts.text(ids),
            max_tokens=request.max_tokens,
            schema=dict(SCHEMA) if request.is_structured else None,
            adapter=request.adapter,
        )

    def _note(self, number: int, count: int) -> None:
        self._events[number] = count
        if self._workload.kills_engine and not self._has_killed and count >= KILL_AFTER_EVENTS:
            self._has_killed = True
            self._server.kill_engine()
        if self._watches_events:
            asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()
