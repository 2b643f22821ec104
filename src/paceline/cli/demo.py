"""`paceline demo`: several requests at once, and a picture of how they share the engine."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline import validation
from paceline.cli import options as option
from paceline.cli import terminal
from paceline.cli.endings import FAILED, StopSignal, run
from paceline.cli.inputs import STDIN, stdin_text, text_file
from paceline.config import EngineConfig
from paceline.demo import demo_draft_model_path
from paceline.errors import InvalidParams, InvalidType, PacelineError
from paceline.params import FIELDS, SamplingParams
from paceline.request import OPTION_NAMES, RequestOptions

if TYPE_CHECKING:
    from paceline.cli.demo_pace import Pacer
    from paceline.cli.screen import StreamLine, TopState
    from paceline.llm import LLM
    from paceline.runtime import Model
    from paceline.streaming import Stream

_DEFAULTS = EngineConfig()
_WATCHABLE: Final = 25.0  # ticks a second: a little faster than one reads
_BUFFERED: Final = {True: 16, False: 256}  # unread tokens before the engine pauses a request, held back or not
_FRAME_S: Final = 1 / 15
_POLL_S: Final = 0.005
_MEASURED_S, _MOST_ROUNDS = 1.5, 8
_DRAFTER, _WITH_PAIR = (
    "ngram:size_n=2",
    "ngram,draft-model",
)  # the second one for the demo model, which has a draft model
_SEEDS: Final = 2**32
_HINT = " 1-9 cancel a request · p pause a reader · q quit"
_HINT_PAUSE = " pause or go on: 1-9 the reader of a request · p all readers"

# ---- the requests of the demo

# What the demo model was trained on begins an answer after a thought, which may be empty.
_ANSWER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}
_TOOLS = (
    "# Tools\n\nYou can call the functions below. Each line is the JSON description of one function:\n"
    f"<tools>\n{json.dumps(_WEATHER)}\n</tools>\n\n"
    "To call a function, write its name and its arguments as JSON between tags:\n"
    '<tool_call>\n{"name": "function-name", "arguments": {"argument": "value"}}\n</tool_call>'
)


def _ask(question: str, system: str = "", **options: Any) -> Mapping[str, Any]:
    """Return a request with the first turn of a conversation in ChatML, as the demo model was trained."""
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    prompt = f"{before}<|im_start|>user\n{question}<|im_end|>\n{_ANSWER}"
    return {"prompt": prompt, "parse_special": True, "temperature": 0, **options}


FOR_DEMO_MODEL: Final[tuple[Mapping[str, Any], ...]] = (
    {"prompt": "Once upon a time", "max_tokens": 220, "echo": True},
    _ask("Tell me a story about a fox.", temperature=0.7, max_tokens=220),
    _ask("Where does Wilma live?", max_tokens=60),
    _ask("What is the job of Gilda?", "Talk like a pirate.", max_tokens=60),
    _ask("What is the weather like in Oslo?", _TOOLS, max_tokens=80),
    {"prompt": "A little bear", "n": 2, "max_tokens": 160, "echo": True},
    _ask("Describe Tessa.", max_tokens=120),
    {"prompt": "One cold morning, an old owl", "max_tokens": 200, "echo": True},
)
"""Stories, a question about the model's small world, a system prompt, a tool call, two choices of one prompt."""

FOR_ANY_MODEL: Final[tuple[Mapping[str, Any], ...]] = (
    {"prompt": "Once upon a time", "max_tokens": 200, "echo": True},
    {"prompt": "The three most important things about a garden are", "max_tokens": 120, "echo": True},
    {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 24, "stop": ["\n"], "temperature": 0},
    {"prompt": "def fibonacci(n: int) -> int:\n", "max_tokens": 120, "temperature": 0.2, "echo": True},
    {"prompt": "Dear neighbour,\n\nI am writing to you because", "max_tokens": 160, "echo": True},
    {"prompt": "A haiku about rain:\n", "max_tokens": 60, "n": 2},
    {"prompt": "Monday, Tuesday, Wednesday,", "max_tokens": 30, "temperature": 0, "echo": True},
    {"prompt": "It was a dark and stormy night, and", "max_tokens": 200, "echo": True},
)
"""Texts to continue, for models whose chat template is not used here."""


