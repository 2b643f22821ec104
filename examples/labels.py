"""Label many texts at once: each reply is an instance of a pydantic model, and a text that fails does not stop the others.

python examples/labels.py [model.gguf]
"""

import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

import paceline

TEXTS = ["The fox lost its cake.", "An owl found a friend.", "The duck " * 3000, "A bear had a party."]


class Label(BaseModel):
    """How a text makes its reader feel."""

    mood: Literal["happy", "sad"]
    reason: str = Field(description="at most eight words", max_length=200)


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        chats = [[{"role": "user", "content": f"Label this text: {text}"}] for text in TEXTS]
        outcomes: Sequence[paceline.ChatReply[Label] | paceline.PacelineError]
        try:
            outcomes = llm.chat(chats, response_model=Label, max_tokens=100, temperature=0, progress=True)
        except paceline.BatchError as error:  # raised after all of them have ended
            outcomes = error.outcomes
        for text, outcome in zip(TEXTS, outcomes, strict=True):
            if isinstance(outcome, paceline.PacelineError):
                print(f"{text[:24]}: failed: {outcome.code}")
            else:
                print(f"{text[:24]}: {outcome.parsed.mood}, {outcome.parsed.reason!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
