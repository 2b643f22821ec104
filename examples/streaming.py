"""Stream a story and stop it at the end of its third sentence.

python examples/streaming.py [model.gguf]
"""

import sys

import paceline


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        sentences = 0
        for chunk in llm.stream("Once upon a time", max_tokens=200):
            print(chunk.text, end="", flush=True)
            sentences += chunk.text.count(".")
            if sentences >= 3:
                break  # leaving the loop cancels the request
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
