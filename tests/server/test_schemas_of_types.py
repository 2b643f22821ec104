"""Schemas that pydantic writes for types of Python, in every API that takes schemas."""

from __future__ import annotations

import enum
import json
from datetime import date
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from tests.server.openai_world import OpenAIServer

pytestmark = pytest.mark.native

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
Digit = Annotated[int, pydantic.Field(ge=0, le=9)]


class Kind(enum.Enum):
    FOX = "fox"
    OWL = "owl"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Digit


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    loud: bool


class Sight(pydantic.BaseModel):
    id: pydantic.UUID4
    day: date
    counts: dict[Kind, Digit]
    tags: set[Literal["red", "big"]] = pydantic.Field(max_length=2)
    rare: frozenset[Kind] = pydantic.Field(max_length=1)
    shares: dict[Literal["a", "b"], Annotated[float, pydantic.Field(ge=0, le=1)]]
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    site: Annotated[str, pydantic.Field(max_length=20, json_schema_extra={"format": "uri-reference"})]


SCHEMA = Sight.model_json_schema()
UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}
BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "openai-chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}},
        },
        "response_format",
    ),
    "openai-completions": ("/v1/completions", {"prompt": "A fox", "json_schema": UNIQUE}, "json_schema"),
    "vllm": ("/v1/completions", {"prompt": "A fox", "structured_outputs": {"json": UNIQUE}}, "structured_outputs"),
    "responses": (
        "/v1/responses",
        {"input": MESSAGES, "text": {"format": {"type": "json_schema", "name": "x", "schema": UNIQUE}}},
        "text",
    ),
    "anthropic": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 40,
            "output_config": {"format": {"type": "json_schema", "schema": UNIQUE}},
        },
        "output_config.format",
    ),
    "ollama": ("/api/chat", {"messages": MESSAGES, "stream": False, "format": UNIQUE}, "format"),
    "llama-server": ("/completion", {"prompt": "A fox", "n_predict": 40, "json_schema": UNIQUE}, "json_schema"),
}


@pytest.mark.parametrize("seed", range(3))
def test_openais_client_parses_types_of_every_kind(world: OpenAIServer, seed: int) -> None:
    """The package's own `parse`, which validates the reply; the format that is not enforced is named."""
    with world.openai() as client:
        completion = client.chat.completions.parse(
            model="tale",
            messages=MESSAGES,
            response_format=Sight,
            seed=seed,
            max_completion_tokens=400,
            reasoning_effort="none",
        )
    sight = completion.choices[0].message.parsed
    assert isinstance(sight, Sight)
    assert isinstance(sight.pet, (Cat, Dog))
    warnings = (completion.model_extra or {})["warnings"]
    assert [warning.partition(" is left out")[0] for warning in warnings if "left out" in warning] == [
        "response_format: #/properties/tags/uniqueItems",
        "response_format: #/properties/site/format",
    ]


@pytest.mark.parametrize("dialect", BODIES)
def test_items_that_have_to_be_unique_are_a_warning(world: OpenAIServer, dialect: str) -> None:
    """The rest of the schema holds."""
    path, body, field = BODIES[dialect]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post(path, json={"model": "tale", **body})
    assert response.status_code == 200, response.text
    found = response.json()
    (warning,) = [warning for warning in found["warnings"] if "left out" in warning]
    assert warning.startswith(f"{field}: #/uniqueItems is left out: ")


def replaced(value: Any) -> Any:
    """Return a body with the schema of `Sight`, and with enough tokens for its JSON."""
    if value == UNIQUE:
        return SCHEMA
    if isinstance(value, dict):
        return {name: 800 if child == 40 else replaced(child) for name, child in value.items()}
    return value


