"""Tool calls and schemas of a real model that was trained for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from tests.real_models.conftest import RealModel

from paceline import LLM

CODER = "qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}


class Person(BaseModel):
    """A person of a text."""

    name: str
    age: int = Field(ge=0, le=150)
    role: Literal["engineer", "teacher", "doctor"]


@pytest.fixture(scope="module")
def llm(real_model: RealModel) -> Iterator[LLM]:
    """Load the coder model."""
    with LLM(real_model(CODER), num_slots=2, n_ctx=8192, isolation="thread") as loaded:
        yield loaded


def test_a_forced_call_has_the_arguments_that_were_asked_for(llm: LLM) -> None:
    """The city and the unit come from the question."""
    question = [{"role": "user", "content": "What is the weather in Paris, in celsius? Use the tool."}]
    reply = llm.chat(question, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=200)
    (call,) = reply.tool_calls
    assert call.name == "get_weather"
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
    assert (arguments["city"], arguments["unit"]) == ("Paris", "celsius")


def test_the_result_of_a_call_reaches_the_reply(llm: LLM) -> None:
    """The second turn reports the temperature that the tool returned."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "unit": "celsius"}'},
    }
    talk = [
        {"role": "user", "content": "How warm is it in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 17}'},
    ]
    reply = llm.chat(talk, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=100)
    assert "17" in reply.content


def test_a_schema_is_filled_from_the_text(llm: LLM) -> None:
    """Each field has the value of the text."""
    text = "Extract the person: Maria Lopez, 34 years old, works as a doctor in Madrid."
    reply = llm.chat([{"role": "user", "content": text}], response_model=Person, temperature=0, max_tokens=200)
    assert reply.parsed == Person(name="Maria Lopez", age=34, role="doctor")
