"""Tool calls, streams and structured output through frameworks; run by `python -m tests.clients`."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

URL = os.environ["PACELINE_URL"]
ASKED = "What is the weather in Paris?"


class Review(BaseModel):
    """A review."""

    animal: Literal["fox", "owl"]
    stars: int = Field(ge=1, le=5)  # a small model writes digits without end


def weather(city: str) -> str:
    """Return the weather now."""
    return "rain, 12 degrees"


# ---- LangChain


@pytest.fixture
def langchain() -> ChatOpenAI:
    return ChatOpenAI(base_url=URL, model="paceline-demo", temperature=0, max_tokens=200)


def test_langchain_goes_through_a_tool(langchain: ChatOpenAI) -> None:
    model = langchain.bind_tools([tool(weather)])
    messages: list[Any] = [HumanMessage(ASKED)]
    first = model.invoke(messages)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    second = model.invoke([*messages, first, result])
    assert not second.tool_calls
    assert "12" in second.content
    assert second.usage_metadata is not None
    assert second.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_langchain_requires_a_tool(langchain: ChatOpenAI, choice: str) -> None:
    model = langchain.bind_tools([tool(weather)], tool_choice=choice, parallel_tool_calls=False)
    assert [call["name"] for call in model.invoke("Tell me a story.").tool_calls] == ["weather"]


def test_langchain_streams_a_tool_call(langchain: ChatOpenAI) -> None:
    whole: AIMessageChunk | None = None
    for chunk in langchain.bind_tools([tool(weather)]).stream(ASKED):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", {"city": "Paris"})]


def test_langchain_streams_text_asynchronously(langchain: ChatOpenAI) -> None:
    async def read() -> list[str]:
        return [str(chunk.content) async for chunk in langchain.astream("Tell me a story about a fox.")]

    parts = asyncio.run(read())
    assert len([part for part in parts if part]) > 5


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])  # not json_mode, see MODES below
def test_langchain_has_structured_output(langchain: ChatOpenAI, method: Any) -> None:
    assert isinstance(langchain.with_structured_output(Review, method=method).invoke("Review an animal."), Review)


# ---- LlamaIndex


@pytest.fixture
def llama_index() -> OpenAILike:
    return OpenAILike(
        api_base=URL,
        api_key="none",
        model="paceline-demo",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=200,
        context_window=4096,
    )


def test_llama_index_goes_through_a_tool(llama_index: OpenAILike) -> None:
    tools = [FunctionTool.from_defaults(fn=weather)]
    response = llama_index.chat_with_tools(tools, user_msg=ASKED)
    (call,) = llama_index.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Paris"})
    result = ChatMessage(role="tool", content=weather("Paris"), additional_kwargs={"tool_call_id": call.tool_id})
    history = [ChatMessage(role="user", content=ASKED), response.message, result]
    second = llama_index.chat_with_tools(tools, chat_history=history)
    assert "12" in (second.message.content or "")


def test_llama_index_streams_a_tool_call_and_text(llama_index: OpenAILike) -> None:
    tools = [FunctionTool.from_defaults(fn=weather)]
    *_, last = llama_index.stream_chat_with_tools(tools, user_msg=ASKED)
    assert [call.tool_name for call in llama_index.get_tool_calls_from_response(last)] == ["weather"]
    *parts, last = llama_index.stream_chat([ChatMessage(role="user", content="Tell me a story about a fox.")])
    assert len(parts) > 5
    assert last.message.content
    assert llama_index.complete("Tell me a story.").text


def test_llama_index_has_structured_output(llama_index: OpenAILike) -> None:
    found = llama_index.as_structured_llm(Review).chat([ChatMessage(role="user", content="Review an animal.")]).raw
    assert isinstance(found, Review)


# ---- instructor

# Not Mode.JSON: any object conforms there, also one without an end, and the demo model does not follow the prompt's schema.
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_instructor_returns_instances(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL), mode=mode)
    options: Any = {"model": "paceline-demo", "max_tokens": 200, "temperature": 0, "max_retries": 0}
    messages: Any = [{"role": "user", "content": "Review an animal."}]
    found = client.chat.completions.create(response_model=Review, messages=messages, **options)
    assert isinstance(found, Review)


def test_instructor_streams_parts() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL), mode=instructor.Mode.TOOLS)
    options: Any = {"model": "paceline-demo", "max_tokens": 200, "temperature": 0, "max_retries": 0}
    messages: Any = [{"role": "user", "content": "Review an animal."}]
    *_, last = client.chat.completions.create_partial(response_model=Review, messages=messages, **options)
    assert last.animal in ("fox", "owl")
