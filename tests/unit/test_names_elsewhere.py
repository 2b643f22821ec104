"""Options of other packages: the guides for their users agree with paceline's options, and errors name paceline's option."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import paceline
from paceline import LLM, AsyncLLM, Completion, FinishReason, SamplingParams, Usage
from paceline.chat import ParsedMessage
from paceline.chat.chat_completion import ChatChoice
from paceline.chat_client.chat_arguments import CHAT_NAMES, chat_arguments
from paceline.engine.arguments import METHODS_ELSEWHERE, engine_arguments, request_arguments
from paceline.errors import InvalidType
from paceline.params import FIELDS
from paceline.request import OPTION_NAMES
from paceline.streaming.chunk import Choice


def completion() -> Completion:
    """A completion without a text."""
    choice = Choice(index=0, text="", token_ids=(), finish_reason=FinishReason.STOP)
    return Completion(choices=(choice,), prompt_token_ids=(), usage=Usage())


def reply() -> paceline.ChatReply[Any]:
    """An empty reply."""
    choice = ChatChoice(index=0, message=ParsedMessage(), text="", token_ids=(), finish_reason=FinishReason.STOP)
    return paceline.ChatReply(choices=(choice,), prompt_token_ids=(), usage=Usage(), messages=[])


GUIDES = Path(__file__).parents[2] / "docs" / "guide"
PAGES = ("from_llama_cpp_python", "from_ollama", "from_vllm")
OF_CONSTRUCTOR = {"model", "chat_template", "offline", "hf_token"}
OF_CALL = {"params", "progress", "suffix"}


def rows(section: str) -> list[tuple[str, str]]:
    """Each name of a section's tables on all pages, with the other cells."""
    found = []
    for page in PAGES:
        text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
        table = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        for first, second in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE):
            found += [(name, second) for name in re.findall(r"`(\w+)`", first)]
    assert len(found) > 40
    return found


def check(name: str, beside: str, error: str | None, known: bool) -> None:
    """A name that is the same here is accepted; the error of another one names an option that stands beside it."""
    assert known == (beside == "the same"), (name, beside, error)
    if known:
        return
    assert error is not None
    hint = error.partition("; ")[2]
    assert "there are" not in hint, error
    options = re.findall(r"`([\w.]+)", beside)
    assert not options or any(option.rpartition(".")[2] in hint for option in options), (beside, error)


@pytest.mark.parametrize(("name", "beside"), rows("Options of the engine"))
def test_a_page_says_how_an_option_of_the_engine_is_named(name: str, beside: str) -> None:
    """As `LLM` does."""
    error = None
    try:
        engine_arguments({name: None})
        known = True
    except InvalidType as refused:
        error = str(refused)
        known = "unknown option" not in error
    except ValueError:
        known = True
    known = known or name in OF_CONSTRUCTOR
    check(name, beside, error, known)


@pytest.mark.parametrize(("name", "beside"), rows("Options of a request"))
def test_a_page_says_how_an_option_of_a_request_is_named(name: str, beside: str) -> None:
    """As `generate` and `chat` do."""
    known = name in {*FIELDS, *OPTION_NAMES, *CHAT_NAMES, *OF_CALL}
    error = None
    if not known:
        with pytest.raises(InvalidType) as refused:
            request_arguments(SamplingParams(), None, {name: 1})
        error = str(refused.value)
        with pytest.raises(InvalidType) as in_chat:
            chat_arguments(SamplingParams(), None, {name: 1}, is_streamed=False)
        assert str(in_chat.value) == error
    check(name, beside, error, known)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("max_model_len", "did you mean 'n_ctx'?"),
        ("max_model_length", "did you mean 'n_ctx'?"),
        ("n_ctxx", "did you mean 'n_ctx'?"),
        ("temperature", "it is an option of a request: llm.generate(prompt, temperature=...)"),
        ("format", "it is an option of a request: llm.generate(prompt, json_schema=...)"),
        ("tools", "it is an option of a chat: llm.chat(messages, tools=...)"),
        ("max_new_tokens", "it is an option of a request: llm.generate(prompt, max_tokens=...)"),
        ("stream", "call llm.stream_chat(messages) in a chat, or llm.stream(prompt)"),
        ("dtype", "a GGUF file has its types already; type_k and type_v are those of the KV cache"),
    ],
)
def test_an_engine_names_the_option_that_is_meant(option: str, hint: str) -> None:
    """Of another package, misspelled, or of a request."""
    with pytest.raises(TypeError) as refused:
        LLM(**{option: 1})
    assert str(refused.value) == f"unknown option {option!r}; {hint}"


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("temprature", "did you mean 'temperature'?"),
        ("n_ctx", "it is an option of the engine: LLM(model, n_ctx=...)"),
        ("response_model", "it is an option of a chat: llm.chat(messages, response_model=...)"),
        ("options", "every option is a keyword of its own: temperature=0.2"),
        ("max_model_len", "it is an option of the engine: LLM(model, n_ctx=...)"),
        ("verbose", "the loggers paceline.llama and paceline.engine say more at the level DEBUG"),
        ("stream", "call llm.stream_chat(messages) in a chat, or llm.stream(prompt)"),
    ],
)
def test_a_request_names_the_option_that_is_meant(option: str, hint: str) -> None:
    """Of another package, misspelled, or of the engine."""
    with pytest.raises(TypeError) as refused:
        request_arguments(SamplingParams(), None, {option: 1})
    assert str(refused.value) == f"unknown option {option!r}; {hint}"


