"""The web page over HTTP: at /, behind a prefix, with keys, and a page of links without a built page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.server import web_page
from paceline.server.settings import ApiKey
from paceline.server.web_page import NOT_BUILT, OFF, BuiltFile

KEY = {"api_keys": (ApiKey(secret="k"),)}


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page, whether one was built here or not."""
    files = {"index.html": b'<script type="module" src="./assets/a.js"></script>', "assets/a.js": b"let a;" * 400}
    made = {name: BuiltFile.of(name, content) for name, content in files.items()}
    monkeypatch.setattr(web_page, "built_files", lambda: made)


def test_the_page_and_its_files_need_no_key(worlds: Any) -> None:
    """It asks for one itself; everything else needs it."""
    client = worlds(KEY).client
    page = client.get("/")
    assert (page.status_code, "./assets/a.js" in page.text) == (200, True)
    script = client.get("/assets/a.js")
    assert (script.text, script.headers["content-encoding"]) == ("let a;" * 400, "gzip")
    assert client.head("/").headers["content-length"] == page.headers["content-length"]
    assert client.get("/index.html").text == page.text
    assert client.get("/", headers={"if-none-match": page.headers["etag"]}).status_code == 304
    for path in ("/assets/none.js", "/v1/models", "/assets/../v1/models", "/v1/engine/page"):
        assert client.get(path).status_code == 401, path
    assert client.post("/assets/a.js").status_code == 401


def test_other_routes_are_as_they_are_without_a_page(worlds: Any) -> None:
    """A wrong method is 405, an unknown path 404 in the shape of its API."""
    client = worlds().client
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.get("/nothing").json()["error"]["code"] == 404
    assert client.post("/assets/a.js").status_code == 404


def test_without_the_document_its_paths_match_the_page(worlds: Any, tmp_path: Path) -> None:
    """Paths that the page does not have are 404, without a key and for any method."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.html").write_text("of the page")
    client = worlds({"docs": False, "page_folder": tmp_path}).client
    assert client.get("/docs", follow_redirects=True).text == "of the page"
    assert [client.request(method, "/openapi.json").status_code for method in ("GET", "POST")] == [404, 404]
    assert worlds({"docs": False, **KEY}).client.get("/docs").status_code == 404


def test_a_prefix_gets_a_slash_so_that_relative_links_work(worlds: Any) -> None:
    """The page's files are behind it, and nowhere else."""
    client = worlds({"root_path": "/llm"}).client
    moved = client.get("/llm")
    assert (moved.status_code, moved.headers["location"]) == (308, "/llm/")
    assert client.get("/llm/").status_code == 200
    assert client.get("/llm/assets/a.js").status_code == 200
    assert client.get("/assets/a.js").status_code == 404


def test_where_anyone_could_use_the_page_there_are_links_and_a_sentence(worlds: Any) -> None:
    """No script, and none of the page's files."""
    client = worlds({"hosts": ("0.0.0.0",), "allowed_hosts": ("*",)}).client
    page = client.get("/")
    assert OFF.partition("(")[0].strip() in page.text
    assert "<script" not in page.text
    assert client.get("/assets/a.js").status_code == 404


def test_a_page_that_was_not_built_leaves_links_and_a_sentence(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is the same without it."""
    monkeypatch.setattr(web_page, "built_files", dict)
    page = worlds().client.get("/")
    assert NOT_BUILT in page.text
    assert 'href="/health"' in page.text


def test_a_folder_of_the_user_is_served_in_place_of_the_page(worlds: Any, tmp_path: Path) -> None:
    """In parts too, as for a film; the server's own routes win over its files."""
    (tmp_path / "index.html").write_text("mine")
    (tmp_path / "health").write_text("not this")
    client: httpx.Client = worlds({"page_folder": tmp_path}).client
    assert client.get("/").text == "mine"
    assert client.get("/assets/a.js").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}
    part = client.get("/index.html", headers={"range": "bytes=1-2"})
    assert (part.status_code, part.text) == (206, "in")


def test_a_file_of_a_folder_opens_no_route_of_the_api(worlds: Any, tmp_path: Path) -> None:
    """Its files need no key; a route with the name of a file does."""
    for name in ("index.html", "slots", "v1/models", "mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    client: httpx.Client = worlds({"page_folder": tmp_path, "api_keys": (ApiKey(secret="secret"),)}).client
    for route in ("/", "/index.html", "/mine.txt"):
        assert client.get(route).text == "mine"
    for route in ("/slots", "/v1/models", "/other"):
        assert client.get(route).status_code == 401, route
    assert client.post("/mine.txt").status_code == 401
    assert isinstance(client.get("/slots", headers={"x-api-key": "secret"}).json(), list)


def test_props_says_whether_there_is_a_page(client: httpx.Client) -> None:
    """As llama-server does."""
    assert isinstance(client.get("/props").json()["ui"], bool)