@dataclass(slots=True)
class DemoChoice:
    """A choice of a request as far as it was read. reason: its `FinishReason`; None while it runs."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None


class DemoRequest:
    """A request of the demo, and the text that was read of its stream.

    Attributes:
        number: Its number, from 1.
        prompt: The prompt.
        options: Keywords of `LLM.stream`, each checked.
        choices: Its choices.
        error: Why it was refused or failed.
        is_read: Whether its reader takes chunks.
        is_over: Whether it was refused, or read to its end.
    """

    def __init__(self, number: int, prompt: str | tuple[int, ...], options: Mapping[str, Any]) -> None:
        self.number, self.prompt, self.options = number, prompt, dict(options)
        self.choices = [DemoChoice() for _ in range(self.options.get("n") or 1)]
        self.error: PacelineError | None = None
        self.is_read, self.is_over = True, False
        self.stream: Stream | None = None

    def submit(self, llm: LLM) -> None:
        """Submit the request. One that is refused keeps its error."""
        try:
            self.stream = llm.stream(self.prompt, **self.options)
        except PacelineError as error:
            self.error, self.is_over = error, True

    def take(self) -> None:
        """Read the chunks that are ready."""
        from paceline.streaming import StreamChunk
        from paceline.streaming.sender import END

        while self.stream is not None and self.is_read and not self.is_over:
            chunk = self.stream.get(0)
            if not isinstance(chunk, StreamChunk):
                self.is_over = chunk is END
                return
            choice = self.choices[chunk.choice]
            choice.text += chunk.text
            choice.token_ids += chunk.token_ids
            self.error = self.error or chunk.error
            if chunk.finish_reason is not None:
                choice.reason, choice.stop = chunk.finish_reason, chunk.stop

    def cancel(self) -> None:
        """Cancel the request; its reader takes the last chunks. Any thread."""
        if self.stream is not None:
            self.stream.cancel()
        self.is_read = True


def parse_requests(items: Sequence[Any], name: str) -> list[DemoRequest]:
    """Check a list of requests. name: of the list, for errors, which name the request and its field."""
    return [_parsed(item, number, f"{name}, request {number}") for number, item in enumerate(items, start=1)]


def read_requests(path: Path) -> list[DemoRequest]:
    """Read the requests of a file, "-" for stdin: a JSON list of prompts, or of objects of a prompt and options.

    Raises `InvalidParams`, which names the request and its field.
    """
    name = f"--requests {path}"
    text = stdin_text() if str(path) == STDIN else text_file("--requests", path)
    try:
        items = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{name} is not valid JSON: {error}") from None
    if not isinstance(items, list):
        raise InvalidParams(f"{name} must be a list of prompts or of objects with a prompt, not {_kind(items)}")
    if not items:
        raise InvalidParams(f"{name} is an empty list; give it at least one request")
    return parse_requests(items, name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse a key that occurs twice."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"an object has the key {twice!r} twice")
    return dict(pairs)


def _parsed(item: Any, number: int, name: str) -> DemoRequest:
    item = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(item, Mapping):
        raise InvalidType(f"{name} must be a prompt or an object with a prompt, not {_kind(item)}")
    if "prompt" not in item:
        raise InvalidParams(f"{name} has no prompt")
    options = {key: value for key, value in item.items() if key != "prompt"}
    if isinstance(options.get("logit_bias"), Mapping):  # whose keys are texts in JSON
        options["logit_bias"] = {
            int(id_) if id_.isdecimal() else id_: bias for id_, bias in options["logit_bias"].items()
        }
    prompt = item["prompt"]
    try:
        validation.reject_unknown(options, {*FIELDS, *OPTION_NAMES}, "SamplingParams and RequestOptions")
        SamplingParams(**{key: value for key, value in options.items() if key in FIELDS})
        RequestOptions(**{key: value for key, value in options.items() if key in OPTION_NAMES})
        if isinstance(prompt, str):
            validation.text("prompt", prompt)
        elif isinstance(prompt, Sequence):
            prompt = tuple(validation.token_ids("prompt", prompt, 2**31))
        else:
            raise InvalidType(f"prompt must be a text or a list of token ids, not {_kind(prompt)}")
    except InvalidParams as error:
        raise type(error)(f"{name}: {error}") from None
    return DemoRequest(number, prompt, options)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def completed(
    requests: Sequence[DemoRequest], seed: int, max_tokens: int | None, max_buffered_tokens: int | None = None
) -> list[DemoRequest]:
    """Return copies with options that a request leaves open: a seed of its own, the limits, and a name for the picture."""
    found = []
    for request in requests:
        options = request.options
        limit = options.get("max_tokens", SamplingParams().max_tokens)
        if max_tokens is not None:
            limit = max_tokens if limit is None else min(limit, max_tokens)
        given = {
            "seed": (seed + request.number - 1) % _SEEDS,
            "max_buffered_tokens": max_buffered_tokens,
            "request_id": f"#{request.number}",
        }
        open_ones = {name: value for name, value in given.items() if options.get(name) is None}
        found.append(DemoRequest(request.number, request.prompt, {**options, **open_ones, "max_tokens": limit}))
    return found


# ---- the command

# Options are laid out by hand, a few lines each.
# fmt: off
Requests = Annotated[Path | None, typer.Option(
    metavar="FILE",
    help='What to run: a JSON list of prompts, or of objects of a prompt and its options; "-" for stdin.',
    show_default="eight requests of ours",
)]
FirstSeed = Annotated[int, option.choosing_tokens(
    "--seed", "-s", metavar="N", help="Seed of the first request; each next request adds 1. -1 draws a new seed.",
)]
MostTokens = Annotated[int | None, option.ending(
    "--max-tokens", "-n", metavar="N", help="Maximum of tokens for each choice.", show_default="each request's own",
)]
NumSlots = Annotated[int, option.running(
    "--num-slots", "-np", metavar="N", help="Sequences that run at once; the others wait.",
)]
Pace = Annotated[float | None, option.running(
    metavar="N", help="Maximum of ticks per second, slow enough to follow by eye; 0 for no limit.",
    show_default="25 for a picture of the demo model, else 0",
)]
Speculate = Annotated[bool, option.running(
    "--speculate", help="Speculate: propose draft tokens. The requests also run without drafts, for comparison.",
)]
Speculation = Annotated[str | None, option.running(
    metavar="NAME", help="How draft tokens are proposed, as --speculation of `paceline serve`.",
    show_default=f"{_WITH_PAIR}; for another model {_DRAFTER}",
)]
Plain = Annotated[bool, option.showing(
    "--plain", help="Write one line for each choice and one line of figures, as without a terminal.",
)]
AsJson = Annotated[bool, option.showing("--json", help="One JSON object at the end.")]
TraceTarget = Annotated[Path | None, option.showing(
    metavar="FILE", help="Record what the engine does, as lines of JSON.", show_default=False,
)]
# fmt: on


def demo(
    *,
    model: option.ModelOption = None,
    n_gpu_layers: option.GpuLayersOption = None,
    device: option.DeviceOption = None,
    requests: Requests = None,
    seed: FirstSeed = 1,
    max_tokens: MostTokens = None,
    num_slots: NumSlots = _DEFAULTS.num_slots,
    pace: Pace = None,
    speculate: Speculate = False,
    speculation: Speculation = None,
    threads: option.ThreadsOption = None,
    verbose: option.VerboseOption = False,
    plain: Plain = False,
    as_json: AsJson = False,
    trace: TraceTarget = None,
) -> None:
    """Run several requests together on one engine, and show how they share it.

    On a terminal there is a picture of the requests and the engine, and keys act on it: a digit cancels the request of
    this number; p and a digit stop or start its reader, p and p the readers of all requests, and the engine pauses a
    request that is not read; q ends the demo. Figures come last: time to first token (TTFT), time between tokens (ITL),
    throughput, and more.
    """
    if plain and as_json:
        raise InvalidParams("--plain and --json exclude each other; choose one")
    is_live = not plain and not as_json and terminal.can_draw(sys.stdout)
    if pace is None:
        pace = _WATCHABLE if is_live and model is None else 0.0
    pace = validation.number("pace", pace, 0)
    validation.integer("seed", seed, -1, _SEEDS - 1)
    if max_tokens is not None:
        validation.integer("max_tokens", max_tokens, 0)
    chosen = FOR_DEMO_MODEL if model is None else FOR_ANY_MODEL
    parsed = parse_requests(chosen, "our requests") if requests is None else read_requests(requests)
    if speculation is None and speculate:
        speculation = _WITH_PAIR if model is None else _DRAFTER
    options: dict[str, Any] = {
        "num_slots": num_slots,
        "max_queue": max(_DEFAULTS.max_queue, len(parsed)),
        "speculation": speculation,
    }
    EngineConfig(**options)
    options |= {"n_threads": threads, "mmproj": False}
    if speculation is not None:
        from paceline.speculation.named_drafter import DRAFT_MODEL, check_drafter_name, drafter_parts

        check_drafter_name(speculation)
        if model is None and DRAFT_MODEL in drafter_parts(speculation):
            options["draft_model"] = demo_draft_model_path()
    first_seed = secrets.randbits(32) if seed == -1 else seed
    choice = option.ModelChoice(
        model=model, n_gpu_layers=n_gpu_layers, device=device, show_progress=not as_json, verbose=verbose
    )
    number = partial(completed, parsed, first_seed, max_tokens)

    def work(stop: StopSignal) -> bool:
        """Run the demo and return whether a request failed, or writing the trace."""
        from paceline.cli.demo_pace import LenientRecorder, Pacer
        from paceline.llm import LLM

        pacer = Pacer(pace)
        numbered = number(_BUFFERED[pace > 0] if is_live else None)

        def end() -> None:
            pacer.hurry()
            for request in numbered:
                request.cancel()

        with ExitStack() as stack:
            recorder = None if trace is None else stack.enter_context(LenientRecorder(trace))
            loaded = option.load(choice, stop)
            speed_up = None
            if speculation is not None:
                if is_live:
                    terminal.write("Measuring the requests without drafts, then with them ...\n")
                without = {**options, "speculation": None, "draft_model": None}
                speed_up = tuple(_rate(number, loaded.model, stop, used) for used in (without, options))
            instruments = [pacer] if recorder is None else [recorder, pacer]
            llm = stack.enter_context(LLM(loaded.model, instruments=instruments, **options))
            stack.enter_context(stop.aborting(end))
            submit(llm, numbered)
            if stop.requested:
                end()
            if is_live:
                title = [loaded.model.paths[0].name, terminal.counted(num_slots, "slot")]
                title += [f"drafts by {speculation}"] if speculation else []
                title += [f"at most {pace:g} ticks a second"] if pace else []
                LiveDemo(numbered, " · ".join(title), keys).show(llm)
            else:
                _read(numbered, shows=not as_json)
        found = figures(numbered, pacer, speed_up) | {"load_s": loaded.load_s, "seed": first_seed}
        if as_json:
            terminal.write_json({"results": [_result(request) for request in numbered], "summary": found})
        elif not is_live:
            terminal.write(figure_line(found) + "\n")
        else:
            for request in numbered:
                if request.error is not None:
                    terminal.write("".join(f"{line}\n" for line in result_lines(request)), style="red")
            terminal.write("\n")
            terminal.write_section("Summary", figure_rows(found))
        if recorder is not None and recorder.error is not None:
            problem = recorder.error.strerror or recorder.error
            terminal.report(f"the trace {trace} is incomplete: {problem}")
            return True
        return any(request.error is not None for request in numbered)

    with terminal.Keys(sys.stdin.fileno()) if is_live and terminal.can_read_keys() else nullcontext() as keys:
        have_failed = run(work)
    if have_failed:
        raise typer.Exit(FAILED)


def submit(llm: LLM, requests: Sequence[DemoRequest]) -> None:
    """Submit the requests. Raises the first error if all are refused."""
    for request in requests:
        request.submit(llm)
    errors = [request.error for request in requests if request.stream is None]
    if len(errors) == len(requests) and errors[0] is not None:
        raise errors[0]


def _rate(
    number: Callable[[], list[DemoRequest]], model: Model, stop: StopSignal, options: Mapping[str, Any]
) -> float | None:
    """Return the tokens a second of the requests in an engine that has nothing else to do."""
    from paceline.llm import LLM

    num_tokens, elapsed_s = 0, 0.0
    with LLM(model, **options) as llm:
        for _ in range(_MOST_ROUNDS):
            requests = number()
            start_s = time.perf_counter()
            with stop.aborting(lambda requests=requests: [request.cancel() for request in requests]):  # type: ignore[misc]
                submit(llm, requests)
                _read(requests, shows=False)
            elapsed_s += time.perf_counter() - start_s
            num_tokens += sum(len(choice.token_ids) for request in requests for choice in request.choices)
            if elapsed_s > _MEASURED_S or stop.requested:
                break
    return num_tokens / elapsed_s if num_tokens else None


def _read(requests: Sequence[DemoRequest], *, shows: bool) -> None:
    """Read all streams to their end. shows: write the results of a request when it has ended."""
    waiting = list(requests)
    while waiting:
        for request in waiting:
            request.take()
        if shows:
            for request in waiting:
                if request.is_over:
                    terminal.write("".join(f"{line}\n" for line in result_lines(request)))
        waiting = [request for request in waiting if not request.is_over]
        if waiting:
            time.sleep(_POLL_S)


# ---- the picture


class LiveDemo:
    """Draws requests and engine, and applies keys to the requests. keys: None if the terminal gives none."""

    def __init__(self, requests: Sequence[DemoRequest], title: str, keys: terminal.Keys | None) -> None:
        self._requests, self._title, self._keys = requests, title, keys
        self._is_choosing = False

    def show(self, llm: LLM) -> None:
        """Read all streams to their end, and leave the last picture on the terminal."""
        from rich.live import Live

        from paceline.cli.screen import DemoPicture

        drawn = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False, "vertical_overflow": "crop"}
        with _watched(llm) as state, Live(console=terminal.console(sys.stdout), **drawn) as live:  # type: ignore[arg-type]
            while not all(request.is_over for request in self._requests):
                live.update(DemoPicture(state, self._title, self.lines(state), self.hint), refresh=True)
                if self._keys is None:
                    time.sleep(_FRAME_S)
                else:
                    self._keys.wait(_FRAME_S)
                    for key in self._keys.read():
                        self.press(key)
                for request in self._requests:
                    request.take()
            live.update(DemoPicture(state, self._title, self.lines(state), ""), refresh=True)

    @property
    def hint(self) -> str:
        """The effect of the next key, for the last line of the picture."""
        if self._keys is None:
            return " Ctrl-C quits"
        return _HINT_PAUSE if self._is_choosing else _HINT

    def press(self, key: str) -> None:
        """Apply a key: a digit cancels, "p" and a digit or another "p" stops or starts readers, "q" ends all."""
        index = (int(key) - 1) % 10 if key.isdecimal() else len(self._requests)
        chosen = [request for request in self._requests[index : index + 1] if not request.is_over]
        if self._is_choosing:
            self._is_choosing = False
            if key == "p":
                live = [request for request in self._requests if not request.is_over]
                are_read = not any(request.is_read for request in live)
                for request in live:
                    request.is_read = are_read
            for request in chosen:
                request.is_read = not request.is_read
        elif key == "p":
            self._is_choosing = True
        else:
            for request in self._requests if key == "q" else chosen:
                request.cancel()

    def lines(self, state: TopState) -> list[StreamLine]:
        """Return a line for each choice of each request."""
        from paceline.cli.screen import StreamLine

        slots = {(slot["request_id"], slot["choice"]): slot for slot in state.members.get("slots", ())}
        return [
            StreamLine(
                label=f"#{request.number}" + (f".{index + 1}" if len(request.choices) > 1 else ""),
                state=_state_word(request, choice, slots.get((request.options["request_id"], index), {})),
                num_tokens=len(choice.token_ids),
                max_tokens=request.options["max_tokens"],
                text=choice.text,
                is_live=choice.reason is None and not request.is_over,
            )
            for request in self._requests
            for index, choice in enumerate(request.choices)
        ]


def _state_word(request: DemoRequest, choice: DemoChoice, slot: Mapping[str, Any]) -> str:
    """Return the state of a choice in a word; after its end its finish reason. "unread": its reader has stopped."""
    if request.stream is None:
        return "refused"
    state = {"prefilling": "prefill", "decoding": "decode", "paused": "paused"}.get(slot.get("state", ""))
    if choice.reason is not None:
        return choice.reason
    if not request.is_read and state != "paused":
        return "unread"
    return state or ("decode" if choice.token_ids else "waiting")


@contextmanager
def _watched(llm: LLM) -> Iterator[TopState]:
    """Yield the state of an engine of this process, which a thread keeps up to date."""
    from paceline.cli.screen import TopState
    from paceline.cli.watch import LocalEvents

    state, stop = TopState(), threading.Event()
    source = LocalEvents(llm.engine, "", interval_ms=round(1000 * _FRAME_S))
    reading = threading.Thread(target=source.run, args=(state.take, stop), name="paceline-demo", daemon=True)
    reading.start()
    try:
        yield state
    finally:
        stop.set()
        reading.join(1.0)


# ---- results and figures


def figures(
    requests: Sequence[DemoRequest], pacer: Pacer, speed_up: tuple[float | None, ...] | None = None
) -> dict[str, Any]:
    """Return the figures of a run that has ended, in seconds without the rests of the pacer; None: nothing was measured."""
    now = pacer.metrics.snapshot()
    ttft, itl = now.histogram("paceline_ttft_seconds"), now.histogram("paceline_itl_seconds")
    num_tokens = int(now.number("paceline_tokens_generated_total"))
    found: dict[str, Any] = {
        "requests": len(requests),
        "ended": now.completed,
        "tokens": num_tokens,
        "elapsed_s": pacer.elapsed_s,
        "rested_s": pacer.rested_s,
        "tokens_per_s": num_tokens / pacer.elapsed_s if pacer.elapsed_s > 0 else None,
        "ttft_p50_s": ttft.quantile(0.5),
        "ttft_p95_s": ttft.quantile(0.95),
        "itl_p50_s": itl.quantile(0.5),
        "itl_p99_s": itl.quantile(0.99),
        "occupancy": now.histogram("paceline_batch_occupancy_ratio").mean,
        "prefix_hits": int(now.number("paceline_prefix_hits_total")),
        "prefix_hit_tokens": int(now.number("paceline_prefix_hit_tokens_total")),
        "ticks": now.histogram("paceline_tick_seconds", "generate").count,
    }
    if speed_up is not None:
        found |= {
            "draft_tokens": int(now.number("paceline_draft_tokens_total")),
            "accepted_tokens": int(now.number("paceline_draft_tokens_accepted_total")),
            "tokens_per_s_with_drafts": speed_up[1],
            "tokens_per_s_without": speed_up[0],
        }
    return found


def figure_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures as names and values, for a terminal."""
    words = _words(found)
    return [
        ("requests", f"{found['requests']}, of which {found['ended']} came to their end"),
        ("throughput", words["throughput"]),
        ("held back", f"{found['rested_s']:.1f} s of rests, counted nowhere" if found["rested_s"] else ""),
        ("TTFT", words["TTFT"].replace(" p95", ", p95")),
        ("ITL", words["ITL"].replace(" p99", ", p99")),
        ("occupancy", words["occupancy"]),
        ("prefix hits", f"{found['prefix_hits']} ({terminal.counted(found['prefix_hit_tokens'], 'token')})"),
        ("ticks", str(found["ticks"])),
        ("drafts", words.get("drafts", "")),
        ("speed-up", words.get("speed-up", "")),
        ("load", words["load"]),
        ("seed", str(found["seed"])),
    ]


