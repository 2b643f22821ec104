"""Complete every line of a file, all of them together, and report the throughput.

python examples/batch.py [prompts.txt]
"""

import sys
import time
from pathlib import Path

import paceline

ANIMALS = ("fox", "owl", "bear", "duck", "cow", "mouse", "goat", "otter")


def main(file: str | None = None) -> None:
    prompts = Path(file).read_text().splitlines() if file else [f"A little {animal}" for animal in ANIMALS]
    with paceline.LLM(num_slots=8) as llm:
        start = time.perf_counter()
        completions = llm.generate(prompts, max_tokens=40, progress=True)
        seconds = time.perf_counter() - start
    for prompt, completion in zip(prompts, completions, strict=True):
        print(prompt + completion.text.partition(".")[0] + ".")
    tokens = sum(completion.usage.completion_tokens for completion in completions)
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
