"""POST /tokenize, /detokenize, /apply-template, GET /props and /lora-adapters over the demo model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.server.running import RunningServer

pytestmark = pytest.mark.native

TEXT = "What is the capital of France ?"


def tokens(client: httpx.Client, content: Any, **fields: Any) -> list[Any]:
    """Return the tokens of a text."""
    response = client.post("/tokenize", json={"content": content, **fields})
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["tokens"]
    return found


def test_text_becomes_tokens_and_tokens_become_text(client: httpx.Client, server: RunningServer) -> None:
    """As the model's own tokenizer does it, without special tokens unless they are asked for."""
    found = tokens(client, TEXT)
    assert found == server.engine.tokenizer.encode(TEXT, add_special=False)
    assert client.post("/detokenize", json={"tokens": found}).json() == {"content": TEXT, "prompt": TEXT}
    assert tokens(client, TEXT, add_special=True) == server.engine.tokenizer.encode(TEXT)


def test_control_tokens_are_parsed_unless_they_are_text(client: httpx.Client) -> None:
    """parse_special is on, as in llama-server."""
    assert len(tokens(client, "<|im_end|>")) == 1
    assert len(tokens(client, "<|im_end|>", parse_special=False)) > 1


def test_pieces_are_text_or_bytes(client: httpx.Client) -> None:
    """A part of a letter is a list of bytes."""
    text = "unicode 媽 and emoji 🤗"
    pieces = [token["piece"] for token in tokens(client, text, with_pieces=True)]
    assert any(isinstance(piece, list) for piece in pieces)
    assert b"".join(bytes(piece) if isinstance(piece, list) else piece.encode() for piece in pieces).decode() == text


def test_mixed_content_is_joined(client: httpx.Client) -> None:
    """Ids are not changed."""
    assert tokens(client, [5, TEXT, 6]) == [5, *tokens(client, TEXT), 6]


def test_nothing_is_nothing(client: httpx.Client) -> None:
    """Without content there are no tokens, and no text without tokens."""
    assert client.post("/tokenize", json={}).json() == {"tokens": []}
    assert client.post("/detokenize", json={}).json() == {"content": "", "prompt": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"content": {"a": 1}}),
        ("/tokenize", {"content": "a", "add_special": 1}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [True]}),
    ],
)
def test_what_is_neither_is_refused(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """In llama-server's shape."""
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_text_with_zero_bytes_and_of_any_length_is_taken(client: httpx.Client) -> None:
    """The tokens give the text back."""
    text = "a\0b" + "x" * 100_000
    assert client.post("/detokenize", json={"tokens": tokens(client, text)}).json()["content"] == text


def test_a_prompt_is_tokenized_as_vllm_does(client: httpx.Client, server: RunningServer) -> None:
    """With special tokens unless they are off, and control tokens parsed; the ids are a completion's."""
    tokenizer, most = server.engine.tokenizer, server.engine.limits.max_positions
    ids = tokenizer.encode(TEXT)
    found = client.post("/tokenize", json={"prompt": TEXT, "model": "any"}).json()
    assert found == {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": None}
    plain = client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    assert plain["tokens"] == tokenizer.encode(TEXT, add_special=False)
    assert client.post("/detokenize", json={"tokens": plain["tokens"]}).json()["prompt"] == TEXT
    spelled = client.post("/tokenize", json={"prompt": "<|im_end|>", "return_token_strs": True}).json()
    assert spelled["token_strs"][-1] == "<|im_end|>"
    assert spelled["tokens"][-1] == tokenizer.eos
    assert client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []


def test_messages_are_tokenized_as_the_prompt_of_their_chat(client: httpx.Client) -> None:
    """Their number is the usage of a chat with the same messages."""
    messages = [{"role": "user", "content": TEXT + " <|im_end|>"}]
    found = client.post("/tokenize", json={"messages": messages}).json()
    chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert found["count"] == len(found["tokens"]) == chat["usage"]["prompt_tokens"]
    text = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == text


def test_only_one_of_content_prompt_and_messages_is_tokenized(client: httpx.Client) -> None:
    """Two of them have no meaning."""
    refused = client.post("/tokenize", json={"content": "a", "prompt": "b"})
    assert refused.status_code == 400
    assert "content and prompt exclude each other" in refused.json()["error"]["message"]
    assert client.post("/tokenize", json={"prompt": 5}).status_code == 400


def test_the_tokenizer_is_described_as_vllm_does(client: httpx.Client, server: RunningServer) -> None:
    """Its special tokens are texts that are tokenized to their ids; roles that the vocabulary lacks are null."""
    info, tokenizer = client.get("/tokenizer_info").json(), server.engine.tokenizer
    assert info["chat_template"] == server.engine.model.chat_template()
    assert (info["vocab_size"], info["model_max_length"]) == (tokenizer.n_vocab, server.engine.limits.max_positions)
    for role in ("bos", "eos"):
        body = {"prompt": info[f"{role}_token"], "add_special_tokens": False}
        assert client.post("/tokenize", json=body).json()["tokens"] == [tokenizer.special_tokens[role]]
    assert info["mask_token"] is None
    begins = client.post("/tokenize", json={"prompt": "a"}).json()["tokens"][0] == tokenizer.bos
    assert info["add_bos_token"] is begins


def test_unknown_fields_are_named(client: httpx.Client) -> None:
    """Everywhere."""
    for path in ("/tokenize", "/detokenize"):
        assert "foo" in client.post(path, json={"foo": 1}).json()["warnings"][0]


def test_props_say_what_runs(client: httpx.Client, server: RunningServer) -> None:
    """Paths are shown by the file's name alone."""
    props = client.get("/props").json()
    assert (props["total_slots"], props["model_path"], props["model_alias"]) == (
        4,
        "paceline-demo.gguf",
        "paceline-demo",
    )
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == server.engine.limits.max_positions
    assert (defaults["params"]["temperature"], defaults["params"]["n_predict"]) == (0.8, -1)
    assert props["chat_template"] == server.engine.model.chat_template()
    assert props["bos_token"]
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert client.post("/props", json={}).json() == {"success": True}


def test_without_adapters_the_list_is_empty(client: httpx.Client) -> None:
    """Scales for unknown adapters are reported as ignored."""
    assert client.get("/lora-adapters").json() == []
    response = client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]).json()
    assert response["success"] is True
    assert "adapter 0" in response["warnings"][0]
    assert client.post("/lora-adapters", json={"id": 0}).status_code == 400