@pytest.mark.parametrize("dialect", BODIES)
def test_types_of_every_kind_are_enforced_in_every_dialect(world: OpenAIServer, dialect: str) -> None:
    """Discriminated alternatives, sets, keys of an enum and of a Literal, UUIDs of version 4: pydantic reads the reply."""
    path, body, _ = BODIES[dialect]
    wanted = {"model": "tale", "seed": 3, "max_tokens": 800, **replaced(body)}
    if dialect == "responses":
        wanted = {"model": "tale", **replaced(body)}
    with httpx.Client(base_url=world.url, timeout=120) as client:
        response = client.post(path, json=wanted)
    assert response.status_code == 200, response.text
    found = response.json()
    if "choices" in found:
        choice = found["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    elif "output" in found:
        text = next(item for item in found["output"] if item["type"] == "message")["content"][0]["text"]
    elif "message" in found:
        text = found["message"]["content"]
    else:
        content = found["content"]
        text = content if isinstance(content, str) else next(part for part in content if part["type"] == "text")["text"]
    sight = Sight.model_validate_json(text)
    assert sight.id.version == 4
    assert set(sight.shares) <= {"a", "b"}


def test_what_is_written_with_other_keywords_has_no_warning(world: OpenAIServer) -> None:
    """Names of an enum, alternatives that a constant tells apart."""
    schema = {
        **SCHEMA,
        "properties": {name: SCHEMA["properties"][name] for name in ("counts", "pet")},
        "required": ["pet"],
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with world.openai() as client:
        completion = client.chat.completions.create(
            model="tale", messages=MESSAGES, response_format=wanted, max_completion_tokens=300, reasoning_effort="none"
        )
    assert not [warning for warning in (completion.model_extra or {}).get("warnings", []) if "left out" in warning]
    found = json.loads(completion.choices[0].message.content or "")
    assert set(found.get("counts", {})) <= {"fox", "owl"}
    assert found["pet"]["kind"] in ("cat", "dog")


@pytest.mark.parametrize("keyword", [{"contains": {}}, {"not": {}}, {"uniqueItem": True}])
def test_other_keywords_are_refused(world: OpenAIServer, keyword: dict[str, Any]) -> None:
    """With their place, also beside keywords that are left out."""
    schema = {"type": "object", "properties": {"a": {**UNIQUE, **keyword}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with world.openai() as client, pytest.raises(openai.BadRequestError, match=f"#/properties/a/{next(iter(keyword))}"):
        client.chat.completions.create(model="tale", messages=MESSAGES, response_format=wanted)


def test_there_are_at_most_ten_warnings_and_their_number(world: OpenAIServer) -> None:
    """For schemas with many keywords that are left out."""
    schema = {
        "type": "array",
        "items": {"anyOf": [{**UNIQUE, "minItems": number} for number in range(3)] * 5},
        "maxItems": 1,
    }
    with httpx.Client(base_url=world.url, timeout=60) as client:
        found = client.post("/v1/completions", json={"model": "tale", "prompt": "A fox", "json_schema": schema}).json()
    warnings = [warning for warning in found["warnings"] if "left out" in warning]
    assert len(warnings) == 11
    assert warnings[-1] == "json_schema: 5 more keywords are left out"


COMPACT: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (
        "/v1/completions",
        {"prompt": "A fox", "structured_outputs": {"json": SCHEMA["$defs"]["Cat"], "disable_any_whitespace": True}},
    ),
    "beside response_format": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "reasoning_effort": "none",
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA["$defs"]["Cat"]}},
            "structured_outputs": {"disable_any_whitespace": True},
        },
    ),
    "its own field": (
        "/v1/completions",
        {"prompt": "A fox", "json_schema": SCHEMA["$defs"]["Cat"], "disable_any_whitespace": True},
    ),
    "llama-server": (
        "/completion",
        {"prompt": "A fox", "n_predict": 60, "json_schema": SCHEMA["$defs"]["Cat"], "disable_any_whitespace": True},
    ),
}


@pytest.mark.parametrize("spelling", COMPACT)
def test_json_is_compact_where_that_is_asked_for(world: OpenAIServer, spelling: str) -> None:
    """Without a blank in it, whatever the seed."""
    path, body = COMPACT[spelling]
    with httpx.Client(base_url=world.url, timeout=60) as client:
        for seed in range(3):
            response = client.post(
                path, json={"model": "tale", "max_tokens": 60, "seed": seed, "temperature": 1.5, **body}
            )
            assert response.status_code == 200, response.text
            found = response.json()
            choice = found["choices"][0] if "choices" in found else {"text": found["content"]}
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            assert json.dumps(json.loads(text), separators=(",", ":")) == text


def test_a_value_of_the_wrong_type_is_refused(world: OpenAIServer) -> None:
    """By the name of its member."""
    body = {"model": "tale", "prompt": "A", "structured_outputs": {"json": True, "disable_any_whitespace": "yes"}}
    with httpx.Client(base_url=world.url, timeout=60) as client:
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "structured_outputs.disable_any_whitespace" in response.json()["error"]["message"]
