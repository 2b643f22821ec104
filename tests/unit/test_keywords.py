"""The TypedDicts have the keywords that methods take, and signatures show them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.chat_client.chat_arguments import CHAT_NAMES, ChatKeywords, StreamChatKeywords, chat_arguments
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.engine.arguments import (
    GenerateKeywords,
    LLMKeywords,
    StreamKeywords,
    collected_arguments,
    embedding_options,
    engine_arguments,
    prefix_options,
    request_arguments,
    reranking_options,
)
from paceline.engine.worker.worker_process import worker_setup
from paceline.errors import InvalidParams
from paceline.keywords import (
    ContextKeywords,
    EmbedKeywords,
    EngineConfigKeywords,
    PrefixKeywords,
    RequestKeywords,
    RerankKeywords,
)
from paceline.params import FIELDS, SamplingKeywords, SamplingParams
from paceline.request import OPTION_NAMES, RequestOptions
from paceline.runtime.context_options import ContextOptions

REQUESTS: dict[str, Callable[..., Any]] = {
    "LLM.generate": paceline.LLM.generate,
    "LLM.stream": paceline.LLM.stream,
    "LLM.chat": paceline.LLM.chat,
    "LLM.stream_chat": paceline.LLM.stream_chat,
    "AsyncLLM.generate": paceline.AsyncLLM.generate,
    "AsyncLLM.stream": paceline.AsyncLLM.stream,
    "AsyncLLM.chat": paceline.AsyncLLM.chat,
    "AsyncLLM.stream_chat": paceline.AsyncLLM.stream_chat,
    "Conversation": paceline.Conversation,
    "Conversation.say": paceline.Conversation.say,
    "Conversation.stream": paceline.Conversation.stream,
    "Conversation.load": paceline.Conversation.load,
    "AsyncConversation": paceline.AsyncConversation,
    "AsyncConversation.say": paceline.AsyncConversation.say,
    "AsyncConversation.stream": paceline.AsyncConversation.stream,
    "AsyncConversation.load": paceline.AsyncConversation.load,
}
LOADS: dict[str, Callable[..., Any]] = {
    "LLM": paceline.LLM,
    "AsyncLLM": paceline.AsyncLLM,
    "estimate_memory": paceline.estimate_memory,
}
SMALL: dict[str, Callable[..., Any]] = {
    f"{kind.__name__}.{name}": getattr(kind, name)
    for kind in (paceline.LLM, paceline.AsyncLLM)
    for name in ("embed", "classify", "rerank", "save_prefix", "load_prefix")
}


def shown(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters that `help` and editors show, with their defaults."""
    return {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}


def test_each_typed_dict_has_the_options_of_its_record() -> None:
    """No option is missing, and none is left over."""
    assert SamplingKeywords.__annotations__.keys() == set(FIELDS)
    assert RequestKeywords.__annotations__.keys() == OPTION_NAMES
    assert EngineConfigKeywords.__annotations__.keys() == CONFIG_NAMES
    assert ContextKeywords.__annotations__.keys() == ContextOptions.names()


def is_known(name: str, sort: Callable[[dict[str, Any]], object]) -> bool:
    """Return whether a keyword is taken; its value may be wrong."""
    try:
        sort({name: object()})
    except InvalidParams as error:
        return not any(words in str(error) for words in ("unknown option", "has no effect", "truncate would cut"))
    return True


METHODS: list[tuple[Any, Callable[[dict[str, Any]], object]]] = [
    (GenerateKeywords, lambda options: collected_arguments(SamplingParams(), None, options)),
    (StreamKeywords, lambda options: request_arguments(SamplingParams(), None, options)),
    (ChatKeywords, lambda options: chat_arguments(SamplingParams(), None, options, is_streamed=False)),
    (StreamChatKeywords, lambda options: chat_arguments(SamplingParams(), None, options, is_streamed=True)),
    (LLMKeywords, engine_arguments),
    (EmbedKeywords, embedding_options),
    (RerankKeywords, reranking_options),
    (PrefixKeywords, prefix_options),
]


