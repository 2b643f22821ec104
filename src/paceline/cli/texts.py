"""`paceline generate`, `tokenize` and `embed`: a text to more text, to tokens, or to a vector."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.cli import options as option
from paceline.cli import terminal
from paceline.cli.endings import StopSignal, run
from paceline.cli.inputs import argument_or_stdin, arguments_or_lines, given_text, missing, sampling_params
from paceline.errors import InvalidParams, PromptTooLong

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.engine.prompts import Segments
    from paceline.runtime import Model, Tokenizer
    from paceline.streaming.chunk import Completion

    Vectors = list[npt.NDArray[np.float32]]


Prompt = Annotated[list[str] | None, typer.Argument(
    metavar="PROMPT", help="Text to continue. A text sent to stdin by a pipe follows it or takes its place.", show_default=False,
)]  # fmt: skip
Echo = Annotated[bool | None, option.showing(help="Show the prompt first.", show_default="on a terminal")]
Special = Annotated[bool, option.showing("--special", help="Show the control tokens that the model generates.")]
AsJson = Annotated[bool, option.showing("--json", help="Write one JSON object at the end in place of streamed text.")]
Quiet = Annotated[bool, option.showing("--quiet", "-q", help="Show no progress bar and no statistics.")]


@option.takes_options()
def generate(
    prompt: Prompt = None,
    *,
    prompt_text: option.PromptOption = None,
    file: option.FileOption = None,
    model: option.ModelChoice,
    parse_special: option.ParseSpecialOption = False,
    images: option.ImageOptions,
    ctx_size: option.ContextSize = None,
    threads: option.ThreadsOption = None,
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
    shows_prompt = not as_json and (terminal.is_terminal(sys.stdout) if echo is None else echo)
    choice = replace(model, model=images.model_path(model.model), show_progress=not quiet)

    def generate_in(
        n_ctx: int | None, loaded: Model, parts: list[int] | Segments, stop: StopSignal
    ) -> tuple[Completion, float]:
        """Return the completion, and the seconds in which the engine loaded the model if `load` had not."""
        from paceline.llm import LLM

        source, options = option.engine_model(choice, loaded)
        is_remote = choice.rpc is not None
        if is_remote:
            options["cancel"] = stop.event
        start = time.perf_counter()
        options |= images.engine_options(takes_images_later=False)
        with LLM(source, num_slots=1, n_ctx=n_ctx, n_threads=threads, **options) as llm:
            load_s = time.perf_counter() - start if is_remote else 0.0
            with option.advising_flags(llm.limits):
                stream = llm.stream(
                    parts, params, special=special, parse_special=parse_special, lora=choice.lora_scales
                )
                with stream, stop.aborting(stream.cancel):  # Ctrl-C keeps the text so far
                    wrap = terminal.WordWrap(sys.stdout)
                    if shows_prompt:
                        wrap.write(text, style="dim", ends=True)  # the whole prompt is shown while it is computed
                    try:
                        for chunk in stream:
                            if chunk.text and not as_json:
                                wrap.write(chunk.text)
                    finally:
                        wrap.finish()
                    return stream.collect(), load_s

    def work(stop: StopSignal) -> None:
        attachments = [attachment for _, attachment in images.attachments()]
        loaded = option.load(choice, stop)
        n_ctx, trained = ctx_size, loaded.model.n_ctx_train
        parts: list[int] | Segments = [*attachments, text]
        if not attachments:
            parts = loaded.model.tokenizer.encode(text, parse_special=parse_special)
            if not parts:
                raise InvalidParams(
                    "PROMPT is empty, and this model has no token that begins a text; give it a word to continue"
                )
            needed = min(positions_needed(parts, params.max_tokens), trained)
            n_ctx = needed if n_ctx is None and needed > 4096 else n_ctx
        try:
            completion, load_s = generate_in(n_ctx, loaded.model, parts, stop)
        except PromptTooLong as error:  # only the projector can count the tokens of attachments
            if not attachments or n_ctx is not None or error.num_tokens is None or error.num_tokens >= trained:
                raise
            needed = min(error.num_tokens + (params.max_tokens or 1), trained) if error.is_counted else trained
            completion, load_s = generate_in(needed, loaded.model, parts, stop)
        load_s += loaded.load_s
        shown_seed = -1 if params.seed is None else params.seed
        if as_json:
            terminal.write_json(completion_record(completion, load_s=load_s, seed=shown_seed))
        elif not completion.text.endswith("\n"):
            terminal.write("\n")
        if not quiet:
            terminal.note(summary(completion, load_s=load_s, seed=shown_seed))

    run(work)


def completion_record(completion: Completion, *, load_s: float, seed: int) -> dict[str, Any]:
    """Return a completion for programs, with times in seconds."""
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "seed": seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "load_s": load_s,
            "prefill_s": usage.prefill_s,
            "decode_s": usage.decode_s,
            "tokens_per_s": option.decode_speed(usage),
        },
    }


def summary(completion: Completion, *, load_s: float, seed: int) -> str:
    """Return the line of statistics that follows the text."""
    usage = completion.usage
    is_prompt_computed = usage.completion_tokens and usage.prefill_s > 0
    prompt_speed = usage.prompt_tokens / usage.prefill_s if is_prompt_computed else None
    parts = [
        terminal.counted(usage.completion_tokens, "token") + option.shown_speed(option.decode_speed(usage)),
        f"prompt {terminal.counted(usage.prompt_tokens, 'token')}" + option.shown_speed(prompt_speed),
        f"load {load_s:.2f} s",
        terminal.finish_words(completion.finish_reason, completion.stop),
        f"seed {seed}",
    ]
    return " | ".join(parts)


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
    model: option.ModelOption = None,
    no_special: Annotated[
        bool, option.reading_text("--no-special", help="Add no tokens for beginning and end.")
    ] = False,
    parse_special: option.ParseSpecialOption = False,
    decode: Annotated[bool, option.reading_text("--decode", help="Convert token ids to text.")] = False,
    ids: Annotated[bool, option.showing("--ids", help="Write the ids only, on one line.")] = False,
    pieces: Annotated[bool, option.showing("--pieces", help="Write the pieces only, one a line.")] = False,
    count: Annotated[bool, option.showing("--count", help="Write the number of tokens only.")] = False,
    as_json: Annotated[bool, option.showing("--json", help="One JSON object.")] = False,
) -> None:
    r"""Show the tokens of a text: the id and the piece of text of each, one a line.

    Pieces are quoted; bytes that are no text on their own are shown as \xNN. Only the model's vocabulary is loaded.
    """
    show = _format(decode=decode, ids=ids, pieces=pieces, count=count, as_json=as_json)
    given = argument_or_stdin("TEXT", text)
    token_ids = _parse_ids(given) if decode else None

    def work(stop: StopSignal) -> None:
        tokenizer = option.load(
            option.ModelChoice(model=model, vocab_only=True, show_progress=False), stop
        ).model.tokenizer
        if token_ids is not None:
            decoded = tokenizer.decode(token_ids, special=parse_special)
            terminal.write(decoded.removesuffix("\n") + "\n")
            return
        terminal.write(
            show(tokenizer, tokenizer.encode(given, add_special=not no_special, parse_special=parse_special))
        )

    run(work)


Format = Callable[["Tokenizer", list[int]], str]


def _format(**switches: bool) -> Format:
    """Return the requested form of output. Raise `InvalidParams` for more than one."""
    chosen = ["--json" if name == "as_json" else f"--{name}" for name, given in switches.items() if given]
    if len(chosen) > 1:
        raise InvalidParams(f"{' and '.join(chosen)} exclude each other; choose one")
    formats: dict[str, Format] = {
        "--ids": lambda _, ids: " ".join(map(str, ids)) + "\n",
        "--count": lambda _, ids: f"{len(ids)}\n",
        "--pieces": lambda tokenizer, ids: "".join(f"{_shown_bytes(tokenizer.token_bytes(token))}\n" for token in ids),
        "--json": lambda tokenizer, ids: (
            json.dumps(
                {
                    "count": len(ids),
                    "ids": ids,
                    "tokens": [_token_record(token, tokenizer.token_bytes(token)) for token in ids],
                },
                ensure_ascii=False,
            )
            + "\n"
        ),
    }
    return formats.get(chosen[0], _token_lines) if chosen else _token_lines


def _token_lines(tokenizer: Tokenizer, ids: list[int]) -> str:
    width = len(str(tokenizer.n_vocab - 1))
    return "".join(f"{token:>{width}}  {_shown_bytes(tokenizer.token_bytes(token))}\n" for token in ids)


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
    model: option.ModelOption = None,
    n_gpu_layers: option.GpuLayersOption = None,
    device: option.DeviceOption = None,
    pooling: Annotated[
        PoolingName | None,
        option.making_vectors(
            help="How the vectors of the tokens become one vector; none keeps a vector for each token.",
            show_default="what the model was made for, or mean",
        ),
    ] = None,
    normalize: Annotated[
        NormalizationName, option.making_vectors(help="Length 1 (l2), greatest component 1 (max_abs), or as they are.")
    ] = NormalizationName.L2,
    threads: option.ThreadsOption = None,
    verbose: option.VerboseOption = False,
    as_json: Annotated[bool, option.showing("--json", help="One JSON object a text, also on a terminal.")] = False,
    npy: Annotated[
        Path | None,
        option.showing(
            metavar="FILE", help="Write a NumPy array, float32 (texts, dimension), instead.", show_default=False
        ),
    ] = None,
) -> None:
    """Turn texts into vectors. On a terminal a preview is shown, else a JSON object a text, one a line."""
    if npy is not None and as_json:
        raise InvalidParams("--json and --npy exclude each other; choose one")
    if npy is not None and pooling is PoolingName.NONE:
        raise InvalidParams("--npy needs one vector for each text, and --pooling none gives one for each token")
    given = arguments_or_lines("TEXT", texts)
    choice = option.ModelChoice(model=model, n_gpu_layers=n_gpu_layers, device=device, verbose=verbose)

    def work(stop: StopSignal) -> Vectors:
        from paceline.runtime import Embedder

        loaded = option.load(choice, stop).model
        pooling_name: Any = None if pooling is None else pooling.value
        with Embedder(loaded, pooling=pooling_name, n_threads=threads) as embedder, stop.aborting(embedder.abort):
            normalization: Any = normalize.value
            if embedder.pooling == "none":
                return embedder.embed_tokens(given, normalize=normalization)
            return list(embedder.embed(given, normalize=normalization))

    vectors = run(work)
    if npy is not None:
        import numpy as np

        with npy.open("wb") as file:  # np.save would add .npy to a name that lacks it
            np.save(file, np.stack(vectors))
        return
    shows_json = as_json or not terminal.is_terminal(sys.stdout)
    for index, (text, vector) in enumerate(zip(given, vectors, strict=True)):
        if shows_json:
            terminal.write_json({"index": index, "text": text, "embedding": _plain(vector)})
        else:
            terminal.write(terminal.shortened(text, _PREVIEW_TEXT), style="cyan")
            terminal.write("".join(f"\n  {line}" for line in _preview(vector)) + "\n")


def _plain(vector: npt.NDArray[np.float32]) -> list[Any]:
    """Convert to lists of numbers with the digits that single precision has."""
    if vector.ndim > 1:
        return [_plain(row) for row in vector]
    return [float(str(value)) for value in vector]


def _preview(vector: npt.NDArray[np.float32]) -> Iterator[str]:
    import numpy as np

    for row in np.atleast_2d(vector):
        values = " ".join(f"{value:+.4f}" for value in row[:_PREVIEW_VALUES])
        more = " ..." if len(row) > _PREVIEW_VALUES else ""
        yield f"{len(row)} numbers, norm {cast(float, np.linalg.norm(row)):.4f}: {values}{more}"
