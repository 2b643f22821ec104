"""What a demo tells at its end: of each answer a line, of all of it the figures; for people and for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.demo_streams import Answer, Running, Streams
from paceline.cli.generation import counted, ending

if TYPE_CHECKING:
    from paceline.cli.demo_pace import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of the whole run. Times are seconds, without the rests that were taken to be watched; None: there was nothing."""

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

    @property
    def tokens_per_s(self) -> float | None:
        """Of all streams together."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else None


def figures(streams: Streams, pace: Pace) -> Figures:
    """Of an engine that has done all its work."""
    now = pace.snapshot()
    ttft, itl = now.histogram("paceline_ttft_seconds"), now.histogram("paceline_itl_seconds")
    return Figures(
        num_requests=len(list(streams)),
        num_ended=now.completed,
        num_tokens=int(now.number("paceline_tokens_generated_total")),
        elapsed_s=pace.elapsed_s,
        rested_s=pace.rested_s,
        ttft_p50_s=ttft.quantile(0.5),
        ttft_p95_s=ttft.quantile(0.95),
        itl_p50_s=itl.quantile(0.5),
        itl_p99_s=itl.quantile(0.99),
        occupancy=now.histogram("paceline_batch_occupancy_ratio").mean,
        prefix_hits=int(now.number("paceline_prefix_hits_total")),
        prefix_hit_tokens=int(now.number("paceline_prefix_hit_tokens_total")),
        num_ticks=now.histogram("paceline_tick_seconds", "generate").count,
    )


def rows(found: Figures, seed: int, load_s: float) -> list[tuple[str, str]]:
    """Names and values, for a terminal."""
    return [
        ("requests", f"{found.num_requests}, of which {found.num_ended} came to their end"),
        ("throughput", f"{_speed(found)}, {counted(found.num_tokens, 'token')} in {_seconds(found.elapsed_s)}"),
        ("held back", f"{found.rested_s:.1f} s of rests, counted nowhere" if found.rested_s else ""),
        ("TTFT", f"p50 {_seconds(found.ttft_p50_s)}, p95 {_seconds(found.ttft_p95_s)}"),
        ("ITL", f"p50 {_seconds(found.itl_p50_s)}, p99 {_seconds(found.itl_p99_s)}"),
        ("occupancy", _share(found.occupancy)),
        ("prefix hits", f"{found.prefix_hits} ({counted(found.prefix_hit_tokens, 'token')})"),
        ("ticks", str(found.num_ticks)),
        ("load", _seconds(load_s)),
        ("seed", str(seed)),
    ]


def line(found: Figures, seed: int, load_s: float) -> str:
    """The same on one line, for a pipe."""
    return " | ".join(
        [
            f"{counted(found.num_requests, 'request')}, {found.num_ended} ended",
            f"{_speed(found)}, {counted(found.num_tokens, 'token')} in {_seconds(found.elapsed_s)}",
            f"TTFT p50 {_seconds(found.ttft_p50_s)} p95 {_seconds(found.ttft_p95_s)}",
            f"ITL p50 {_seconds(found.itl_p50_s)} p99 {_seconds(found.itl_p99_s)}",
            f"occupancy {_share(found.occupancy)}",
            f"prefix hits {found.prefix_hits}",
            f"ticks {found.num_ticks}",
            f"load {_seconds(load_s)}",
            f"seed {seed}",
        ]
    )


def result_lines(running: Running) -> list[str]:
    """Of a request that is over, one line an answer: its number, how it ended, its text."""
    number, many = running.request.number, len(running.answers) > 1
    if not running.was_accepted:
        return [f"#{number} refused: {_flat(str(running.error))}"]
    return [
        f"#{number}{f'.{index}' if many else ''} {_how(answer, running)}, {counted(len(answer.token_ids), 'token')}: "
        f"{_flat(answer.text)}"
        for index, answer in enumerate(running.answers, start=1)
    ]


def as_json(streams: Streams, found: Figures, seed: int, load_s: float) -> str:
    """All of it as one object."""
    answer = {
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
            "load_s": load_s,
            "seed": seed,
        },
    }
    return json.dumps(answer, ensure_ascii=False) + "\n"


def _result(running: Running) -> dict[str, Any]:
    usage = running.usage
    return {
        "request": running.request.number,
        "prompt": running.request.prompt,
        "answers": [_answer(answer) for answer in running.answers] if running.was_accepted else [],
        "error": None if running.error is None else {"code": running.error.code, "message": str(running.error)},
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        },
    }


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.reason,
        "stop": answer.stop if isinstance(answer.stop, str) else None,
    }


def _how(answer: Answer, running: Running) -> str:
    if answer.reason == "error":
        return f"failed ({_flat(str(running.error))})"
    return ending("cancelled" if answer.reason is None else answer.reason, answer.stop)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _speed(found: Figures) -> str:
    return "no speed" if found.tokens_per_s is None else f"{found.tokens_per_s:.0f} tok/s"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
