"""LangChain and LlamaIndex over /v1/responses; run by `python -m tests.clients`."""

from __future__ import annotations

import os

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from pydantic import BaseModel, Field

URL = os.environ["PACELINE_URL"]
ASKED = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)  # a small model writes digits without end


def weather(city: str) -> str:
    """Return the weather now."""
    return f"sunny in {city}"


@pytest.fixture
def langchain() -> ChatOpenAI:
    options = {"use_responses_api": True, "output_version": "responses/v1", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=URL, model="paceline-demo", max_tokens=400, **options)


@pytest.fixture
def llama_index() -> OpenAIResponses:
    """It knows models by OpenAI's names alone."""
    return OpenAIResponses(
        model="gpt-4o-mini", api_base=URL, api_key="none", temperature=0, max_output_tokens=200, max_retries=0
    )


def test_langchain_goes_through_a_tool_by_messages_and_by_a_response(langchain: ChatOpenAI) -> None:
    model = langchain.bind_tools([weather])
    called = model.invoke(ASKED)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    by_messages = model.invoke([HumanMessage(ASKED), called, result])
    by_response = model.invoke([result], previous_response_id=called.response_metadata["id"])
    assert by_messages.text
    assert by_response.text
    assert by_messages.usage_metadata is not None
    assert by_response.usage_metadata is not None
    assert by_messages.usage_metadata["input_tokens"] == by_response.usage_metadata["input_tokens"]


def test_langchain_streams_and_structures(langchain: ChatOpenAI) -> None:
    assert "".join(chunk.text for chunk in langchain.stream("Hello."))
    assert isinstance(langchain.with_structured_output(Person).invoke("Who is the fox?"), Person)


def test_llama_index_completes_streams_and_calls(llama_index: OpenAIResponses) -> None:
    assert llama_index.complete("Hello.").text
    assert "".join(chunk.delta for chunk in llama_index.stream_complete("Hello."))
    assert str(llama_index.predict_and_call([FunctionTool.from_defaults(weather)], ASKED)) == "sunny in Paris"
