"""OpenAI's Agents SDK over /v1/responses; run by `python -m tests.clients VENV agents`."""

from __future__ import annotations

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL = os.environ["PACELINE_URL"]
ASKED = "What is the weather in Paris?"
set_tracing_disabled(True)


def test_an_agent_uses_a_tool_whole_streamed_and_by_the_response_before() -> None:
    asyncio.run(_converse())


async def _converse() -> None:
    cities: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """Return the weather now."""
        cities.append(city)
        return f"sunny in {city}"

    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    agent = Agent(
        name="teller",
        tools=[weather],
        model=OpenAIResponsesModel(model="paceline-demo", openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=200),
    )
    whole = await Runner.run(agent, ASKED, max_turns=3)
    assert cities == ["Paris"]
    assert whole.final_output
    streamed = Runner.run_streamed(agent, ASKED, max_turns=3)
    names = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert names.count("response.completed") == 2
    assert streamed.final_output
    asked = "What is the weather in Rome?"
    following = await Runner.run(agent, asked, previous_response_id=whole.last_response_id, max_turns=3)
    assert cities == ["Paris", "Paris", "Rome"]
    assert following.final_output
