"""Have a model fill in a dataclass: the reply is an instance of it.

python examples/typed_reply.py [model.gguf]
"""

import sys
from dataclasses import dataclass
from typing import Literal

import paceline


@dataclass
class Hero:
    """The hero of a story."""

    kind: Literal["fox", "bear", "duck"]
    mood: Literal["happy", "sad"]
    is_brave: bool


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        asked = [{"role": "user", "content": "Jack was lost in the forest. Describe Jack as JSON."}]
        hero = llm.chat(asked, response_model=Hero, reasoning_effort="none", max_tokens=200, temperature=0).parsed
        print(f"a {hero.mood} {hero.kind}, {'brave' if hero.is_brave else 'careful'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