@pytest.mark.parametrize(("table", "sort"), METHODS)
def test_a_typed_dict_has_the_keywords_that_its_methods_take(table: Any, sort: Callable[[Any], object]) -> None:
    """A type checker takes exactly the keywords that the method takes when it runs."""
    everything = {*FIELDS, *OPTION_NAMES, *CHAT_NAMES, *CONFIG_NAMES, *LLMKeywords.__annotations__, "temprature"}
    assert {name for name in everything if is_known(name, sort)} == table.__annotations__.keys()


@pytest.mark.parametrize(("table", "sort"), METHODS)
def test_none_is_taken_for_every_keyword(table: Any, sort: Callable[[dict[str, Any]], object]) -> None:
    """The types allow None everywhere, and so do the checks."""
    assert len(table.__annotations__) > 3
    for name in table.__annotations__:
        sort({name: None})


def test_numbers_of_numpy_reach_a_worker() -> None:
    """The types allow them for every number, and messages to a worker carry plain numbers."""
    options = {"num_slots": np.int32(2), "rope_freq_base": np.float32(0.5), "tensor_split": [np.float32(1), np.int8(3)]}
    sent = worker_setup("model.gguf", {"isolation": "process", **options}).options
    assert sent == {"num_slots": 2, "rope_freq_base": 0.5, "tensor_split": [1.0, 3]}
    assert [type(sent[name]) for name in ("num_slots", "rope_freq_base")] == [int, float]
    assert [type(item) for item in sent["tensor_split"]] == [float, int]


@pytest.mark.parametrize("name", [*REQUESTS, *LOADS, *SMALL])
def test_a_signature_shows_each_keyword(name: str) -> None:
    """No method hides its keywords behind `**options`."""
    parameters = inspect.signature({**REQUESTS, **LOADS, **SMALL}[name]).parameters.values()
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters)
    assert len(parameters) > 5


@pytest.mark.parametrize("name", REQUESTS)
def test_defaults_of_requests_match_the_records(name: str) -> None:
    """The default that `help` shows for a keyword is the method's default; a chat has no limit on its length."""
    found = shown(REQUESTS[name])
    is_chat = "chat" in name or "Conversation" in name
    expected = {**defaults(SamplingParams()), **defaults(RequestOptions())}
    if is_chat:
        expected["max_tokens"] = None
    else:
        assert found["max_tokens"] == 256
    assert found["temperature"] == 0.8
    assert {item: expected[item] for item in expected if item in found} == {
        item: found[item] for item in found if item in expected
    }
    if is_chat:
        assert found["max_tool_rounds"] == 8
        assert found["context_overflow"] == "error"
        assert found["response_model"] is None


@pytest.mark.parametrize("name", LOADS)
def test_defaults_of_loading_match_the_records(name: str) -> None:
    """The value that `help` shows for an option of an engine is the default."""
    found = shown(LOADS[name])
    expected = {**defaults(EngineConfig()), **defaults(ContextOptions())}
    assert {item: found[item] for item in found if item in expected} == {
        item: expected[item] for item in expected if item in found
    }
    assert found["num_slots"] == 8
    assert found["load_mode"] == "auto"
    assert found["n_gpu_layers"] is None


def defaults(record: Any) -> dict[str, Any]:
    """Return the fields of a record that was made without arguments."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


@pytest.mark.parametrize("record", [SamplingParams, RequestOptions, EngineConfig])
def test_the_signature_of_a_record_shows_its_fields(record: type) -> None:
    """The constructor shows its options, with the defaults."""
    assert shown(record) == defaults(record())
    annotations = {parameter.name: parameter.annotation for parameter in inspect.signature(record).parameters.values()}
    assert set(annotations.values()) & {"int | None", "bool | None"} == {"int | None", "bool | None"}


def test_help_names_the_keywords_of_generate() -> None:
    """`help(LLM.generate)` and a notebook's tooltip begin with this text."""
    text = str(inspect.signature(paceline.LLM.generate))
    assert text.startswith("(self, prompt: 'str | TokenIds | Prompts | Segments', params: 'SamplingParams | ")
    assert "temperature: 'float | None' = 0.8" in text
    assert "timeout_s: 'float | None' = None" in text
    assert "interval" not in text  # concerns streams
