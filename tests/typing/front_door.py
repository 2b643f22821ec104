"""Programs as users write them, read by the type checker and never run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack, assert_type

import numpy as np
import numpy.typing as npt
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam
from pydantic import BaseModel, Field

import paceline
from paceline.chat import MessageDelta
from paceline.chat_client.chat_arguments import ChatKeywords
from paceline.engine.arguments import GenerateKeywords


def blocking(llm: paceline.LLM) -> None:
    one = llm.generate("Once upon a time", max_tokens=20)
    assert_type(one, paceline.Completion)
    assert_type(one.text, str)
    assert_type(llm.generate([1, 2, 3]), paceline.Completion)
    assert_type(llm.generate(["a", "b"], progress=lambda done, total: done / total), list[paceline.Completion])
    assert_type(llm.generate([paceline.Image("cat.png"), "What is this?"]), paceline.Completion)
    assert_type(llm.generate(["a", paceline.Image(b""), [1, 2]]), paceline.Completion)
    pictured: list[str | paceline.Image] = ["a", paceline.Image(b"")]
    assert_type(llm.generate([pictured, pictured]), list[paceline.Completion])
    assert_type(llm.model.modalities, frozenset[str])
    assert_type(llm.generate([[1, 2], [3]], paceline.SamplingParams(n=2)), list[paceline.Completion])
    assert_type(llm.generate(["a", "b"], [paceline.SamplingParams(n=2), None]), list[paceline.Completion])
    with llm.stream("A fox", interval=4) as stream:
        for chunk in stream:
            assert_type(chunk, paceline.StreamChunk)
            assert_type(chunk.finish_reason, paceline.FinishReason | None)
    with llm.stream(["A fox", "An owl"], [paceline.SamplingParams(), None]) as streams:
        for index, chunk in streams:
            assert_type((index, chunk), tuple[int, paceline.StreamChunk])
    assert_type(llm.stream([1, 2]), paceline.Stream)
    assert_type(llm.stream([paceline.Image("cat.png"), "What is this?"]), paceline.Stream)
    ids = np.array([1, 2])
    assert_type(llm.generate(ids), paceline.Completion)
    assert_type(llm.generate([ids, ids, "a", [1, 2]]), list[paceline.Completion])
    assert_type(llm.generate([[paceline.Image("a.png"), "a"], [paceline.Image(b""), "b"]]), list[paceline.Completion])
    assert_type(llm.generate([[paceline.Image("a.png"), "a"], "text", [1, 2]]), list[paceline.Completion])
    assert_type(llm.stream(ids), paceline.Stream)
    llm.embed([[paceline.Image("cat.png"), "a cat"], "text", [1, 2], ids])
    llm.classify(["a", [1, 2], ids])
    assert_type(llm.embed(["one", "two"]), npt.NDArray[np.float32])
    assert_type(llm.embed([[1, 2], [3]]), npt.NDArray[np.float32])
    assert_type(llm.embed([paceline.Image("cat.png"), "a cat"], pooling="last"), npt.NDArray[np.float32])
    assert_type(llm.embed([pictured, "text", [1, 2]]), npt.NDArray[np.float32])
    assert_type(llm.embed([pictured, pictured]), npt.NDArray[np.float32])
    assert_type(llm.rerank("query", ["one"])[0].score, float)


@dataclass
class Person:
    name: str


def chatting(llm: paceline.LLM) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    assert_type(llm.chat(messages, max_tokens=20), paceline.ChatReply[None])
    assert_type(llm.chat(messages, response_model=Person).parsed, Person)
    assert_type(llm.chat([messages, messages], progress=True), list[paceline.ChatReply[None]])
    assert_type(llm.chat([messages], response_model=Person)[0].parsed, Person)
    assert_type(paceline.Conversation(llm).say("Hello!", response_model=Person).parsed, Person)
    paceline.Conversation(llm, response_model=Person).say("Hello!").parsed.name.upper()
    try:
        llm.chat([messages], response_model=Person)
    except paceline.BatchError as error:
        list[paceline.ChatReply[Person] | paceline.PacelineError](error.outcomes)
    assert_type(llm.chat([messages], [paceline.SamplingParams(n=2)]), list[paceline.ChatReply[None]])
    with llm.stream_chat(messages) as stream:
        for chunk in stream:
            assert_type(chunk.deltas, tuple[MessageDelta, ...])
        assert_type(stream.collect().content, str)


async def awaiting() -> None:
    async with paceline.AsyncLLM(num_slots=2) as llm:
        assert_type(await llm.generate("a"), paceline.Completion)
        assert_type(await llm.generate(["a", "b"]), list[paceline.Completion])
        async with llm.stream(["a", "b"]) as streams:
            async for index, chunk in streams:
                assert_type((index, chunk), tuple[int, paceline.StreamChunk])
        async with llm.stream("a") as stream:
            async for chunk in stream:
                assert_type(chunk.text, str)
        assert_type((await llm.chat([{"role": "user", "content": "Hello!"}], response_model=Person)).parsed, Person)
        async with llm.stream_chat([{"role": "user", "content": "Hello!"}]) as chat:
            async for part in chat:
                assert_type(part.finish_reason, paceline.FinishReason | None)
        assert_type(await llm.embed("one"), npt.NDArray[np.float32])


def options_of_every_type(llm: paceline.LLM) -> None:
    """Options take NumPy's numbers, lists for tuples, and None for the default."""
    llm.generate("a", temperature=np.float32(0.5), max_tokens=np.int64(3), top_k=np.argmax([1]), seed=None)
    llm.generate("a", stop=["x"], bad_words=("y",), stop_token_ids=np.array([1, 2]), logit_bias={3: -1})
    llm.generate("a", stop="x", logit_bias=[(3, 1.5)], samplers=["top_k", "temperature"], choice=["yes", "no"])
    llm.generate("a", json_schema={"type": "object"}, thinking={"start": "<think>", "ends": ["</think>"]})
    llm.generate("a", grammar="root ::= [a-z]", grammar_lazy=True, grammar_triggers=["x", 3, {"pattern": "y"}])
    llm.generate("a", temperature=None, stop=None, n=None, lora=None, priority=None, truncate=None)
    llm.generate("a", lora={"style": 0.5}, truncate="left", logits_processors=[lambda _, logits: logits])
    llm.generate(["a"], progress=None)
    llm.stream("a", request_index=None, interval=None)
    given: dict[str, Any] = {"temperature": 0.1}
    llm.generate("a", **given)
    paceline.SamplingParams(stop=["x"], choice=None).replace(stop=None, top_p=1, bad_words=["y"])
    paceline.RequestOptions(preserved_tokens=[1], lora={"style": 1})


