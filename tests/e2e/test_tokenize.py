"""`paceline tokenize` as a user runs it."""

from __future__ import annotations

import json

import pytest
from tests.e2e.commands import output

pytestmark = pytest.mark.native


def test_tokens_go_back_to_the_text() -> None:
    """Ids through a pipe give the text again, also if a character takes several tokens."""
    text = "The fox 🦊 says: «ça va?»\n\tDone."
    ids = output("tokenize", text, "--ids")
    assert output("tokenize", "--decode", "-", stdin=ids.encode()) == text + "\n"
    assert output("tokenize", "-", "--count", stdin=text.encode()) == f"{len(ids.split())}\n"
    assert output("tokenize", "--count", stdin=text.encode()) == f"{len(ids.split())}\n"
    assert output("tokenize", "a", "--pieces", stdin=b"b") == output("tokenize", "a", "--pieces")
    assert [line.split()[0] for line in output("tokenize", text).splitlines()] == ids.split()


def test_token_json_has_the_bytes() -> None:
    """The bytes of all tokens are the text's."""
    result = json.loads(output("tokenize", "é🦊", "--json"))
    assert bytes(byte for token in result["tokens"] for byte in token["bytes"]) == "é🦊".encode()
    assert result["ids"] == [token["id"] for token in result["tokens"]] and result["count"] == len(result["ids"])
