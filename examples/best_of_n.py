"""Generate several completions of one prompt and keep the most likely.

python examples/best_of_n.py [model.gguf]
"""

import sys

import paceline


def likelihood(choice: paceline.Choice) -> float:
    """Return the mean log-probability of a choice's tokens."""
    assert choice.logprobs is not None
    return sum(token.own for token in choice.logprobs) / len(choice.logprobs)


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        # The prompt is computed once for all choices; logprobs=0 returns each token's own.
        completion = llm.generate("A fox", n=6, max_tokens=30, logprobs=0, temperature=1.0)
    best = max(completion.choices, key=likelihood)
    for choice in completion.choices:
        mark = "*" if choice is best else " "
        print(f"{mark} {likelihood(choice):6.3f} A fox{choice.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
