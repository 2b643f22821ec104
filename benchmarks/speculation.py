"""Speculation against llama-server's, over HTTP with the same draft model: speed with and without, at several widths.

python -m benchmarks.speculation --acceptance 0.5,0.7,0.9 --widths 1,4,16 --rounds 2
python -m benchmarks.speculation --heads mtp
python -m benchmarks.speculation --heads eagle3 --acceptance 0.7
python -m benchmarks.speculation --ngram
python -m benchmarks.speculation --demo
python -m benchmarks.speculation --demo --servers paceline-off,paceline-drafts --rounds 100
python -m benchmarks.speculation --acceptance 0.9 --widths 16 --cached --servers paceline,paceline-drafts
python -m benchmarks.speculation --target TARGET.gguf --draft DRAFT.gguf --texts code,chat,story --widths 1,4,8
python -m benchmarks.speculation --target TARGET.gguf --texts edit,quote --widths 1,4

The models are `walk_models`: proposals of the draft model are right with a set probability. The servers stay for all rounds of a
launch, with and without drafts; each round has prompts of its own, and uses the servers in turn. llama-server drafts three
tokens a slot by default; --n-max gives both another bound. With its defaults the idle threads of one model's context poll while
the other's compute, on the same cores, so it runs with drafts a second time without polling: "tuned". --ngram measures prompt
lookup instead of a draft model, on prompts that hold their output: a stretch of the walk, twice. --heads measures draft heads
of a set acceptance: a next-token-prediction head in the target's file, or an EAGLE-3 file beside it. --demo measures the demo
model with its draft model, on the beginnings of stories. --cached has the same prompts in all rounds, after a round that
is not counted. "paceline-off", if it is named, is the server with drafts and requests without them: this compares a server with
itself, as two processes of the same server differ by a few per cent. Its rounds teach the engine the time of passes without
drafts, which an engine that always drafts sees more seldom. --target measures a real model on real texts: messages in its chat
format, answered greedily. Without --draft it measures prompt lookup: "edit" returns a file of 200 lines (this one) with a name
changed, "quote" answers from a quoted document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import walk_models
from benchmarks.mean_ratio import MeanRatio
from benchmarks.peers import builds
from benchmarks.peers.client import Call, LlamaServerDialect, Reply
from benchmarks.peers.driver import PromptMaker, Run
from benchmarks.peers.servers import Launch, Programs, Running, launch, serving
from benchmarks.peers.workloads import PlannedRequest, Segment, Workload
from paceline import Model
from paceline.chat import ChatFormat
from paceline.demo import demo_draft_model_path, demo_model_path

NUM_PROMPT, NUM_GENERATED = 64, 96
SERVERS = ("paceline", "paceline-drafts", "llama-server", "llama-server-drafts", "llama-server-tuned")
_OFF = "paceline-off"
_NO_POLLING = ("--poll", "0", "--spec-draft-poll", "0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a run of a server: tokens per second, median time to first token and longest gap in seconds."""

    tokens_per_s: float
    ttft_s: float
    longest_gap_s: float


