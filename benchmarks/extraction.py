"""The value of a schema in the prompt: the share of right answers when fields are extracted from texts.

python -m benchmarks.extraction MODEL.gguf

The description of each field decides which answer is right: a price in cents, a family name alone, a code of two letters. Each
text is asked for twice at temperature 0, with `schema_in_prompt=False` and with True; the schema constrains both answers.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

from pydantic import Field, create_model

from paceline import LLM
from paceline.errors import ResponseModelError

Kind = Literal["m", "b", "f"]
KINDS = "m for a mammal, b for a bird, f for a fish"
SCORE = "1 if the review is negative, 5 if it is positive"
CASES: tuple[
    tuple[str, Any, str, str, Any], ...
] = (  # name and type of the field, its description, the text, the answer
    ("total", int, "total price in cents", "Invoice: three chairs, total 45 euros.", 4500),
    (
        *("name", str, "family name only, without the first name"),
        *("My name is Anna Schmidt and I live in Berlin.", "Schmidt"),
    ),
    ("name", str, "full name in capital letters", "The winner is john miller.", "JOHN MILLER"),
    ("country", str, "ISO 3166 code of two letters, such as US", "Our office is in Hamburg, Germany.", "DE"),
    ("day", str, "date as YYYY-MM-DD", "The concert is on 5 March 2024.", "2024-03-05"),
    (
        *("weekday", str, "weekday as three lower-case letters, such as mon"),
        *("We meet every Thursday at noon.", "thu"),
    ),
    ("distance", int, "distance in metres", "From the hotel to the beach it is 2 kilometres.", 2000),
    ("score", int, SCORE, "Terrible food, rude waiter. Never again!", 1),
    ("score", int, SCORE, "Wonderful place, we loved every minute.", 5),
    ("phone", str, "digits only, without spaces or dashes", "Call me: 555-123-4567.", "5551234567"),
    ("code", str, "the part of the ticket number after the dash", "Your ticket number is AB-7731.", "7731"),
    ("at", str, "time of day in 24 hours, as HH:MM", "The train leaves at 3:15 pm.", "15:15"),
    (
        *("degrees", int, "temperature in degrees Celsius"),
        *("It is 20 degrees Celsius, or 68 Fahrenheit, in Rome today.", 20),
    ),
    ("minutes", int, "length of the meeting in minutes", "The meeting takes two hours.", 120),
    ("kind", Kind, KINDS, "A penguin walks on the ice.", "b"),
    ("kind", Kind, KINDS, "The dolphin feeds its calf with milk.", "m"),
    ("change", float, "change in percent, negative if the price fell", "The share fell by 3 percent.", -3.0),
    ("sender", str, "the mail address, in lower case", "From: Bob@Example.COM, Subject: hi", "bob@example.com"),
    (
        *("authors", list[str], "family names of the authors"),
        *("The book by Brian Kernighan and Dennis Ritchie is a classic.", ["Kernighan", "Ritchie"]),
    ),
    ("priority", int, "0 for low, 1 for normal, 2 for urgent", "URGENT: the server is down, fix it now!", 2),
    (
        *("flag", Literal["y", "n"], "y if the message is advertising, n otherwise"),
        *("Buy cheap watches now! 90 % off!!!", "y"),
    ),
    (
        *("code", str, "language of the text as a code of two letters, such as en"),
        *("Guten Morgen, wie geht es Ihnen?", "de"),
    ),
)


def num_right(llm: LLM, *, is_shown: bool) -> int:
    """Return how many answers are right."""
    count = 0
    for name, kind, description, text, answer in CASES:
        fields: dict[str, Any] = {name: (kind, Field(description=description))}
        model = create_model("Answer", **fields)
        asked = [{"role": "user", "content": f"Extract the data from this text: {text}"}]
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
        try:
            reply = llm.chat(asked, response_model=model, schema_in_prompt=is_shown, **options)
        except ResponseModelError:  # cut off
            continue
        count += getattr(reply.parsed, name) == answer
    return count


def main() -> None:
    """Print a line with the share of right answers, without and with the schema in the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file")
    with LLM(parser.parse_args().model, n_ctx=4096) as llm:
        without, shown = num_right(llm, is_shown=False), num_right(llm, is_shown=True)
    print(f"right answers of {len(CASES)}: {without} without the schema in the prompt, {shown} with it")


if __name__ == "__main__":
    main()
