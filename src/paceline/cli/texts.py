"""`paceline generate`, `tokenize` and `embed`: a text to more text, to tokens, or to a vector."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.cli import terminal
from paceline.cli.endings import StopSignal, run
from paceline.cli.inputs import argument_or_stdin, arguments_or_lines, given_text, missing, sampling_params
from paceline.cli.options import (
    ContextSize,
    DeviceOption,
    FileOption,
    GpuLayersOption,
    ImageOptions,
    ModelChoice,
    ModelOption,
    ParseSpecialOption,
    PromptOption,
    ThreadsOption,
    VerboseOption,
    advising_flags,
    engine_model,
    load,
    making_vectors,
    reading_text,
    showing,
    takes_options,
)
from paceline.errors import InvalidParams, PromptTooLong
from paceline.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.engine.prompts import Segments
    from paceline.llm import LLM
    from paceline.runtime import Embedder, Model, Tokenizer
    from paceline.streaming import StreamChunk, Usage

    Vectors = list[npt.NDArray[np.float32]]


_PROMPT_HELP = "Text to continue. A text sent to stdin by a pipe follows it or takes its place."


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The options about the output."""

    as_json: bool
    quiet: bool
    echo: bool
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """The options of a run, checked."""

    prompt: str
    params: SamplingParams
    model: ModelChoice
    showing: OutputOptions
    images: ImageOptions
    n_ctx: int | None
    n_threads: int | None
    parse_special: bool


Prompt = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help=_PROMPT_HELP, show_default=False)]
Echo = Annotated[bool | None, showing(help="Show the prompt first.", show_default="on a terminal")]
Special = Annotated[bool, showing("--special", help="Show the control tokens that the model generates.")]
AsJson = Annotated[bool, showing("--json", help="Write one JSON object at the end in place of streamed text.")]
Quiet = Annotated[bool, showing("--quiet", "-q", help="Show no progress bar and no statistics.")]


@takes_options()
def generate(
    prompt: Prompt = None,
    *,
    prompt_text: PromptOption = None,
    file: FileOption = None,
    model: ModelChoice,
    parse_special: ParseSpecialOption = False,
    images: ImageOptions,
    ctx_size: ContextSize = None,
    threads: ThreadsOption = None,
    echo: Echo = None,
    special: Special = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **sampling: Any,
) -> None:
    """Continue a text, streamed to stdout; statistics go to stderr.

    The prompt is taken as it is, without a chat template, after images and audio: PROMPT, the text of --file, and the
    text that a pipe sends to stdin, with a blank line between them. A terminal shows it before the generated text;
    elsewhere only the generated text is written, and a line break. Ctrl-C keeps the text so far, a second Ctrl-C
    ends at once.
    """
    text = given_text("PROMPT", prompt, prompt_text, file)
    if text is None:
        raise missing("PROMPT")
    seed = sampling.get("seed", -1)
    params = sampling_params(sampling, seed=secrets.randbits(32) if seed == -1 else seed)  # short enough to type again
    shown_first = terminal.is_terminal(sys.stdout) if echo is None else echo
    job = GenerateJob(
        prompt=text,
        params=params,
        model=replace(model, model=images.model_path(model.model), show_progress=not quiet),
        showing=OutputOptions(as_json=as_json, quiet=quiet, echo=shown_first and not as_json, special=special),
        images=images,
        n_ctx=ctx_size,
        n_threads=threads,
        parse_special=parse_special,
    )
    run(lambda interrupted: _run(job, interrupted))


def _run(job: GenerateJob, interrupted: StopSignal) -> None:
    attachments = [attachment for _, attachment in job.images.attachments()]
    loaded = load(job.model, interrupted)
    model = loaded.model
    if attachments:
        generated, load_s = _generate_seen(model, job, [*attachments, job.prompt], interrupted)
    else:
        prompt = _encode(model, job)
        generated, load_s = _generate_in(_context_size(model, job, prompt), model, job, prompt, interrupted)
    _finish(job, generated, loaded.load_s + load_s)


def _generate_seen(
    model: Model, job: GenerateJob, prompt: Segments, interrupted: StopSignal
) -> tuple[Generated, float]:
    """Generate with attachments. Only the projector can count their tokens, so the usual context size is tried first."""
    try:
        return _generate_in(job.n_ctx, model, job, prompt, interrupted)
    except PromptTooLong as error:
        if job.n_ctx is not None or error.num_tokens is None or error.num_tokens >= model.n_ctx_train:
            raise
        needed = model.n_ctx_train
        if error.is_counted:
            needed = min(error.num_tokens + (job.params.max_tokens or 1), needed)
    return _generate_in(needed, model, job, prompt, interrupted)


