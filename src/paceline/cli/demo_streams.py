"""The streams of a demo, submitted together and read by one thread, and the report of their results and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.cli import terminal
from paceline.cli.demo_requests import DemoRequest
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cli.demo_instruments import Pacer
    from paceline.llm import LLM
    from paceline.streaming import Stream, StreamChunk, Usage


@dataclass(slots=True)
class DemoChoice:
    """One choice as far as it was read. reason: its `FinishReason`; None while it runs."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def take(self, chunk: StreamChunk) -> None:
        """Append a chunk."""
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        if chunk.finish_reason is not None:
            self.reason, self.stop = chunk.finish_reason, chunk.stop


class DemoStream:
    """A request of the demo, from its submit to the last chunk that was read.

    error: why it was refused or failed. is_read: whether the reader takes its chunks.
    """

    def __init__(self, request: DemoRequest, stream: Stream | None, error: PacelineError | None = None) -> None:
        self.request = request
        self.choices = [DemoChoice() for _ in range(request.num_choices)]
        self.error = error
        self.is_read = True
        self._stream = stream
        self._is_over = stream is None

    def take(self) -> None:
        """Read the chunks that are ready."""
        from paceline.streaming import StreamChunk
        from paceline.streaming.sender import END

        while self._stream is not None and self.is_read and not self._is_over:
            chunk = self._stream.get(0)
            if isinstance(chunk, StreamChunk):
                self.choices[chunk.choice].take(chunk)
                self.error = self.error or chunk.error
            else:
                self._is_over = chunk is END
                return

    def cancel(self) -> None:
        """Cancel the request; its reader takes what is left. Any thread."""
        if self._stream is not None:
            self._stream.cancel()
        self.is_read = True

    @property
    def was_accepted(self) -> bool:
        """Whether the engine accepted the request."""
        return self._stream is not None

    @property
    def is_over(self) -> bool:
        """Whether the stream was read to its end."""
        return self._is_over

    @property
    def usage(self) -> Usage | None:
        """Token counts and times; None before the end, or if the request was refused."""
        return None if self._stream is None else self._stream.usage


