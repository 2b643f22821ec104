"""Texts that the real models read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

CODE_PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
STORY_PROMPT = "The lighthouse keeper climbed the stairs every evening because"
PROMPTS = (CODE_PROMPT, STORY_PROMPT, "Q: What is the capital of France?\nA:")


def prose(num_chars: int = 40_000) -> str:
    """Return the beginning of the guides, which no model has read.

    The rounding of kernels moves a token's log-probability by a tenth or more: the mean of fewer tokens would not tell 0.3 %.
    """
    pages = sorted((ROOT / "docs" / "guide").glob("*.md"))
    return "\n".join(page.read_text() for page in pages)[:num_chars]


# Triples: a sentence, one that means nearly the same, one about something else.
TRIPLES = (
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Interest rates rose by a quarter point."),
    ("How do I reset my password?", "I forgot my login and need a new one.", "The recipe needs two eggs and flour."),
    ("The train to Berlin is delayed.", "The rail service to Berlin runs late.", "She planted tomatoes in the garden."),
    ("Python lists can be sorted in place.", "Use list.sort to order a list.", "The moon causes the tides."),
    ("He scored the winning goal.", "His goal decided the match.", "The server returned an error."),
)
