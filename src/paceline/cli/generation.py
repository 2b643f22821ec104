"""One answer from its first to its last chunk: text as it comes, why it ended, how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.streaming import StreamChunk, Usage

Show = Callable[[str], object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was generated. `token_ids` and `text` end before the stop that matched; `usage` is the engine's.

    finish_reason: the value of a `FinishReason`. stop: the stop string, where one ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | None
    usage: Usage

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None where there was no second."""
        count, decode_s = self.usage.completion_tokens, self.usage.decode_s
        return (count - 1) / decode_s if count > 1 and decode_s > 0 else None


def collect(chunks: Iterable[StreamChunk], show: Show) -> Generated:
    """Reads a stream of one choice to its end. show: gets the text as it comes, if it is not None."""
    texts: list[str] = []
    token_ids: list[int] = []
    last: StreamChunk | None = None
    for last in chunks:
        token_ids += last.token_ids
        if last.text:
            texts.append(last.text)
            if show is not None:
                show(last.text)
    if last is None or last.finish_reason is None or last.usage is None:
        raise AssertionError("a stream ends with its terminal chunk, which has a reason and a usage")
    return Generated(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=last.finish_reason.value,
        stop=last.stop if isinstance(last.stop, str) else None,
        usage=last.usage,
    )


def summary(generated: Generated, *, load_s: float, seed: int) -> str:
    """The line of statistics that is shown after the text."""
    usage = generated.usage
    parts = [
        counted(usage.completion_tokens, "token") + _speed(generated.tokens_per_s),
        f"prompt {counted(usage.prompt_tokens, 'token')}" + _speed(_prompt_speed(usage)),
        f"load {load_s:.2f} s",
        ending(generated.finish_reason, generated.stop),
        f"seed {seed}",
    ]
    return " | ".join(parts)


def ending(reason: str, stop: str | int | None = None) -> str:
    """Why an answer ended, in words. reason: the value of a `FinishReason`."""
    match reason:
        case "end":
            return "ended by itself"
        case "length":
            return "cut at the limit"
        case "stop":
            return f"stopped at {stop!r}"
        case "cancelled":
            return "interrupted"
        case _:
            return reason.replace("_", " ")


def counted(count: int, noun: str) -> str:
    """So many of a noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _prompt_speed(usage: Usage) -> float | None:
    """None where the prompt was not computed to its end, or not at all."""
    return usage.prompt_tokens / usage.prefill_s if usage.completion_tokens and usage.prefill_s > 0 else None


def _speed(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return ""
    return f", {tokens_per_s:.{1 if tokens_per_s < 100 else 0}f} tok/s"


def usage_record(generated: Generated, *, load_s: float) -> dict[str, float | int | None]:
    """Counts and times for programs; seconds."""
    usage = generated.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "load_s": load_s,
        "prefill_s": usage.prefill_s,
        "decode_s": usage.decode_s,
        "tokens_per_s": generated.tokens_per_s,
    }


def positions_needed(prompt: Sequence[int], max_tokens: int | None) -> int:
    """Cells that the prompt and an answer of full length take; of an answer without a limit, its first token's."""
    return len(prompt) + (1 if max_tokens is None else max_tokens)