class DemoStreams:
    """All streams, in the order of their numbers. One thread submits and reads; any may call `cancel_all`."""

    def __init__(self) -> None:
        self._running: list[DemoStream] = []
        self._are_cancelled = False

    def submit(self, llm: LLM, requests: Sequence[DemoRequest]) -> None:
        """Submit the requests. A refused one keeps its error; raise the first error if all are refused."""
        for request in requests:
            try:
                stream = llm.stream(request.prompt, **request.options)
            except PacelineError as error:
                self._running.append(DemoStream(request, None, error))
            else:
                self._running.append(DemoStream(request, stream))
                if self._are_cancelled:
                    stream.cancel()
        if not self.accepted and self._running[0].error is not None:
            raise self._running[0].error

    def __iter__(self) -> Iterator[DemoStream]:
        return iter(tuple(self._running))

    @property
    def accepted(self) -> list[DemoStream]:
        """The streams that the engine accepted, in that order."""
        return [one for one in self if one.was_accepted]

    def take(self) -> None:
        """Read the chunks that are ready, of all streams whose reader has not stopped."""
        for one in self._running:
            one.take()

    def cancel_all(self) -> None:
        """Cancel all streams that have not ended."""
        self._are_cancelled = True
        for one in self:
            if not one.is_over:
                one.cancel()

    def switch_readers(self) -> None:
        """Stop the readers of all running streams, or start them if all have stopped."""
        live = [one for one in self if not one.is_over]
        is_read = not any(one.is_read for one in live)
        for one in live:
            one.is_read = is_read

    @property
    def are_over(self) -> bool:
        """Whether all streams were read to their end."""
        return all(one.is_over for one in self._running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of the whole run. Times are seconds, without the rests of the `Pacer`; None: nothing was measured."""

    num_requests: int
    num_ended: int
    num_tokens: int
    elapsed_s: float
    rested_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    occupancy: float | None
    prefix_hits: int
    prefix_hit_tokens: int
    num_ticks: int
    num_drafts: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of all streams together."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else None


def run_figures(streams: DemoStreams, pacer: Pacer) -> Figures:
    """Return the figures of a run that has ended."""
    now = pacer.snapshot()
    ttft, itl = now.histogram("paceline_ttft_seconds"), now.histogram("paceline_itl_seconds")
    return Figures(
        num_requests=len(list(streams)),
        num_ended=now.completed,
        num_tokens=int(now.number("paceline_tokens_generated_total")),
        elapsed_s=pacer.elapsed_s,
        rested_s=pacer.rested_s,
        ttft_p50_s=ttft.quantile(0.5),
        ttft_p95_s=ttft.quantile(0.95),
        itl_p50_s=itl.quantile(0.5),
        itl_p99_s=itl.quantile(0.99),
        occupancy=now.histogram("paceline_batch_occupancy_ratio").mean,
        prefix_hits=int(now.number("paceline_prefix_hits_total")),
        prefix_hit_tokens=int(now.number("paceline_prefix_hit_tokens_total")),
        num_ticks=now.histogram("paceline_tick_seconds", "generate").count,
        num_drafts=int(now.number("paceline_draft_tokens_total")),
        num_accepted=int(now.number("paceline_draft_tokens_accepted_total")),
    )


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """What drafts make of the speed: tokens a second of the same requests without them and with them, None without any token."""

    without: float | None
    with_drafts: float | None

    def __str__(self) -> str:
        if not self.without or not self.with_drafts:
            return "not measured"
        return (
            f"{self.with_drafts / self.without:.2f} times as fast: {self.with_drafts:.0f} tok/s with drafts, "
            f"{self.without:.0f} without"
        )


def figure_rows(found: Figures, seed: int, load_s: float, speed_up: SpeedUp | None = None) -> list[tuple[str, str]]:
    """Return the figures as names and values, for a terminal. speed_up: None without speculation."""
    return [
        ("requests", f"{found.num_requests}, of which {found.num_ended} came to their end"),
        (
            "throughput",
            f"{_speed(found)}, {terminal.counted(found.num_tokens, 'token')} in {terminal.duration(found.elapsed_s)}",
        ),
        ("held back", f"{found.rested_s:.1f} s of rests, counted nowhere" if found.rested_s else ""),
        ("TTFT", f"p50 {terminal.duration(found.ttft_p50_s)}, p95 {terminal.duration(found.ttft_p95_s)}"),
        ("ITL", f"p50 {terminal.duration(found.itl_p50_s)}, p99 {terminal.duration(found.itl_p99_s)}"),
        ("occupancy", _share(found.occupancy)),
        ("prefix hits", f"{found.prefix_hits} ({terminal.counted(found.prefix_hit_tokens, 'token')})"),
        ("ticks", str(found.num_ticks)),
        ("drafts", "" if speed_up is None else _drafts(found)),
        ("speed-up", "" if speed_up is None else str(speed_up)),
        ("load", terminal.duration(load_s)),
        ("seed", str(seed)),
    ]


def figure_line(found: Figures, seed: int, load_s: float, speed_up: SpeedUp | None = None) -> str:
    """Return the figures on one line, for a pipe. speed_up: None without speculation."""
    drafts = [] if speed_up is None else [f"drafts {_drafts(found)}", str(speed_up)]
    return " | ".join(
        [
            f"{terminal.counted(found.num_requests, 'request')}, {found.num_ended} ended",
            f"{_speed(found)}, {terminal.counted(found.num_tokens, 'token')} in {terminal.duration(found.elapsed_s)}",
            f"TTFT p50 {terminal.duration(found.ttft_p50_s)} p95 {terminal.duration(found.ttft_p95_s)}",
            f"ITL p50 {terminal.duration(found.itl_p50_s)} p99 {terminal.duration(found.itl_p99_s)}",
            f"occupancy {_share(found.occupancy)}",
            f"prefix hits {found.prefix_hits}",
            f"ticks {found.num_ticks}",
            *drafts,
            f"load {terminal.duration(load_s)}",
            f"seed {seed}",
        ]
    )


def result_lines(running: DemoStream) -> list[str]:
    """Return one line a choice of a request that has ended: its number, how it ended, its text."""
    number, many = running.request.number, len(running.choices) > 1
    if not running.was_accepted:
        return [f"#{number} refused: {_flat(str(running.error))}"]
    return [
        f"#{number}{f'.{index}' if many else ''} {_how(choice, running)}, {terminal.counted(len(choice.token_ids), 'token')}: "
        f"{_flat(choice.text)}"
        for index, choice in enumerate(running.choices, start=1)
    ]


def run_json(streams: DemoStreams, found: Figures, seed: int, load_s: float, speed_up: SpeedUp | None = None) -> str:
    """Return results and figures as one JSON object. speed_up: None without speculation."""
    of_drafts = {
        "draft_tokens": found.num_drafts,
        "accepted_tokens": found.num_accepted,
        "tokens_per_s_with_drafts": None if speed_up is None else speed_up.with_drafts,
        "tokens_per_s_without": None if speed_up is None else speed_up.without,
    }
    record = {
        "results": [_result(one) for one in streams],
        "summary": {
            "requests": found.num_requests,
            "ended": found.num_ended,
            "tokens": found.num_tokens,
            "elapsed_s": found.elapsed_s,
            "rested_s": found.rested_s,
            "tokens_per_s": found.tokens_per_s,
            "ttft_p50_s": found.ttft_p50_s,
            "ttft_p95_s": found.ttft_p95_s,
            "itl_p50_s": found.itl_p50_s,
            "itl_p99_s": found.itl_p99_s,
            "occupancy": found.occupancy,
            "prefix_hits": found.prefix_hits,
            "prefix_hit_tokens": found.prefix_hit_tokens,
            "ticks": found.num_ticks,
            **({} if speed_up is None else of_drafts),
            "load_s": load_s,
            "seed": seed,
        },
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def _result(running: DemoStream) -> dict[str, Any]:
    usage = running.usage
    return {
        "request": running.request.number,
        "prompt": running.request.prompt,
        "answers": [_choice_record(choice) for choice in running.choices] if running.was_accepted else [],
        "error": None if running.error is None else {"code": running.error.code, "message": str(running.error)},
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        },
    }


def _choice_record(choice: DemoChoice) -> dict[str, Any]:
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.reason,
        "stop": choice.stop,
    }


def _how(choice: DemoChoice, running: DemoStream) -> str:
    if choice.reason == "error":
        return f"failed ({_flat(str(running.error))})"
    return terminal.finish_words("cancelled" if choice.reason is None else choice.reason, choice.stop)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _drafts(found: Figures) -> str:
    if not found.num_drafts:
        return "none, as none paid or none were proposed"
    return f"{found.num_drafts} verified, {found.num_accepted} accepted ({found.num_accepted / found.num_drafts:.0%})"


def _speed(found: Figures) -> str:
    return "no speed" if found.tokens_per_s is None else f"{found.tokens_per_s:.0f} tok/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
