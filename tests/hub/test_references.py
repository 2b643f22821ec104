"""Names of models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidParams, InvalidType
from paceline.hub.references import (
    HubReference,
    OllamaReference,
    UrlReference,
    hub_settings,
    is_reference,
    parse_hub_reference,
    parse_reference,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:user/repo", HubReference("user/repo")),
        ("HF:user/repo", HubReference("user/repo")),
        ("hf://user/repo", HubReference("user/repo")),
        ("hf:user/Repo-GGUF:Q4_K_M", HubReference("user/Repo-GGUF", "Q4_K_M")),
        ("hf:user/repo:UD-IQ2_M", HubReference("user/repo", "UD-IQ2_M")),
        ("hf:user/repo@v1.2:Q8_0", HubReference("user/repo", "Q8_0", revision="v1.2")),
        ("hf:user/repo@refs/pr/3", HubReference("user/repo", revision="refs/pr/3")),
        ("hf:user/repo/tiny.gguf", HubReference("user/repo", file="tiny.gguf")),
        ("hf:user/repo@main/Q4/tiny.gguf", HubReference("user/repo", file="Q4/tiny.gguf", revision="main")),
        ("https://huggingface.co/user/repo", HubReference("user/repo")),
        ("https://hf.co/user/repo/blob/main/a%20b.gguf", HubReference("user/repo", file="a b.gguf", revision="main")),
        ("https://huggingface.co/user/repo/resolve/v1/x/a.gguf?download=true",
         HubReference("user/repo", file="x/a.gguf", revision="v1")),
        ("https://huggingface.co/user/repo/tree/dev", HubReference("user/repo", revision="dev")),
        ("http://example.com/a.gguf", UrlReference("http://example.com/a.gguf")),
        ("ollama:llama3.2:1b", OllamaReference("llama3.2:1b")),
    ],
)  # fmt: skip
def test_a_reference_is_parsed(text: str, expected: object) -> None:
    """Each form gives its record."""
    assert is_reference(text)
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "hf:", "hf:repo", "hf:user/", "hf:/repo", "hf:user/repo:", "hf:user/repo:Q4/x", "hf:user/repo/x.bin", "hf:us er/repo",
        "hf:user/repo/../x.gguf", "hf:../repo", "hf:user/..", "hf:user/re--po", "hf:user/repo@:Q4", "hf:user/repo//a.gguf",
        "hf:-user/repo", "ollama:", "http://", "http:///a.gguf", "http://host/", "http://host:x/a.gguf", "hf:user/repo\n",
        "hf:us\u00e9r/repo",
    ],
)  # fmt: skip
def test_invalid_reference_is_refused(text: str) -> None:
    """The message names the option and the value."""
    with pytest.raises(InvalidParams, match="--hf-repo"):
        parse_reference(text, name="--hf-repo")


@given(st.sampled_from(["hf:", "http://", "https://huggingface.co/", "ollama:"]), st.text(max_size=40))
def test_any_text_is_a_reference_or_refused(scheme: str, rest: str) -> None:
    """And a parsed name is written in the form of its meaning."""
    try:
        found = parse_reference(scheme + rest)
    except InvalidParams:
        return
    if isinstance(found, HubReference):
        assert parse_hub_reference(str(found)) == found


@pytest.mark.parametrize("path", ["model.gguf", "user/repo", "./hf/x.gguf", "C:/x.gguf", None, 3])
def test_a_path_is_no_reference(path: object) -> None:
    """Only texts with a scheme are names."""
    assert not is_reference(path)


def test_a_bare_repository_can_be_parsed_where_it_is_asked_for() -> None:
    """As -hf and `paceline pull` take it; with the scheme as well."""
    assert parse_hub_reference("user/repo:Q4_0") == parse_hub_reference("hf:user/repo:Q4_0")


def test_a_reference_shows_no_secrets() -> None:
    """User, password and query of a URL stay out of messages."""
    shown = str(UrlReference("https://me:secret@example.com/a.gguf?signature=x#y"))
    assert shown == "https://example.com/a.gguf"


def test_settings_follow_the_variables_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub's, llama.cpp's and Ollama's; an argument comes first."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    plain = hub_settings()
    assert str(plain.cache) == "/h/.cache/huggingface/hub"
    assert plain.endpoint == "https://huggingface.co"
    assert str(plain.ollama) == "/h/.ollama/models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(hub_settings().cache) == "/x/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "/hf")
    assert str(hub_settings().cache) == "/hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    monkeypatch.setenv("HF_TOKEN", "one")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LLAMA_CACHE", "/l")
    found = hub_settings(token="two")
    assert (str(found.cache), found.endpoint, found.token, found.offline) == ("/c", "http://mirror", "two", True)
    assert found.repository_caches == (found.cache, found.llama_cache)


@pytest.mark.parametrize("wrong", [{"token": 3}, {"offline": "yes"}])
def test_settings_of_the_wrong_type_are_refused(wrong: dict[str, object]) -> None:
    """A token is text, offline a bool."""
    with pytest.raises(InvalidType):
        hub_settings(**wrong)  # type: ignore[arg-type]