def test_a_model_that_writes_neither_embeds_nor_reranks(client: httpx.Client) -> None:
    """Unless the server was started for it; llama-server's status and type."""
    for path, body in (
        ("/embedding", {"content": "x"}),
        ("/embeddings", {"input": "x"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
        ("/reranking", {"query": "x", "documents": ["y"]}),
    ):
        response = client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


def template(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    """Return the chat template's rendering of messages."""
    return client.post("/apply-template", json={"messages": list(messages), **fields})


USER = {"role": "user", "content": "What is today?"}


def test_messages_become_the_text_of_a_prompt(client: httpx.Client, server: RunningServer) -> None:
    """The prompt ends at the start of the assistant's message, unless the request disables it; nothing is generated."""
    system = {"role": "system", "content": "You are kind."}
    response = template(client, system, USER)
    assert response.status_code == 200, response.text
    prompt = response.json()["prompt"]
    assert prompt == server.call(server.service.chat_format).render([system, USER]).text
    assert "What is today?" in prompt
    without = template(client, system, USER, add_generation_prompt=False).json()["prompt"]
    assert prompt.startswith(without)
    assert len(without) < len(prompt)


def test_a_prompt_made_of_messages_can_be_completed(client: httpx.Client) -> None:
    """Its control tokens are parsed."""
    prompt = template(client, USER).json()["prompt"]
    response = client.post("/completion", json={"prompt": prompt, "n_predict": 4}).json()
    assert response["prompt"].endswith(prompt[-20:])
    assert response["tokens_evaluated"] < len(prompt)


@pytest.mark.parametrize(
    "messages",
    [None, [], "x", [5], [{}], [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": 1, "content": "a"}]],
)
def test_messages_that_are_none_are_refused(client: httpx.Client, messages: Any) -> None:
    """In llama-server's shape."""
    response = client.post("/apply-template", json={"messages": messages})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


TOOL = {
    "type": "function",
    "function": {"name": "look_up_the_date", "parameters": {"type": "object", "properties": {}}},
}


def test_a_prompt_shows_the_tools_of_a_conversation(client: httpx.Client) -> None:
    """Tools allowed by the choice; malformed tools are refused."""
    plain = template(client, USER).json()["prompt"]
    assert template(client, USER, tools=[]).json()["prompt"] == plain
    assert "look_up_the_date" in template(client, USER, tools=[TOOL], parallel_tool_calls=True).json()["prompt"]
    for wrong in ({"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": 5}):
        response = template(client, USER, **wrong)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


BEGUN = {"role": "assistant", "content": "Today is"}


def test_an_assistant_message_that_has_begun_is_where_the_prompt_ends(client: httpx.Client) -> None:
    """As llama-server has it; unless the request says that the message is whole."""
    begun = template(client, USER, BEGUN).json()["prompt"]
    assert begun.startswith(template(client, USER).json()["prompt"])
    assert begun.endswith("Today is")
    for fields in ({"continue_final_message": True}, {"continue_final_message": "content"}):
        assert template(client, USER, BEGUN, **fields).json()["prompt"] == begun
    whole = template(client, USER, BEGUN, continue_final_message=False, add_generation_prompt=False).json()["prompt"]
    assert whole.startswith(begun) and len(whole) > len(begun)
    assert template(client, USER, BEGUN, BEGUN).status_code == 400
    assert template(client, USER, BEGUN, continue_final_message="reasoning_content").status_code == 501
