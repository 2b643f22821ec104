"""Measures the demo model that sees, in paceline: questions about pictures that were not in training, greedily."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from demo_model.measure import Row, table
from demo_vision.questions import Question, about
from demo_vision.scenes import Scene, draw, random_scene
from paceline import LLM, Image

FIRST_SEED = 1 << 48  # training counts from 0
REQUIRED = dict.fromkeys(("count", "shape", "colour", "left or right", "above or below"), 0.9)
SIDE = 256  # larger than what the encoder reads, as pictures are


def exam(count: int) -> Iterator[tuple[Scene, list[Question]]]:
    """Pictures with their questions."""
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        rng = random.Random(seed)
        scene = random_scene(rng)
        yield scene, about(scene, rng)


def measure(llm: LLM, count: int, show: int) -> list[Row]:
    """Each question in a conversation of its own, about the same picture; `show` prints some failures."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for scene, questions in exam(count):
        image = Image(draw(scene, SIDE))
        chats = [
            [{"role": "user", "content": [image, {"type": "text", "text": question.text}]}] for question in questions
        ]
        replies = [llm.chat(chat, temperature=0, max_tokens=40).content for chat in chats]
        for question, reply in zip(questions, replies, strict=True):
            total[question.skill] += 1
            right[question.skill] += reply == question.reply
            if reply != question.reply and total[question.skill] - right[question.skill] <= show:
                print(f"  FAIL {[figure.name for figure in scene.figures]} {question} -> {reply!r}")
    return [Row(skill, right[skill], total[skill], REQUIRED.get(skill)) for skill in sorted(total)]


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--show", type=int, default=0, help="failures to print of each skill")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    a = parser.parse_args()
    start = time.monotonic()
    with LLM(a.model) as llm:
        rows = measure(llm, a.pictures, a.show)
    print(f"\n{table(rows)}\n\n{time.monotonic() - start:.0f} s")
    if a.out:
        a.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