def answer(llm: paceline.LLM, question: str, **options: Unpack[GenerateKeywords]) -> str:
    """A function of the user's own hands keywords on."""
    assert_type(llm.chat([{"role": "user", "content": question}], temperature=0).content, str)
    return llm.generate(question, **options).text


def reply(llm: paceline.LLM, question: str, **options: Unpack[ChatKeywords]) -> str:
    talk = paceline.Conversation(llm, **options)
    return talk.say(question, **options).content


def engines(path: Path) -> None:
    paceline.LLM(path, num_slots=np.int32(2), n_ctx=4096, lora=[path], mmproj=True, trace=path, flash_attn="on")
    paceline.LLM("a.gguf", strategy="paced:patience=4", lora={"style": "b.gguf"}, n_gpu_layers=None, rpc=("a:1", "b:2"))
    paceline.LLM(strategy={"name": "paced", "patience": 4}, draft_model=path, draft_options={"n_gpu_layers": 0})
    paceline.LLM(
        speculation=["ngram", {"name": "ngram", "size_n": 8}, paceline.NgramDrafter()], kv_overrides={"a.b": 3}
    )
    paceline.LLM(cancel=threading.Event(), progress=print, tensor_split=[1, 2.5], fit_target_bytes=[1 << 30])
    paceline.AsyncLLM(n_ctx=None, isolation="process", instruments=["module:Counter"])
    paceline.LLM(["a-00001-of-00002.gguf", path])
    paceline.estimate_memory("a.gguf", n_ctx=1024, type_k="q8_0")


class Animal(BaseModel):
    name: str


class Place(TypedDict):
    name: str


def multiply(a: int, b: int) -> int:
    return a * b


def replies(llm: paceline.LLM, maybe: type[Animal] | None, kind: Literal["auto", "none"]) -> None:
    texts = [{"role": "user", "content": "Hello!"}]
    objects: list[dict[str, object]] = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    openai: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello!"}]
    said: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello!"}
    assert_type(llm.chat(objects), paceline.ChatReply[None])
    assert_type(llm.chat(openai), paceline.ChatReply[None])
    assert_type(llm.chat([said]), paceline.ChatReply[None])
    assert_type(llm.chat([openai, openai]), list[paceline.ChatReply[None]])
    assert_type(llm.chat(texts, response_model=Animal).parsed, Animal)
    assert_type(llm.chat(texts, response_model=Animal | None).parsed, Animal | None)
    assert_type(llm.chat(texts, response_model=Animal, max_retries=3, schema_in_prompt=False).attempts, int)
    assert_type(llm.chat(texts, max_retries=None, schema_in_prompt=None).total_usage, paceline.Usage)
    assert_type(llm.chat(texts, response_model=Animal | Place).parsed, Animal | Place)
    assert_type(llm.chat(texts, response_model=list[Animal]).parsed, list[Animal])
    assert_type(llm.chat(texts, response_model=Literal["yes", "no"]).parsed, Literal["yes", "no"])
    assert_type(llm.chat(texts, response_model=Annotated[int, Field(ge=1)]).parsed, int)
    assert_type(llm.chat([texts], response_model=Animal | None)[0].parsed, Animal | None)
    llm.chat(texts, response_model=maybe)
    llm.chat(texts, tools=[multiply, {"type": "function", "function": {"name": "f"}}], tool_choice=multiply)
    llm.chat(texts, tools=None, tool_choice="auto", run_tools=True, max_tool_rounds=3, reasoning_format=kind)
    llm.chat(texts, response_format={"type": "json_object"}, chat_template_kwargs={"enable_thinking": False})
    talk = paceline.Conversation(llm, "Be brief.", tools=[multiply], temperature=0.2)
    talk.say("Hello!", response_model=Animal, max_tokens=5)
    talk.stream("Hello!", interval=4)


class First:
    """A strategy is any object with this method."""

    def plan(self, view: paceline.SchedulerView, budget: int) -> Sequence[paceline.TokenAllocation]:
        first = view.sequences[0]
        return [paceline.TokenAllocation(first.key, min(budget, first.limit))]


class Counter(paceline.Instrument):
    """An instrument overrides the hooks that it needs."""

    ended = 0

    def request_ended(self, record: paceline.EndRecord) -> None:
        self.ended += 1


def own_parts() -> paceline.LLM:
    strategy: paceline.BatchStrategy = First()
    return paceline.LLM("model.gguf", strategy=strategy, instruments=(Counter(),))
