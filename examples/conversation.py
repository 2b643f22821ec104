"""A conversation of three turns: prefix caching computes only the new tokens of each.

python examples/conversation.py [model.gguf]
"""

import sys

import paceline

TURNS = ("Tell me a story about a fox.", "Who is its friend?", "Thank you!")


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        talk = paceline.Conversation(llm, temperature=0, max_tokens=60)
        for turn in TURNS:
            reply = talk.say(turn)
            usage = reply.usage
            print(f"> {turn}\n{reply.content.strip()}")
            print(f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
