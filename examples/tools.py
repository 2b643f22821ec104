"""Let a model call Python functions: it asks for the weather, and reads the result.

python examples/tools.py [model.gguf]
"""

import sys

import paceline

WEATHER = {"Paris": "sunny, 20 degrees", "Oslo": "snow, -3 degrees"}


def weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: The city's English name.
    """
    return WEATHER[city]  # for another city the model reads of the KeyError


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        asked = [{"role": "user", "content": "What is the weather in Paris?"}]
        reply = llm.chat(asked, tools=[weather], run_tools=True, temperature=0)
        for message in reply.messages:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            print(
                f"{message['role']:>9}:",
                *(f"{call['name']}({call['arguments']})" for call in calls),
                message["content"],
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
