"""Make a model return JSON that fits a schema, and one label out of a list.

python examples/structured_output.py [model.gguf]
"""

import json
import sys

import paceline

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "animal": {"enum": ["fox", "bear", "duck"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}


def main(model: str | None = None) -> None:
    with paceline.LLM(model) as llm:
        text = llm.generate("The hero as JSON: ", json_schema=SCHEMA, max_tokens=200, temperature=0).text
        hero = json.loads(text)
        print(hero["name"], "is a", hero["animal"], "of", hero["age"], "years")
        mood = llm.generate("Jack was upset and wanted to give up. Jack is ", choice=["happy", "sad"]).text
        print("mood:", mood)


if __name__ == "__main__":
    main(*sys.argv[1:])
