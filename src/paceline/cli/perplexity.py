"""`paceline perplexity`: how well a model predicts a text, by the method of llama-perplexity."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline.cli import options as option
from paceline.cli import terminal
from paceline.cli.endings import StopSignal, run
from paceline.cli.inputs import STDIN, missing, stdin_is_redirected, stdin_text, text_file
from paceline.errors import EngineError, InvalidParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.runtime import Tokenizer
    from paceline.streaming import Stream

_CELLS: Final = 256  # by which llama.cpp rounds contexts up
_AT_ONCE: Final = 32  # windows that are queued together


@dataclass(frozen=True, slots=True)
class Windows:
    """The parts of a text that a model reads one by one, of which the last tokens are scored.

    Attributes:
        token_ids: Token ids of each window.
        first_scored: Index of the first scored token in a window.
        num_bytes: Bytes of each window's scored tokens.
    """

    token_ids: list[list[int]]
    first_scored: int
    num_bytes: list[int]


@dataclass(slots=True)
class TextLikelihood:
    """Sums over the scored tokens: their number, bytes, negative log-probabilities in nats, and the squares of these."""

    num_tokens: int = 0
    num_bytes: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, logprobs: Sequence[float], num_bytes: int) -> None:
        """Count the scored tokens of a window."""
        self.num_tokens += len(logprobs)
        self.num_bytes += num_bytes
        for logprob in logprobs:
            self.total -= logprob
            self.squares += logprob * logprob

    def record(self) -> dict[str, Any]:
        """Return the figures."""
        mean = self.total / self.num_tokens
        variance = max(0.0, self.squares / self.num_tokens - mean * mean)
        perplexity = math.exp(mean) if mean < 700 else math.inf  # beyond a float
        error = math.sqrt(variance / (self.num_tokens - 1)) if self.num_tokens > 1 else 0.0
        return {
            "perplexity": perplexity,
            "perplexity_error": perplexity * error,
            "bits_per_token": mean / math.log(2),
            "bits_per_byte": self.total / math.log(2) / max(1, self.num_bytes),
            "scored_tokens": self.num_tokens,
            "scored_bytes": self.num_bytes,
        }


def perplexity(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help='Text to read; "-" or nothing reads stdin.', show_default=False),
    ] = None,
    *,
    model: option.ModelOption = None,
    n_gpu_layers: option.GpuLayersOption = None,
    device: option.DeviceOption = None,
    window: Annotated[int, option.running("--window", "-c", metavar="N", min=4, help="Tokens of a window.")] = 512,
    stride: Annotated[
        int | None,
        option.running(
            "--stride",
            metavar="N",
            min=1,
            help="Tokens between two windows; each then scores its last N tokens.",
            show_default="windows do not overlap, and score their second half",
        ),
    ] = None,
    parallel: Annotated[
        int, option.running("--parallel", "-np", metavar="N", min=1, max=250, help="Windows at once.")
    ] = 4,
    threads: option.ThreadsOption = None,
    verbose: option.VerboseOption = False,
    as_json: Annotated[bool, option.showing("--json", help="Write one JSON object.")] = False,
    quiet: Annotated[bool, option.showing("--quiet", "-q", help="Show no progress bar.")] = False,
) -> None:
    """Measure how well a model predicts a text: perplexity by token, and bits by byte.

    The text is divided into windows, each computed without the others. As in llama-perplexity, a window's first token is
    replaced by the token that begins texts, if the vocabulary adds one, and the second half of the window is scored.
    Perplexities of models with different vocabularies cannot be compared; bits by byte can. Ctrl-C ends the run and keeps
    the figures so far.
    """
    if file is None and not stdin_is_redirected():
        raise missing("FILE")
    text = stdin_text() if file is None or str(file) == STDIN else text_file("FILE", file)
    if stride is not None and stride >= window:
        raise InvalidParams(f"--stride must be less than --window ({window}), not {stride}")
    choice = option.ModelChoice(
        model=model, n_gpu_layers=n_gpu_layers, device=device, verbose=verbose, show_progress=not quiet
    )

    def work(stop: StopSignal) -> None:
        from paceline.engine.results import progress_bar
        from paceline.llm import LLM

        loaded = option.load(choice, stop).model
        if loaded.n_ctx_train and window > loaded.n_ctx_train:
            raise InvalidParams(
                f"--window {window} is more than the {loaded.n_ctx_train} tokens that the model was trained with"
            )
        windows = windows_of(loaded.tokenizer, text, window, stride)
        cells = parallel * -(-window // _CELLS) * _CELLS
        with (
            LLM(loaded, num_slots=parallel, n_ctx=cells, n_threads=threads, mmproj=False) as llm,
            progress_bar(len(windows.token_ids), not quiet) as advance,
        ):
            likelihood = TextLikelihood()
            for logprobs, num_bytes in scored_windows(llm, windows, stop):
                likelihood.add(logprobs, num_bytes)
                advance()
        if likelihood.num_tokens:
            _show(likelihood.record(), as_json=as_json)

    run(work)


def windows_of(tokenizer: Tokenizer, text: str, ctx_size: int, stride: int | None) -> Windows:
    """Divide a text into windows. Raise `InvalidParams` if it has fewer tokens than a window."""
    ids = tokenizer.encode(text)
    if len(ids) < ctx_size:
        raise InvalidParams(
            f"the text has {len(ids)} tokens, fewer than a window: give a longer text, or a smaller --window"
        )
    begin = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    starts = range(0, len(ids) - ctx_size + 1, ctx_size if stride is None else stride)
    first_scored = ctx_size // 2 + 1 if stride is None else ctx_size - stride
    parts = [ids[start : start + ctx_size] for start in starts]
    num_bytes = [len(tokenizer.decode_bytes(part[first_scored:], special=True)) for part in parts]
    return Windows([begin + part[len(begin) :] for part in parts], first_scored, num_bytes)


def scored_windows(llm: LLM, windows: Windows, stop: StopSignal) -> Iterator[tuple[Sequence[float], int]]:
    """Yield the log-probabilities of each window's scored tokens, and their bytes, as windows end.

    After a requested stop, only windows that had ended before are left to yield.
    """
    running: deque[tuple[Stream, int]] = deque()
    waiting = iter(zip(windows.token_ids, windows.num_bytes, strict=True))

    def cancel() -> None:
        for stream, _ in tuple(running):
            stream.cancel()

    def start(window: list[int]) -> Stream:
        return llm.stream(
            window, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=windows.first_scored, cache_prompt=False
        )

    with stop.aborting(cancel):
        while True:
            num_free = 0 if stop.requested else _AT_ONCE - len(running)
            running.extend((start(window), num_bytes) for window, num_bytes in islice(waiting, num_free))
            if not running:
                return
            stream, num_bytes = running[0]
            with stream:
                completion = stream.collect()
            running.popleft()
            scored = completion.prompt_logprobs or ()
            if len(scored) == len(completion.prompt_token_ids) - windows.first_scored:
                yield [token.own for token in scored], num_bytes
            elif not stop.requested:
                raise EngineError(f"a window ended after {len(scored)} tokens: {completion.finish_reason}")


def _show(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.write_json(record)
        return
    terminal.write(
        f"perplexity {record['perplexity']:.4f} ± {record['perplexity_error']:.4f}, "
        f"{record['bits_per_byte']:.4f} bits a byte, {record['bits_per_token']:.4f} bits a token "
        f"({terminal.counted(record['scored_tokens'], 'token')} of {terminal.counted(record['scored_bytes'], 'byte')})\n"
    )