class WithoutDrafts(LlamaServerDialect):
    """Requests that allow no drafts."""

    def body(self, call: Call) -> dict[str, Any]:
        return {**super().body(call), "speculation": False}


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter and its target model. flags: of both servers; peer_flags: additional flags of llama-server."""

    name: str
    model: Path
    flags: tuple[str, ...]
    peer_flags: tuple[str, ...] = ()


class EditingPrompts(PromptMaker):
    """Prompts that hold their output: a stretch of the walk as the model generates it, twice, and its beginning again."""

    def __init__(self, model: Path, following: Sequence[int]) -> None:
        super().__init__(model)
        self._following = following

    def token_ids(self, segments: tuple[Segment, ...], variation: int = 0) -> list[int]:
        """Return the ids of the segments; only the first token of each counts, and the next tokens follow from it."""
        ids: list[int] = []
        for segment in segments:
            first = super().token_ids((Segment(segment.seed, 1),), variation)
            walk = [*first]
            while len(walk) < NUM_GENERATED + 8:
                walk.append(self._following[walk[-1]])
            ids += [*walk, *walk[:8]]
        return ids


_MESSAGES = {
    "code": (
        "Write a Python class for a binary search tree with insert, delete and find.",
        "Write a Python function that parses a line of a CSV file with quoted fields, without the csv module.",
        "Write a JavaScript function that debounces another function, and tests for it.",
        "Write a C function that reverses a linked list, and a program that uses it.",
        "Write a Python script that counts the words in all text files of a folder.",
        "Write a SQL schema for a library with books, members and loans, and five queries.",
        "Write a cache with a limit on its size as a decorator in Python.",
        "Write an HTTP server in Go with two routes and a graceful shutdown.",
    ),
    "chat": (
        "Why is the sky blue, and why are sunsets red?",
        "How do I learn to cook within a month? Give me a plan.",
        "What were the causes of the French revolution?",
        "Explain recursion to a child, with three examples.",
        "What should I look at when I buy a used car?",
        "What is the difference between TCP and UDP, and when is each the better choice?",
        "How does a refrigerator work?",
        "Plan a weekend in Lisbon for two people.",
    ),
    "story": (
        "Tell a story about a fox who lost his shadow.",
        "Tell a story about a lighthouse keeper and a storm.",
        "Tell a fairy tale with a dragon who bakes bread.",
        "Tell a story about a train that never stops.",
        "Tell a ghost story in an old library.",
        "Tell a story about two rivers who fall in love.",
        "Tell a story about a robot who paints.",
        "Tell a story about a girl who collects clouds.",
    ),
}
_RENAMED = ("options", "prompts", "servers", "outcomes", "drafting", "acceptance", "width", "found")
_QUESTIONS = (
    "What does --cached do? Quote all lines about it.",
    "Which servers are compared, and how do they differ? Quote the document.",
    "What is measured with draft heads? Quote the document.",
    "What does the document say about prompt lookup? Quote it.",
    "What does it say about llama-server? Quote every sentence that names it.",
    "Repeat the commands in the document, each with a sentence on it.",
    "Which models are used? Quote the document.",
    "Summarise the document, and quote each sentence that you use.",
)
NUM_LINES = 200


def messages_of(kind: str) -> tuple[str, ...]:
    """Return eight messages of a kind of text."""
    if kind == "edit":
        lines = "\n".join(Path(__file__).read_text(encoding="utf-8").splitlines()[80 : 80 + NUM_LINES])
        return tuple(
            f"Return this file with the name `{name}` changed to `{name}_2` everywhere. Answer with the file alone.\n\n"
            f"```python\n{lines}\n```"
            for name in _RENAMED
        )
    if kind == "quote":
        return tuple(f"{__doc__}\n\n{question}" for question in _QUESTIONS)
    return _MESSAGES[kind]


class ChatPrompts(PromptMaker):
    """Messages in the model's chat format, each with a number, so that no prompt is in a cache."""

    def __init__(self, model: Path, kind: str) -> None:
        super().__init__(model)
        self._format = ChatFormat(Model.load(model, vocab_only=True))
        self._messages = messages_of(kind)

    def token_ids(self, segments: tuple[Segment, ...], variation: int = 0) -> list[int]:
        """Return the ids of a message; of the segment its seed alone counts."""
        number = segments[0].seed + 3 * variation
        content = f"Task {segments[0].seed}-{variation}: {self._messages[number % len(self._messages)]}"
        rendered = self._format.render([{"role": "user", "content": content}])
        return self._format.tokenizer.encode(rendered.text, parse_special=True)