def _generate_in(
    n_ctx: int | None, model: Model, job: GenerateJob, prompt: list[int] | Segments, interrupted: StopSignal
) -> tuple[Generated, float]:
    """Return the result, and the seconds in which the engine loaded the model if `load` had not."""
    from paceline.llm import LLM

    source, options = engine_model(job.model, model)
    if job.model.rpc is not None:
        options["cancel"] = interrupted.event
    start = time.perf_counter()
    options |= job.images.engine_options(takes_images_later=False)
    with LLM(source, num_slots=1, n_ctx=n_ctx, n_threads=job.n_threads, **options) as llm:
        load_s = time.perf_counter() - start if job.model.rpc is not None else 0.0
        with advising_flags(llm.limits):
            return _generate(llm, job, prompt, interrupted), load_s


def _encode(model: Model, job: GenerateJob) -> list[int]:
    prompt = model.tokenizer.encode(job.prompt, parse_special=job.parse_special)
    if not prompt:
        raise InvalidParams(
            "PROMPT is empty, and this model has no token that begins a text; give it a word to continue"
        )
    return prompt


def _context_size(model: Model, job: GenerateJob, prompt: list[int]) -> int | None:
    """Return the requested size, or as much as prompt and completion need if that is more than the default."""
    needed = min(positions_needed(prompt, job.params.max_tokens), model.n_ctx_train)
    return needed if job.n_ctx is None and needed > 4096 else job.n_ctx


def _generate(llm: LLM, job: GenerateJob, prompt: list[int] | Segments, interrupted: StopSignal) -> Generated:
    """Generate to the end; Ctrl-C cancels the request and keeps the text so far."""
    with (
        llm.stream(
            prompt, job.params, special=job.showing.special, parse_special=job.parse_special, lora=job.model.lora_scales
        ) as stream,
        interrupted.aborting(stream.cancel),
    ):
        wrap = terminal.WordWrap(sys.stdout)
        if job.showing.echo:
            wrap.write(job.prompt, style="dim", ends=True)  # the whole prompt is shown while it is computed
        try:
            return collect(stream, None if job.showing.as_json else wrap.write)
        finally:
            wrap.finish()


def _finish(job: GenerateJob, generated: Generated, load_s: float) -> None:
    seed = -1 if job.params.seed is None else job.params.seed
    if job.showing.as_json:
        terminal.write(_generated_json(generated, usage_record(generated, load_s=load_s), seed))
    elif not generated.text.endswith("\n"):
        terminal.write("\n")
    if not job.showing.quiet:
        terminal.note(summary(generated, load_s=load_s, seed=seed))


