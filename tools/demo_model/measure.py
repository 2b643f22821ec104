"""Measures the demo models and writes the table of the model card."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from demo_model.exams import EXAMS, STORY_PROMPTS, held_out_questions, tool_calls
from demo_model.generator import Generator, Output, PacelineGenerator, Sampling
from demo_model.judge import judge


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    right: int
    count: int
    required: float | None = None

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / max(self.count, 1)

    def markdown(self) -> str:
        """Return the line as Markdown."""
        wanted = f"{self.required:.0%}" if self.required else "-"
        return f"| {self.name} | {self.right} / {self.count} | {self.share:.1%} | {wanted} |"


def exams(engine: Generator, scale: float, show: int) -> list[Row]:
    """All exams, greedily; `scale` shortens them, `show` prints some failures."""
    rows = []
    for name, maker, count, required in EXAMS:
        tasks = list(itertools.islice(maker(), max(1, int(count * scale))))
        right = 0
        failures = 0
        for task in tasks:
            out = engine.generate(task.prompt, task.limit)
            good = task.right(out)
            right += good
            failures += not good
            if not good and failures <= show:
                print(f"  FAIL {task.prompt[-150:]!r} -> {out.text!r}")
        rows.append(Row(name, right, len(tasks), required))
        print(rows[-1].markdown(), flush=True)
    return rows


def stories(engine: Generator, count: int, show: int) -> list[Row]:
    """Stories from varied beginnings at temperature 0.8, judged by the grammar."""
    sentences = correct = ended = cast = 0
    for number in range(count):
        start = STORY_PROMPTS[number % len(STORY_PROMPTS)]
        out = engine.generate(start, 320, Sampling(temperature=0.8, seed=number))
        # A story that begins in lower case is judged as if it did not.
        text = start[0].upper() + (start + out.text)[1:]
        verdict = judge(text, out.ended)
        sentences, correct = sentences + verdict.sentences, correct + verdict.correct
        ended, cast = ended + verdict.ended, cast + verdict.same_cast
        if number < show:
            print(f"  {text}\n  rejected: {verdict.rejected}\n", flush=True)
    return [
        Row("story sentences in the grammar", correct, sentences, 0.9),
        Row("stories that end by themselves", ended, count, 0.9),
        Row("stories with one hero and one friend", cast, count),
    ]


def _agreement(big: Generator, draft: Generator, prompt: str, out: Output) -> tuple[int, int]:
    ids = big.encode(prompt) + out.tokens
    guesses = draft.next_tokens(ids[:-1])[-len(out.tokens) :]
    return sum(g == t for g, t in zip(guesses, out.tokens, strict=True)), len(out.tokens)


def drafts(big: Generator, draft: Generator, count: int) -> list[Row]:
    """How often the draft's greedy token is the big model's greedy token."""
    groups = {
        "draft tokens accepted, stories": [(p, 250) for p in STORY_PROMPTS],
        "draft tokens accepted, world questions": [(t.prompt, 60) for t in itertools.islice(held_out_questions(), 60)],
        "draft tokens accepted, tool calls": [(t.prompt, 100) for t in itertools.islice(tool_calls(), 40)],
    }
    rows = []
    for name, prompts in groups.items():
        right = total = 0
        for prompt, limit in prompts[:count]:
            out = big.generate(prompt, limit)
            if out.tokens:
                good, all_of_them = _agreement(big, draft, prompt, out)
                right, total = right + good, total + all_of_them
        rows.append(Row(name, right, total))
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    head = ["| what | right | share | required |", "| --- | --- | --- | --- |"]
    return "\n".join(head + [row.markdown() for row in rows])


def engine_of(path: Path, tokenizer: Path | None) -> Generator:
    """Return the engine for a GGUF file: paceline, or PyTorch if a tokenizer is given."""
    if tokenizer is None:
        return PacelineGenerator(path)
    from tokenizers import Tokenizer

    from demo_model.torch_generator import TorchGenerator, load

    return TorchGenerator(load(path), Tokenizer.from_file(str(tokenizer)))


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the questions to ask")
    parser.add_argument("--stories", type=int, default=100)
    parser.add_argument("--show", type=int, default=0, help="failures to print of each exam")
    parser.add_argument("--torch", type=Path, metavar="TOKENIZER", help="measure in PyTorch instead of paceline")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    a = parser.parse_args()
    start = time.monotonic()
    big = engine_of(a.model, a.torch)
    rows = stories(big, a.stories, a.show) + exams(big, a.scale, a.show)
    if a.draft:
        rows += drafts(big, engine_of(a.draft, a.torch), 60)
    print(f"\n{table(rows)}\n\n{time.monotonic() - start:.0f} s")
    if a.out:
        a.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