class StoryPrompts(PromptMaker):
    """Beginnings of stories, each about another word."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._tokenizer = Model.load(model, vocab_only=True).tokenizer

    def token_ids(self, segments: tuple[Segment, ...], variation: int = 0) -> list[int]:
        """Return the ids of a beginning; of the segments their seeds alone count."""
        words = [
            self.text(super(StoryPrompts, self).token_ids((Segment(segment.seed, 1),), variation))
            for segment in segments
        ]
        return self._tokenizer.encode(f"Once upon a time there was a fox who had a{''.join(words)}. One day")


def main() -> None:
    """Measure every acceptance at every width, and print a line for each."""
    options = parse(sys.argv[1:])
    print(
        "drafts, width: tokens/s (ratio to those without drafts); ratio to llama-server with drafts, its defaults and tuned"
    )
    if options.target is not None:
        for kind in options.texts:
            drafting = real_drafting(options.target, options.draft, kind)
            measure(options, drafting, ChatPrompts(options.target, kind))
        return
    for acceptance in [None] if options.ngram or options.demo else options.acceptance:
        drafting = demo_drafting() if options.demo else drafting_with(options.heads, acceptance)
        measure(options, drafting, _prompts(drafting.model, options))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", type=_floats, default=[0.5, 0.7, 0.9], help="separated by commas")
    parser.add_argument("--widths", type=_ints, default=[1, 4, 16], help="separated by commas")
    parser.add_argument("--rounds", type=int, default=2, help="of each launch")
    parser.add_argument("--launches", type=int, default=1, help="how often the servers are started")
    parser.add_argument("--cached", action="store_true", help="the same prompts in all rounds")
    parser.add_argument(
        "--servers", type=lambda text: text.split(","), default=list(SERVERS), help="separated by commas"
    )
    parser.add_argument("--n-max", type=int, help="most drafts of a sequence, for both")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--ngram", action="store_true", help="prompt lookup on prompts that hold the output")
    kinds.add_argument("--demo", action="store_true", help="the demo model and its draft model")
    kinds.add_argument("--target", type=Path, help="a real model, on real texts")
    kinds.add_argument("--heads", choices=("mtp", "eagle3"), help="draft heads in the place of a draft model")
    parser.add_argument("--draft", type=Path, help="draft model of --target; without it prompt lookup")
    parser.add_argument(
        "--texts",
        type=lambda text: text.split(","),
        default=["code", "chat", "story"],
        help="kinds of texts of --target",
    )
    parser.add_argument("--num-generated", type=int, default=NUM_GENERATED, help="tokens of each answer")
    parser.add_argument("--num-requests", type=int, help="of a round; by default as many as streams, twice up to 8")
    parser.add_argument("--paceline", type=Path, default=Path(sys.executable), help="interpreter of its environment")
    options = parser.parse_args(arguments)
    if _OFF in options.servers and "paceline-drafts" not in options.servers:
        parser.error(f"--servers: {_OFF} is the server paceline-drafts, which has to be named as well")
    return options


def workload(width: int, options: argparse.Namespace) -> Workload:
    """Return a closed loop of this width: all streams twice, but 16 streams once."""
    count = options.num_requests or (2 * width if width < 16 else width)
    return Workload(
        name=f"speculation-{width}",
        title=f"{width} streams",
        requests=tuple(
            PlannedRequest(
                role="stream",
                segments=(Segment(100 * width + number, NUM_PROMPT),),
                max_tokens=options.num_generated,
            )
            for number in range(count)
        ),
        width=width,
        tuned=(),
        headline="tokens_per_s",
    )


def measure(options: argparse.Namespace, drafting: Drafting, prompts: PromptMaker) -> None:
    """Run all widths with a drafter, and print a line for each."""
    found: dict[int, dict[str, list[Outcome]]] = {width: defaultdict(list) for width in options.widths}
    for number in range(options.launches):
        measure_once(options, drafting, prompts, number * options.rounds, found)
    for width in options.widths:
        report(drafting.name, width, found[width], options.rounds)


def measure_once(
    options: argparse.Namespace,
    drafting: Drafting,
    prompts: PromptMaker,
    first_round: int,
    found: dict[int, dict[str, list[Outcome]]],
) -> None:
    """Start the servers, and add their figures of all rounds and widths to `found`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(serving(how, folder / f"{name}.log"))
            for name, how in launches(options, drafting).items()
            if name in options.servers
        }
        if _OFF in options.servers:
            with_drafts = servers["paceline-drafts"]
            servers[_OFF] = replace(with_drafts, how=replace(with_drafts.how, dialect=WithoutDrafts()))
        for width in options.widths:
            for number in range(first_round - options.cached, first_round + options.rounds):
                for name in list(servers) if number % 2 else list(reversed(servers)):
                    outcome = run(workload(width, options), prompts, servers[name], 0 if options.cached else number)
                    if number >= first_round:
                        found[width][name].append(outcome)
            print(f"launch {1 + first_round // options.rounds}: measured {width} streams", file=sys.stderr, flush=True)


def drafting_with(heads: str | None, acceptance: float | None) -> Drafting:
    """Return the drafter: n-grams if there is no acceptance, draft heads, or a draft model. Writes files on first use."""
    if acceptance is None:
        return Drafting("ngram", walk_models.target(), ("--spec-type", "ngram-simple"))
    if heads == "mtp":
        return Drafting(f"mtp {acceptance:g}", walk_models.target_with_head(acceptance), ("--spec-type", "draft-mtp"))
    if heads == "eagle3":
        flags = ("--spec-type", "draft-eagle3", "-md", str(walk_models.eagle(acceptance)))
        return Drafting(f"eagle3 {acceptance:g}", walk_models.target_for_eagle(), flags)
    draft = ("-md", str(walk_models.draft(acceptance)))
    return Drafting(f"{acceptance:g}", walk_models.target(), draft, ("--spec-type", "draft-simple"))


def demo_drafting() -> Drafting:
    """Return the demo pair."""
    draft = ("-md", str(demo_draft_model_path()))
    return Drafting("demo pair", demo_model_path(), draft, ("--spec-type", "draft-simple"))


