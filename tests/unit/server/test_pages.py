"""The page of the API, made from arbitrary OpenAPI documents."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from paceline.server.pages import api_page


class Page(HTMLParser):
    """The contents of a page. links: targets of its links; ids: of its parts; texts: texts between the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name == "href" and value]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def document(schema: dict[str, Any] | None = None, **operation: Any) -> dict[str, Any]:
    return {
        "info": {"title": "paceline", "version": "1.2"},
        "paths": {"/a/{b}": {"post": {"summary": "Do it", "tags": ["Some things"], "responses": {}, **operation}}},
        "components": {"schemas": {"ABody": {"properties": {"field": schema or {}}}}},
    }


def test_operations_stand_under_their_tags_with_their_parameters_and_responses() -> None:
    """Its links lead to parts of the page, or to routes behind the prefix."""
    page = Page(
        api_page(
            document(
                description="With `stream` more.",
                parameters=[{"name": "b", "in": "path", "required": True, "schema": {"type": "string"}}],
                requestBody={"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ABody"}}}},
                responses={"200": {"description": "The response", "content": {"text/plain": {}}}},
            ),
            "/llm",
        )
    )
    assert set(page.links) == {"/llm/openapi.json", "/llm/", "#some-things", "#bodies", "#ABody"}
    assert {"some-things", "bodies", "ABody"} == set(page.ids)
    text = " ".join("".join(page.texts).split())
    for part in (
        "POST/a/{b}",
        "Do it",
        "With stream more.",
        "bstring, in the path, required",
        "200text/plainThe response",
    ):
        assert part in text
    assert page.texts.count("stream") == 1


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({}, "anything"),
        ({"type": "integer", "minimum": 0, "maximum": 9}, "integer (≥ 0, ≤ 9)"),
        ({"type": "number", "exclusiveMinimum": 0.5}, "number (> 0.5)"),
        ({"type": "string", "maxLength": 3}, "string (at most 3 characters)"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 4}, "list of string (at most 4)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "string"}]}, "string or null"),
        ({"enum": ["a", 1]}, '"a" or 1'),
        ({"const": True}, "true"),
        ({"type": "boolean", "default": False, "description": "Whether."}, "booleanWhether. Default: false"),
        ({"$ref": "#/components/schemas/Other"}, "Other"),
    ],
)  # fmt: skip
def test_types_are_shown_in_words(schema: dict[str, Any], shown: str) -> None:
    """With their bounds and defaults."""
    assert f"field{shown}" in "".join(Page(api_page(document(schema))).texts)


def test_fields_go_by_how_much_they_matter() -> None:
    """Required fields first, this server's own fields last."""
    given = document()
    given["components"]["schemas"]["ABody"] = {
        "properties": {"ours": {"description": "paceline's own"}, "second": {}, "first": {}},
        "required": ["first"],
    }
    texts = Page(api_page(given)).texts
    assert [text for text in texts if text in ("ours", "second", "first")] == ["first", "second", "ours"]


def test_text_of_a_document_is_escaped() -> None:
    """Tags in it do nothing."""
    bad = '<script>alert("x")</script>'
    given = document({"description": bad, "default": bad, "enum": [bad]}, summary=bad, description=bad, tags=[bad])
    given["info"]["title"] = bad
    page = Page(api_page(given, '/"><script>'))
    assert "script" not in page.tags
    assert "".join(page.texts).count(bad) >= 5
