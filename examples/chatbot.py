"""Chat in a loop: replies are streamed, Ctrl-C stops a reply and keeps its text so far, old messages leave a full context.

python examples/chatbot.py [model.gguf]
"""

import sys

import paceline


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        talk = paceline.Conversation(llm, system="You tell short stories.", context_overflow="drop_oldest")
        while True:
            try:
                said = input("> ")
            except (EOFError, KeyboardInterrupt):
                return
            with talk.stream(said, max_tokens=300) as stream:
                try:
                    for chunk in stream:
                        print(chunk.content, end="", flush=True)
                except KeyboardInterrupt:
                    stream.cancel()
                    stream.collect()  # reads the rest: the turn is added as far as it came
            print()


if __name__ == "__main__":
    main(*sys.argv[1:])
