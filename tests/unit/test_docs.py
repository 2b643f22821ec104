"""The documentation is complete: every page is in the navigation, every public name in the API reference."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.wrap_markdown import wrapped

import paceline
import paceline.chat
import paceline.cluster
import paceline.engine
import paceline.testing
from paceline.config import EngineConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {"metrics.md", "prometheus.md"}
DECISION = re.compile(r"adr/\d{4}-")


def pages() -> dict[str, str]:
    return {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs.yml names each page once; of the decisions their index."""
    _, _, navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    named = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(named) == sorted(name for name in pages() if not DECISION.match(name))


def test_every_decision_is_in_the_index() -> None:
    """docs/adr/README.md links each record, under the record's own title."""
    index = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    linked = dict(re.findall(r"\| \[\d{4}\]\((\d{4}-[\w-]+\.md)\) \| (.+) \|", index))
    titles = {
        page.removeprefix("adr/"): text.partition("\n")[0].removeprefix(f"# {page[4:8]}: ")
        for page, text in pages().items()
        if DECISION.match(page)
    }
    assert linked == titles


def test_every_public_name_is_in_the_reference() -> None:
    """Each public name of the package and of its rooms is documented exactly once."""
    documented = [
        name
        for page, text in pages().items()
        if page.startswith("reference/")
        for name in re.findall(
            r"^::: paceline\.((?:(?:chat|cluster|engine|testing)\.)?[A-Za-z_]+)$", text, re.MULTILINE
        )
        if name != "errors"
    ]
    in_one_place = {
        var.__name__ for var in vars(paceline.errors).values() if isinstance(var, type)
    }  # ::: paceline.errors
    public = {name for name in paceline.__all__ if name not in in_one_place or name in documented} - {"__version__"}
    chat = [f"chat.{name}" for name in paceline.chat.__all__]
    cluster = [f"cluster.{name}" for name in paceline.cluster.__all__]
    engine = [f"engine.{name}" for name in paceline.engine.__all__]
    testing = [f"testing.{name}" for name in paceline.testing.__all__]
    assert sorted(documented) == sorted([*public, *chat, *cluster, *engine, *testing])


def test_prose_is_wrapped() -> None:
    """tools/wrap_markdown.py would change nothing, at 100 columns."""
    texts = {name: text for name, text in pages().items() if name not in GENERATED}
    texts["../README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name, text in texts.items() if wrapped(text) != text] == []


@pytest.mark.parametrize("record", [paceline.SamplingParams, paceline.Choice, paceline.Completion, paceline.Score])
def test_every_field_of_a_record_is_documented(record: type) -> None:
    """Its docstring has an entry for each, in the section that the reference makes a table of."""
    attributes = (record.__doc__ or "").partition("    Attributes:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^        (\w+): \S", attributes, re.MULTILINE)
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(record))


def test_a_guide_begins_with_an_example() -> None:
    """The first code block comes before the second heading."""
    without = [
        page
        for page, text in pages().items()
        if page.startswith("guide/") and page != "guide/flags.md" and "```" not in text.partition("\n## ")[0]
    ]
    assert without == []


FRONT_DOOR = (
    paceline.LLM, paceline.AsyncLLM, paceline.Stream, paceline.AsyncStream, paceline.StreamChannel, paceline.ChatStream,
    paceline.AsyncChatStream, paceline.Conversation, paceline.AsyncConversation, paceline.BatchStream,
    paceline.AsyncBatchStream,
)  # fmt: skip
RECORDS = (
    paceline.Choice, paceline.Completion, EngineConfig, paceline.RequestOptions, paceline.SamplingParams, paceline.Score,
    paceline.StreamChunk, paceline.Usage,
)  # fmt: skip


def sections(docstring: str | None) -> dict[str, str]:
    """The sections of a docstring in Google's style, by heading."""
    parts = re.split(r"^(Args|Attributes|Raises|Returns):$", inspect.cleandoc(docstring or ""), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(method: Callable[..., object]) -> list[str]:
    """The names of a method's parameters but self, as written: `**options`, while `help` shows each option."""
    written = inspect.getargs(method.__code__)  # type: ignore[attr-defined]
    variadic = [name for name in (written.varargs, written.varkw) if name]
    return [name for name in (*written.args, *variadic) if name != "self"]


def documenting(method: Callable[..., object]) -> Callable[..., object]:
    """The method whose docstring has the arguments and results: this method, or the blocking method that it follows."""
    named = re.search(r" as `(LLM|Conversation)\.(\w+)` does", (method.__doc__ or "").partition("\n")[0])
    if named is None or "Args" in sections(method.__doc__):
        return method
    other: Callable[..., object] = getattr(getattr(paceline, named[1]), named[2])
    assert [name for name in parameters(other) if name != "progress"] == parameters(method)
    return other


@pytest.mark.parametrize("owner", FRONT_DOOR, ids=lambda owner: owner.__name__)
def test_public_methods_document_their_parameters_and_results(owner: type) -> None:
    """Each parameter has an entry under Args, and each method with parameters that returns something has Returns."""
    methods = [
        method
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if name == "__init__" or not name.startswith("_")
    ]
    assert len(methods) >= 5
    for method in map(documenting, methods):
        found = sections(method.__doc__)
        documented = re.findall(r"^    \*{0,2}(\w+):", found.get("Args", ""), re.MULTILINE)
        assert documented == parameters(method), method.__qualname__
        returns = inspect.signature(method).return_annotation
        is_documented = "Returns" in found or not documented or returns == "None" or method.__name__ == "__init__"
        assert is_documented, method.__qualname__


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_public_records_document_their_fields(record: Any) -> None:
    """Each field has an entry under Attributes."""
    names = getattr(record, "__struct_fields__", None) or [field.name for field in dataclasses.fields(record)]
    documented = re.findall(r"^    (\w+):", sections(record.__doc__).get("Attributes", ""), re.MULTILINE)
    assert sorted(documented) == sorted(names)


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM", "Stream", "AsyncStream", "ChatStream", "AsyncChatStream",
                                  "Conversation", "AsyncConversation"])  # fmt: skip
def test_the_reference_shows_methods_of_bases(name: str) -> None:
    """A method of a base that has no entry of its own is in the entry of the class, or users would not find it."""
    entry = re.compile(rf"^::: paceline\.{name}\n(?:    options:\n      inherited_members: (.*)\n)?", re.MULTILINE)
    (found,) = (match for page in pages().values() for match in entry.finditer(page))
    listed = re.findall(r"\w+", found[1] or "")
    kind = getattr(paceline, name)
    inherited = {member for base in kind.__mro__[1:-1] for member in vars(base) if not member.startswith("_")}
    assert listed == ["true"] or inherited - vars(kind).keys() <= set(listed)