def real_drafting(target: Path, draft: Path | None, kind: str) -> Drafting:
    """Return a real model with a draft model, or with prompt lookup."""
    if draft is None:
        return Drafting(f"{kind}, prompt lookup", target, ("--spec-type", "ngram-simple"))
    return Drafting(f"{kind}, {draft.stem}", target, ("-md", str(draft), "--spec-type", "draft-simple"))


def _prompts(model: Path, options: argparse.Namespace) -> PromptMaker:
    if options.demo:
        return StoryPrompts(model)
    return EditingPrompts(model, walk_models.following()) if options.ngram else PromptMaker(model)


def launches(options: argparse.Namespace, drafting: Drafting) -> dict[str, Launch]:
    """Return how the servers are started."""
    info = builds.build_info(options.paceline)
    variant = builds.Variant(is_native="GGML_NATIVE=OFF" not in info["flags"], has_openmp=False)
    programs = Programs(paceline=options.paceline, llama_server=builds.find_llama_server(info, variant))
    num_slots, n_ctx = (
        (16, 1024) if options.target is None else (max(options.widths), 4096)
    )  # a file of 200 lines, twice
    room = ("-np", str(num_slots), "-c", str(num_slots * n_ctx))
    most = () if options.n_max is None else ("--spec-draft-n-max", str(options.n_max))
    drafts, peers = (*drafting.flags, *most), drafting.peer_flags
    plain = replace(workload(16, options), limits=room)
    paceline = launch("paceline", plain, programs, drafting.model, [], ())
    llama_server = launch("llama-server", plain, programs, drafting.model, [])
    return {
        "paceline": paceline,
        "paceline-drafts": replace(paceline, command=(*paceline.command, *drafts)),
        "llama-server": llama_server,
        "llama-server-drafts": replace(llama_server, command=(*llama_server.command, *drafts, *peers)),
        "llama-server-tuned": replace(llama_server, command=(*llama_server.command, *drafts, *peers, *_NO_POLLING)),
    }


def run(what: Workload, prompts: PromptMaker, server: Running, variation: int) -> Outcome:
    """Run the workload once; end the program if a request failed."""
    replies = asyncio.run(Run(what, prompts, server, server.how.dialect, variation).all())
    failed = [reply for reply in replies if reply.status != "complete"]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(replies)} requests failed: {failed[0].problem}")
    taken_s = max(reply.end_s for reply in replies) - min(reply.start_s for reply in replies)
    firsts = [reply.times_s[0] - reply.start_s for reply in replies]
    total = sum(reply.num_generated for reply in replies)
    return Outcome(total / taken_s, statistics.median(firsts), max(map(_longest_gap, replies)))


def _longest_gap(reply: Reply) -> float:
    return max((after - before for before, after in zip(reply.times_s, reply.times_s[1:], strict=False)), default=0.0)


def report(drafts: str, width: int, found: dict[str, list[Outcome]], num_rounds: int) -> None:
    """Print the medians of one width, and the ratios of paceline with drafts to llama-server with them."""
    print(f"{drafts}, {width}", end="")
    for name, outcomes in found.items():
        speed, base = _speed(outcomes), found.get("paceline" if name.startswith("paceline") else "llama-server")
        in_group = num_rounds
        if name == "paceline-drafts" and _OFF in found:
            base, in_group = found[_OFF], 1
        ttft_s = statistics.median(outcome.ttft_s for outcome in outcomes)
        gap_s = max(outcome.longest_gap_s for outcome in outcomes)
        ratio = f" ({_ratio(outcomes, base, in_group)})" if base and base is not outcomes else ""
        print(f"; {name} {speed:.1f}{ratio}, TTFT {ttft_s:.2f} s, longest gap {gap_s:.2f} s", end="")
    for name in ("llama-server-drafts", "llama-server-tuned"):
        if name not in found or "paceline-drafts" not in found:
            continue
        ratios = [
            own.tokens_per_s / other.tokens_per_s
            for own, other in zip(found["paceline-drafts"], found[name], strict=True)
        ]
        print(f"; {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of {name}", end="")
    print(flush=True)


def _ratio(outcomes: list[Outcome], base: list[Outcome], in_group: int) -> str:
    """Return the geometric mean over the rounds, with its standard error, over groups (launches) if there are several.

    Two processes of the same server differ by a few per cent for as long as they live.
    """
    ratios = [outcome.tokens_per_s / other.tokens_per_s for outcome, other in zip(outcomes, base, strict=True)]
    found = MeanRatio.of(ratios, in_group if len(ratios) > in_group else 1)
    error = "" if math.isnan(found.error) else f" +- {found.error:.3f}"
    return f"{found.mean:.3f}{error}"


def _speed(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.tokens_per_s for outcome in outcomes)


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