def test_a_request_names_the_chat_for_each_option_of_chats() -> None:
    """All of them."""
    for option in CHAT_NAMES:
        with pytest.raises(TypeError, match=f"'{option}'; it is an option of a chat: "):
            request_arguments(SamplingParams(), None, {option: 1})


@pytest.mark.parametrize("name", sorted(CHAT_NAMES))
def test_a_request_names_each_option_of_chats(name: str) -> None:
    """A table of the engine repeats their names, since chats are built on engines."""
    with pytest.raises(TypeError, match=f"it is an option of a chat: llm.chat\\(messages, {name}="):
        request_arguments(SamplingParams(), None, {name: 1})


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "required": ["a"]}])
def test_json_object_takes_a_schema(schema: dict[str, object]) -> None:
    """As llama-cpp-python and llama-server take it."""
    format_ = {"type": "json_object", "schema": schema}
    found = chat_arguments(SamplingParams(), None, {"response_format": format_}, is_streamed=False)
    assert found.params.json_schema == SamplingParams(json_schema=schema).json_schema


@pytest.mark.parametrize(
    ("owner", "name", "hint"),
    [
        (LLM.__new__(LLM), "create_chat_completion", "chat(messages), or stream_chat(messages)"),
        (AsyncLLM.__new__(AsyncLLM), "tokenize", "tokenizer.encode(text)"),
        (completion(), "outputs", "text, or choices if n > 1"),
        (reply(), "outputs", "content, or choices if n > 1"),
        (reply(), "text", "content"),
    ],
)
def test_an_attribute_of_other_packages_has_a_hint(owner: Any, name: str, hint: str) -> None:
    """It stays an AttributeError, so that `hasattr` is False."""
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError) as refused:
        getattr(owner, name)
    assert str(refused.value) == f"{type(owner).__name__!r} object has no attribute {name!r}; use {hint}"
    with pytest.raises(AttributeError) as unknown:
        _ = owner.nonsense
    assert str(unknown.value) == f"{type(owner).__name__!r} object has no attribute 'nonsense'"


def test_records_with_hints_can_be_copied_and_pickled() -> None:
    """A copy is equal."""
    for record in (completion(), reply()):
        assert copy.deepcopy(record) == copy.copy(record) == pickle.loads(pickle.dumps(record)) == record


def test_a_name_of_other_packages_has_a_hint() -> None:
    """As an attribute of the package."""
    assert not hasattr(paceline, "Llama")
    with pytest.raises(AttributeError, match=r"^module 'paceline' has no attribute 'AsyncLLMEngine'; use AsyncLLM$"):
        _ = paceline.AsyncLLMEngine


def test_hints_name_attributes_that_exist() -> None:
    """The first word of each."""
    for hint in METHODS_ELSEWHERE.values():
        assert hint.startswith("the option ") or hasattr(LLM, re.split(r"\W", hint)[0]), hint


def test_encoded_results_have_their_fields_only() -> None:
    """The names of other packages belong to the class; msgspec encodes every annotated name of a dataclass."""
    for result in (completion(), reply()):
        assert set(msgspec.to_builtins(result)) == {field.name for field in dataclasses.fields(result)}