def _generated_json(generated: Generated, counts: dict[str, float | int | None], seed: int) -> str:
    record = {
        "text": generated.text,
        "token_ids": generated.token_ids,
        "finish_reason": generated.finish_reason,
        "stop": generated.stop,
        "seed": seed,
        "usage": counts,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The generated text and tokens, without the stop that matched, and the engine's usage.

    finish_reason: a `FinishReason`. stop: the stop string, or the id of the end-of-generation token, that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first token; None without a second one."""
        count, decode_s = self.usage.completion_tokens, self.usage.decode_s
        return (count - 1) / decode_s if count > 1 and decode_s > 0 else None


def collect(chunks: Iterable[StreamChunk], show: Callable[[str], object] | None) -> Generated:
    """Read a stream of one choice to its end. show: called with each piece of text, unless None."""
    texts: list[str] = []
    token_ids: list[int] = []
    last: StreamChunk | None = None
    for last in chunks:
        token_ids += last.token_ids
        if last.text:
            texts.append(last.text)
            if show is not None:
                show(last.text)
    if last is not None and last.error is not None:
        raise last.error
    if last is None or last.finish_reason is None or last.usage is None:
        raise AssertionError("a stream ends with its terminal chunk, which has a reason and a usage")
    return Generated(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=last.finish_reason,
        stop=last.stop,
        usage=last.usage,
    )


def summary(generated: Generated, *, load_s: float, seed: int) -> str:
    """Return the line of statistics that follows the text."""
    usage = generated.usage
    parts = [
        terminal.counted(usage.completion_tokens, "token") + _speed(generated.tokens_per_s),
        f"prompt {terminal.counted(usage.prompt_tokens, 'token')}" + _speed(_prompt_speed(usage)),
        f"load {load_s:.2f} s",
        terminal.finish_words(generated.finish_reason, generated.stop),
        f"seed {seed}",
    ]
    return " | ".join(parts)


def _prompt_speed(usage: Usage) -> float | None:
    """Return prompt tokens a second; None if the prompt was not computed to its end."""
    return usage.prompt_tokens / usage.prefill_s if usage.completion_tokens and usage.prefill_s > 0 else None


def _speed(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return ""
    return f", {tokens_per_s:.{1 if tokens_per_s < 100 else 0}f} tok/s"


def usage_record(generated: Generated, *, load_s: float) -> dict[str, float | int | None]:
    """Return counts and times, in seconds, for programs."""
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
    """Return the positions of the prompt and a completion of full length; without a limit, of one token."""
    return len(prompt) + (1 if max_tokens is None else max_tokens)


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def tokenize(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="Text, or with --decode token ids; without it, the text of stdin.", show_default=False
        ),
    ] = None,
    *,
    model: ModelOption = None,
    no_special: Annotated[bool, reading_text("--no-special", help="Add no tokens for beginning and end.")] = False,
    parse_special: ParseSpecialOption = False,
    decode: Annotated[bool, reading_text("--decode", help="Convert token ids to text.")] = False,
    ids: Annotated[bool, showing("--ids", help="Write the ids only, on one line.")] = False,
    pieces: Annotated[bool, showing("--pieces", help="Write the pieces only, one a line.")] = False,
    count: Annotated[bool, showing("--count", help="Write the number of tokens only.")] = False,
    as_json: Annotated[bool, showing("--json", help="One JSON object.")] = False,
) -> None:
    r"""Show the tokens of a text: the id and the piece of text of each, one a line.

    Pieces are quoted; bytes that are no text on their own are shown as \xNN. Only the model's vocabulary is loaded.
    """
    show = _format(decode=decode, ids=ids, pieces=pieces, count=count, as_json=as_json)
    given = argument_or_stdin("TEXT", text)
    wanted = _parse_ids(given) if decode else None

    def work(stop: StopSignal) -> None:
        tokenizer = load(ModelChoice(model=model, vocab_only=True, show_progress=False), stop).model.tokenizer
        if wanted is not None:
            terminal.write(_with_line_end(tokenizer.decode(wanted, special=parse_special)))
            return
        found = tokenizer.encode(given, add_special=not no_special, parse_special=parse_special)
        terminal.write(show(tokenizer, found))

    run(work)


Format = Callable[["Tokenizer", list[int]], str]


def _format(**wanted: bool) -> Format:
    """Return the requested form of output. Raise `InvalidParams` for more than one."""
    chosen = ["--json" if name == "as_json" else f"--{name}" for name, given in wanted.items() if given]
    if len(chosen) > 1:
        raise InvalidParams(f"{' and '.join(chosen)} exclude each other; choose one")
    formats: dict[str, Format] = {
        "--ids": lambda _, ids: " ".join(map(str, ids)) + "\n",
        "--count": lambda _, ids: f"{len(ids)}\n",
        "--pieces": lambda tokenizer, ids: "".join(f"{_shown_bytes(tokenizer.token_bytes(token))}\n" for token in ids),
        "--json": _tokens_json,
    }
    return formats.get(chosen[0], _token_lines) if chosen else _token_lines


def _token_lines(tokenizer: Tokenizer, ids: list[int]) -> str:
    width = len(str(tokenizer.n_vocab - 1))
    return "".join(f"{token:>{width}}  {_shown_bytes(tokenizer.token_bytes(token))}\n" for token in ids)


def _tokens_json(tokenizer: Tokenizer, ids: list[int]) -> str:
    tokens = [_token_record(token, tokenizer.token_bytes(token)) for token in ids]
    return json.dumps({"count": len(ids), "ids": ids, "tokens": tokens}, ensure_ascii=False) + "\n"


def _token_record(token: int, data: bytes) -> dict[str, object]:
    """Return a token as JSON; its text is null if its bytes are no text on their own."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    return {"id": token, "text": text, "bytes": list(data)}


def _shown_bytes(data: bytes) -> str:
    """Quote bytes for people: text as it is, everything invisible escaped."""
    text = data.decode("utf-8", "surrogateescape").translate(_ESCAPES)
    return (
        '"' + "".join(character if character.isprintable() else _escaped_bytes(character) for character in text) + '"'
    )


def _escaped_bytes(character: str) -> str:
    raw = character.encode("utf-8", "surrogateescape")
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise InvalidParams(f"--decode takes token ids as whole numbers, not {text[:40]!r}") from None


def _with_line_end(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


_PREVIEW_VALUES = 4
_PREVIEW_TEXT = 32


class PoolingName(StrEnum):
    """How the tokens' vectors become one."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"
    NONE = "none"


class NormalizationName(StrEnum):
    """How the length of a vector is changed."""

    L2 = "l2"
    MAX_ABS = "max_abs"
    NONE = "none"


def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT", help='Texts; "-" stands for the lines of stdin, as no text does.', show_default=False
        ),
    ] = None,
    *,
    model: ModelOption = None,
    n_gpu_layers: GpuLayersOption = None,
    device: DeviceOption = None,
    pooling: Annotated[
        PoolingName | None,
        making_vectors(
            help="How the vectors of the tokens become one vector; none keeps a vector for each token.",
            show_default="what the model was made for, or mean",
        ),
    ] = None,
    normalize: Annotated[
        NormalizationName, making_vectors(help="Length 1 (l2), greatest component 1 (max_abs), or as they are.")
    ] = NormalizationName.L2,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    as_json: Annotated[bool, showing("--json", help="One JSON object a text, also on a terminal.")] = False,
    npy: Annotated[
        Path | None,
        showing(metavar="FILE", help="Write a NumPy array, float32 (texts, dimension), instead.", show_default=False),
    ] = None,
) -> None:
    """Turn texts into vectors. On a terminal a preview is shown, else a JSON object a text, one a line."""
    if npy is not None and as_json:
        raise InvalidParams("--json and --npy exclude each other; choose one")
    if npy is not None and pooling is PoolingName.NONE:
        raise InvalidParams("--npy needs one vector for each text, and --pooling none gives one for each token")
    given = arguments_or_lines("TEXT", texts)
    choice = ModelChoice(model=model, n_gpu_layers=n_gpu_layers, device=device, verbose=verbose)

    def work(stop: StopSignal) -> Vectors:
        from paceline.runtime import Embedder

        loaded = load(choice, stop).model
        wanted: Any = None if pooling is None else pooling.value
        with Embedder(loaded, pooling=wanted, n_threads=threads) as embedder, stop.aborting(embedder.abort):
            return _embedded(embedder, given, normalize.value)

    vectors = run(work)
    if npy is not None:
        _save(npy, vectors)
    elif as_json or not terminal.is_terminal(sys.stdout):
        _write_json(given, vectors)
    else:
        _write_preview(given, vectors)


def _embedded(embedder: Embedder, texts: list[str], normalize: Any) -> Vectors:
    if embedder.pooling == "none":
        return embedder.embed_tokens(texts, normalize=normalize)
    return list(embedder.embed(texts, normalize=normalize))


def _save(path: Path, vectors: Vectors) -> None:
    import numpy as np

    with path.open("wb") as file:  # np.save would add .npy to a name that lacks it
        np.save(file, np.stack(vectors))


def _write_json(texts: list[str], vectors: Vectors) -> None:
    for index, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        line = {"index": index, "text": text, "embedding": _plain(vector)}
        terminal.write(json.dumps(line, ensure_ascii=False) + "\n")


def _plain(vector: npt.NDArray[np.float32]) -> list[Any]:
    """Convert to lists of numbers with the digits that single precision has."""
    if vector.ndim > 1:
        return [_plain(row) for row in vector]
    return [float(str(value)) for value in vector]


def _write_preview(texts: list[str], vectors: Vectors) -> None:
    for text, vector in zip(texts, vectors, strict=True):
        terminal.write(_shortened(text), style="cyan")
        terminal.write("".join(f"\n  {line}" for line in _preview(vector)) + "\n")


def _preview(vector: npt.NDArray[np.float32]) -> Iterator[str]:
    import numpy as np

    for row in np.atleast_2d(vector):
        values = " ".join(f"{value:+.4f}" for value in row[:_PREVIEW_VALUES])
        more = " ..." if len(row) > _PREVIEW_VALUES else ""
        yield f"{len(row)} numbers, norm {cast(float, np.linalg.norm(row)):.4f}: {values}{more}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PREVIEW_TEXT else line[: _PREVIEW_TEXT - 3] + "..."
