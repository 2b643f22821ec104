"""Other packages against /v1/responses of a running server. Each needs an environment of its own, so no test runs this.

    paceline serve --responses-store 100
    python -m venv agents && agents/bin/pip install openai-agents
    agents/bin/python tests/clients/responses_clients.py agents http://127.0.0.1:8080

The same with `langchain` (pip install langchain-openai) and `llama_index` (pip install llama-index-llms-openai). It expects the
demo model, which calls a tool for the weather of a city.
"""

from __future__ import annotations

import asyncio
import sys

MODEL = "paceline-demo"
QUESTION = "What is the weather in Paris?"
calls: list[str] = []


def weather(city: str) -> str:
    """Return the weather in a city."""
    calls.append(city)
    return f"It is sunny in {city}."


async def _agents(url: str) -> None:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="teller",
        instructions="You help.",
        tools=[function_tool(weather)],
        model=OpenAIResponsesModel(model=MODEL, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=200),
    )
    whole = await Runner.run(agent, QUESTION, max_turns=3)
    assert calls == ["Paris"]
    assert whole.final_output
    streamed = Runner.run_streamed(agent, QUESTION, max_turns=3)
    names = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert names.count("response.completed") == 2
    assert streamed.final_output
    following = await Runner.run(
        agent, "What is the weather in Rome?", previous_response_id=whole.last_response_id, max_turns=3
    )
    assert calls == ["Paris", "Paris", "Rome"]
    assert following.final_output


def agents(url: str) -> None:
    """OpenAI Agents SDK: a tool, whole and streamed, and a conversation that goes on by its response."""
    asyncio.run(_agents(url))


def langchain(url: str) -> None:
    """LangChain: a tool with its result, by messages and by a response, a stream, structured output."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    options = {"use_responses_api": True, "output_version": "responses/v1", "temperature": 0, "max_retries": 0}
    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=400, **options)
    with_tools = model.bind_tools([weather])
    called = with_tools.invoke(QUESTION)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(weather("Paris"), tool_call_id=call["id"])
    assert with_tools.invoke([HumanMessage(QUESTION), called, result]).text
    assert with_tools.invoke([result], previous_response_id=called.response_metadata["id"]).text
    assert "".join(chunk.text for chunk in model.stream("Hello."))
    assert isinstance(model.with_structured_output(Person).invoke("Who is the fox?"), Person)


def llama_index(url: str) -> None:
    """LlamaIndex: a completion, a stream, a tool. It knows models by OpenAI's names."""
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai import OpenAIResponses

    model = OpenAIResponses(
        model="gpt-4o-mini", api_base=f"{url}/v1", api_key="none", temperature=0, max_output_tokens=200, max_retries=0
    )
    assert model.complete("Hello.").text
    assert "".join(chunk.delta for chunk in model.stream_complete("Hello."))
    assert "sunny" in str(model.predict_and_call([FunctionTool.from_defaults(weather)], QUESTION))
    assert calls == ["Paris"]


if __name__ == "__main__":
    _, name, address = sys.argv
    {"agents": agents, "langchain": langchain, "llama_index": llama_index}[name](address)
    sys.stdout.write(f"{name}: passed\n")
