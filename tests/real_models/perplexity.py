"""Print the log-probabilities of a text's tokens, by the kernels that the environment selects: MODEL TEXT_FILE N_CTX."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline import LLM


def main() -> None:
    """Score consecutive windows of the text and print a JSON list."""
    path, text, n_ctx = sys.argv[1], Path(sys.argv[2]).read_text(), int(sys.argv[3])
    with LLM(path, num_slots=1, n_ctx=n_ctx, isolation="thread") as llm:
        ids = llm.tokenizer.encode(text, add_special=False)
        scores: list[float] = []
        for start in range(0, len(ids) - n_ctx // 2, n_ctx - 8):
            window = ids[start : start + n_ctx - 8]
            completion = llm.generate(window, max_tokens=1, prompt_logprobs=0, cache_prompt=False)
            scores += [token.own for token in completion.prompt_logprobs or ()]
    json.dump(scores, sys.stdout)


if __name__ == "__main__":
    main()
