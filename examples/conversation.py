"""A conversation of three turns: prefix caching computes only what is new in each.

python examples/conversation.py [model.gguf]
"""

import sys

import paceline

TURNS = ("Tell me a story about a fox.", "Who is its friend?", "Thank you!")


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        context: list[int] = []
        for turn in TURNS:
            text = f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
            # Token ids of earlier turns, not their text: tokenizing again could give other ids.
            context += llm.tokenizer.encode(text, add_special=not context, parse_special=True)
            completion = llm.generate(context, max_tokens=60, temperature=0)
            usage = completion.usage
            print(f"> {turn}\n{completion.text.strip()}")
            print(f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached]\n")
            end = llm.tokenizer.encode("<|im_end|>\n", add_special=False, parse_special=True)
            context = [*completion.prompt_token_ids, *completion.token_ids, *end]


if __name__ == "__main__":
    main(*sys.argv[1:])
