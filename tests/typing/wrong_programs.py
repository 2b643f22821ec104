"""Programs that a type checker refuses, read by it and never run: an ignore without an error is an error itself."""

from __future__ import annotations

import paceline


def names(llm: paceline.LLM, chat: list[dict[str, str]]) -> None:
    """A keyword that does not exist is an error."""
    llm.generate("x", temprature=0.1)  # type: ignore[call-overload]
    llm.generate(["x"], temprature=0.1)  # type: ignore[call-overload]
    llm.generate("x", interval=4)  # type: ignore[call-overload]  # of streams
    llm.stream("x", max_token=1)  # type: ignore[call-overload]
    llm.chat(chat, tool=[])  # type: ignore[call-overload]
    llm.chat(chat, echo=True)  # type: ignore[call-overload]  # the reply is the message alone
    llm.stream_chat(chat, add_special=True)  # type: ignore[call-arg]
    llm.embed("x", temperature=0.1)  # type: ignore[call-arg]
    llm.classify(["x"], priorty=1)  # type: ignore[call-arg]
    llm.rerank("x", ["y"], tenant="a")  # type: ignore[call-arg]
    llm.save_prefix("a", "x", timeout_s=1)  # type: ignore[call-arg]
    llm.load_prefix("a", salt="x")  # type: ignore[call-arg]


def types(llm: paceline.LLM, chat: list[dict[str, str]]) -> None:
    """So is a value of another type."""
    llm.generate("x", temperature="hot")  # type: ignore[call-overload]
    llm.generate("x", stop=5)  # type: ignore[call-overload]
    llm.generate("x", truncate="centre")  # type: ignore[call-overload]
    llm.generate("x", lora=["style"])  # type: ignore[call-overload]
    llm.stream("x", slow_reader="wait")  # type: ignore[call-overload]
    llm.chat("Hello!")  # type: ignore[arg-type]
    llm.chat(chat, tools=multiply)  # type: ignore[call-overload]
    llm.chat(chat, response_model=5)  # type: ignore[call-overload]
    llm.stream_chat(chat, max_tool_rounds="many")  # type: ignore[arg-type]


def multiply(a: int, b: int) -> int:
    return a * b


def engines(model: paceline.Model) -> None:
    """The options of an engine, of a model and of a context."""
    paceline.LLM(n_ctxx=4)  # type: ignore[call-arg]
    paceline.LLM(n_ctx="4")  # type: ignore[arg-type]
    paceline.LLM(strategy=5)  # type: ignore[arg-type]
    paceline.LLM(isolation="processes")  # type: ignore[arg-type]
    paceline.LLM(lora=5)  # type: ignore[arg-type]
    paceline.LLM(instruments=[5])  # type: ignore[list-item]
    paceline.LLM(n_seq_max=4)  # type: ignore[call-arg]  # follows from num_slots
    paceline.AsyncLLM(num_slot=4)  # type: ignore[call-arg]
    paceline.estimate_memory("a.gguf", num_slot=4)  # type: ignore[call-arg]
    paceline.Context(model, n_ctxx=4)  # type: ignore[call-arg]
    paceline.Embedder(model, n_ctx=4)  # type: ignore[call-arg]  # follows from max_tokens


def records() -> None:
    """The records that have the options."""
    paceline.SamplingParams(temprature=0.1)  # type: ignore[call-arg]
    paceline.SamplingParams(temperature="hot")  # type: ignore[arg-type]
    paceline.SamplingParams().replace(temprature=0.1)  # type: ignore[call-arg]
    paceline.SamplingParams().replace(top_k=0.5)  # type: ignore[arg-type]
    paceline.RequestOptions(priorty=1)  # type: ignore[call-arg]
    paceline.RequestOptions(timeout_s="1")  # type: ignore[arg-type]


def conversations(llm: paceline.LLM) -> None:
    talk = paceline.Conversation(llm, temprature=0.1)  # type: ignore[call-arg]
    talk.say("x", temprature=0.1)  # type: ignore[call-overload]
    talk.say("x", interval=4)  # type: ignore[call-overload]  # of streams
    talk.stream("x", max_token=1)  # type: ignore[call-arg]
    paceline.Conversation.load(llm, "file", temprature=0.1)  # type: ignore[call-arg]


async def awaiting(llm: paceline.AsyncLLM, chat: list[dict[str, str]]) -> None:
    await llm.generate("x", temprature=0.1)  # type: ignore[call-overload]
    await llm.chat(chat, temprature=0.1)  # type: ignore[call-overload]
    llm.stream("x", temprature=0.1)  # type: ignore[call-overload]
    llm.stream_chat(chat, temprature=0.1)  # type: ignore[call-arg]
    await llm.embed("x", temprature=0.1)  # type: ignore[call-arg]
    await llm.rerank("x", [], temprature=0.1)  # type: ignore[call-arg]
    talk = paceline.AsyncConversation(llm, temprature=0.1)  # type: ignore[call-arg]
    await talk.say("x", temprature=0.1)  # type: ignore[call-overload]