def figure_line(found: Mapping[str, Any]) -> str:
    """Return the figures on one line, for a pipe."""
    words = _words(found)
    parts = [f"{terminal.counted(found['requests'], 'request')}, {found['ended']} ended", words["throughput"]]
    parts += [f"{name} {words[name]}" for name in ("TTFT", "ITL", "occupancy")]
    parts += [f"prefix hits {found['prefix_hits']}", f"ticks {found['ticks']}"]
    parts += [f"drafts {words['drafts']}", words["speed-up"]] if "drafts" in words else []
    return " | ".join([*parts, f"load {words['load']}", f"seed {found['seed']}"])


def _words(found: Mapping[str, Any]) -> dict[str, str]:
    """Return figures as texts with their units."""
    times = {name: terminal.duration(value) for name, value in found.items() if name.endswith("_s")}
    rate, occupancy = found["tokens_per_s"], found["occupancy"]
    speed = "no speed" if rate is None else f"{rate:.0f} tok/s"
    words = {
        "throughput": f"{speed}, {terminal.counted(found['tokens'], 'token')} in {times['elapsed_s']}",
        "TTFT": f"p50 {times['ttft_p50_s']} p95 {times['ttft_p95_s']}",
        "ITL": f"p50 {times['itl_p50_s']} p99 {times['itl_p99_s']}",
        "occupancy": "-" if occupancy is None else f"{occupancy:.0%}",
        "load": times["load_s"],
    }
    if "draft_tokens" not in found:
        return words
    drafts, accepted = found["draft_tokens"], found["accepted_tokens"]
    without, with_drafts = found["tokens_per_s_without"], found["tokens_per_s_with_drafts"]
    words["drafts"] = "none, as none paid or none were proposed"
    if drafts:
        words["drafts"] = f"{drafts} verified, {accepted} accepted ({accepted / drafts:.0%})"
    words["speed-up"] = "not measured"
    if without and with_drafts:
        factor = f"{with_drafts / without:.2f} times as fast"
        words["speed-up"] = f"{factor}: {with_drafts:.0f} tok/s with drafts, {without:.0f} without"
    return words


def result_lines(request: DemoRequest) -> list[str]:
    """Return a line for each choice of a request that has ended: its number, how it ended, its text."""
    if request.stream is None:
        return [f"#{request.number} refused: {_flat(str(request.error))}"]
    lines = []
    for index, choice in enumerate(request.choices, start=1):
        number = f"#{request.number}" + (f".{index}" if len(request.choices) > 1 else "")
        how = terminal.finish_words(choice.reason or "cancelled", choice.stop)
        how = f"failed ({_flat(str(request.error))})" if choice.reason == "error" else how
        lines.append(f"{number} {how}, {terminal.counted(len(choice.token_ids), 'token')}: {_flat(choice.text)}")
    return lines


def _flat(text: str) -> str:
    return " ".join(text.split())


def _result(request: DemoRequest) -> dict[str, Any]:
    usage, error = None if request.stream is None else request.stream.usage, request.error
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    answers = [
        {"text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.reason, "stop": choice.stop}
        for choice in request.choices
    ]
    return {
        "request": request.number,
        "prompt": request.prompt,
        "answers": [] if request.stream is None else answers,
        "error": None if error is None else {"code": error.code, "message": str(error)},
        "usage": None if usage is None else {name: getattr(usage, name) for name in names},
    }
