"""Find the sentences that are most similar to a query, by embeddings.

python examples/semantic_search.py ["a duck swims on the lake" [embedding-model.gguf]]
"""

import sys

import numpy as np

import paceline

SENTENCES = (
    "a fox in the wood",
    "a duck on the lake",
    "a bear in its cave",
    "a cow on the meadow",
    "a baker with fresh bread",
)


def main(query: str = "a duck swims on the lake", model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        index = llm.embed(SENTENCES)  # float32 (5, n_embd), each of length 1
        scores = index @ llm.embed(query)
    for position in np.argsort(-scores)[:3]:
        print(f"{scores[position]:.3f} {SENTENCES[position]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
