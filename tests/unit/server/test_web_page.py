"""The files of the web page: built files with their headers, a folder's files, and no page."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest

from paceline.server import web_page
from paceline.server.settings import ApiKey, ServerSettings
from paceline.server.web_page import NOT_BUILT, OFF, BuiltFile, BuiltPage, PageFolder, WebPage, media_type

SCRIPT = b"export const answer = 42;\n" * 100


def built() -> BuiltPage:
    files = {"index.html": b"<!doctype html>", "assets/a-1.js": SCRIPT, "trace.html": b"viewer", "icon.svg": b"<svg/>"}
    return BuiltPage({name: BuiltFile.of(name, content) for name, content in files.items()})


def get(page: BuiltPage | PageFolder, route: str, **headers: str) -> web_page.PageResponse:
    return asyncio.run(page.get(route, {name.replace("_", "-"): value for name, value in headers.items()}))


def test_the_page_allows_no_inline_code_and_is_checked_each_time() -> None:
    """Its files with a hash in their names are kept for a year."""
    page = get(built(), "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-cache"
    script = get(built(), "/assets/a-1.js")
    assert (script.content, script.headers["content-type"]) == (SCRIPT, "text/javascript; charset=utf-8")
    assert "immutable" in script.headers["cache-control"]
    assert script.headers["x-content-type-options"] == "nosniff"
    # A worker that is made of the file has this policy, and not the page's.
    assert script.headers["content-security-policy"] == page.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("*", True), ("br", False), ("", False), ("gzip;q=0", False)],
)
def test_a_file_is_compressed_for_clients_that_accept_it(accepted: str, is_compressed: bool) -> None:
    """Under a tag of its own."""
    plain, found = get(built(), "/assets/a-1.js"), get(built(), "/assets/a-1.js", accept_encoding=accepted)
    assert ("content-encoding" in found.headers) is is_compressed
    assert (gzip.decompress(found.content) if is_compressed else found.content) == SCRIPT
    assert (found.headers["etag"] == plain.headers["etag"]) is not is_compressed
    assert found.headers["vary"] == "accept-encoding"
    assert "vary" not in get(built(), "/icon.svg").headers  # too small to be worth it


def test_the_document_of_previews_has_an_origin_of_its_own_and_loads_nothing() -> None:
    """The page may frame it, and no other page may."""
    policy = BuiltFile.of("preview.html", b"<script></script>").headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none';")
    assert "frame-ancestors 'self'" in policy
    assert not any(word in policy for word in ("allow-same-origin", "connect-src", "http"))
    assert "frame-src 'self'" in get(built(), "/").headers["content-security-policy"]


def test_a_browser_that_has_a_file_gets_a_304() -> None:
    """By its tag, weak or among others; another one gets all of it."""
    tag = get(built(), "/").headers["etag"]
    for given in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        found = get(built(), "/", if_none_match=given)
        assert (found.status, found.content, found.headers["etag"]) == (304, b"", tag)
        assert found.headers["content-security-policy"] == web_page.POLICY
    assert get(built(), "/", if_none_match='"x"').status == 200
    other = BuiltFile.of("index.html", b"<!doctype HTML>")  # of the same size
    assert other.respond({}).headers["etag"] != tag


def test_a_file_with_a_new_policy_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tag depends on the headers, as a browser keeps them beside the content."""
    tag = get(built(), "/").headers["etag"]
    monkeypatch.setattr(web_page, "POLICY", "default-src 'none'")
    found = get(built(), "/", if_none_match=tag)
    assert (found.status, found.headers["content-security-policy"]) == (200, "default-src 'none'")


def test_the_trace_viewer_is_no_page_of_a_server() -> None:
    """Its scripts are inline."""
    assert not built().has("/trace.html")
    assert built().has("/index.html")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pages" / "sub").mkdir(parents=True)
    (tmp_path / "pages/index.html").write_text("mine")
    (tmp_path / "pages/sub/index.html").write_text("below")
    (tmp_path / "pages/.secret").write_text("no")
    (tmp_path / "outside.txt").write_text("no")
    (tmp_path / "pages/link.txt").symlink_to(tmp_path / "outside.txt")
    return tmp_path / "pages"


def test_a_folder_is_served_as_it_is_at_the_moment(folder: Path) -> None:
    """Without a policy, which its pages may not be made for."""
    page = PageFolder(folder)
    assert get(page, "/").path == folder / "index.html"
    assert get(page, "/sub/").path == folder / "sub/index.html"
    assert "content-security-policy" not in get(page, "/").headers
    assert not page.has("/new.css")
    (folder / "new.css").write_text("a{}")
    assert get(page, "/new.css").headers["content-type"] == "text/css; charset=utf-8"
    (folder / "new.css").unlink()
    assert get(page, "/new.css").status == 404


@pytest.mark.parametrize(
    "route",
    [
        "/../outside.txt",
        "/sub/../../outside.txt",
        "/link.txt",
        "/.secret",
        "/sub",
        "/a\0b",
        "/..\\outside.txt",
        "//etc/passwd",
    ],
)
def test_nothing_outside_of_a_folder_is_served(folder: Path, route: str) -> None:
    """Nor hidden files, nor a folder without its slash."""
    assert not PageFolder(folder).has(route)


@pytest.mark.parametrize(
    ("hosts", "keys", "asked", "is_on"),
    [
        (("127.0.0.1",), (), None, True),
        (("::1", "localhost", "/run/x.sock"), (), None, True),
        (("0.0.0.0",), (), None, False),
        (("127.0.0.1", "192.168.0.9"), (), None, False),
        (("llm.example",), (), None, False),
        (("0.0.0.0",), (ApiKey(secret="k"),), None, True),
        (("0.0.0.0",), (), True, True),
        (("127.0.0.1",), (), False, False),
    ],
)
def test_the_page_is_off_where_anyone_could_use_it(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], keys: tuple[ApiKey, ...], asked: bool | None, is_on: bool
) -> None:
    """Unless it was requested; a sentence says so, unless it was switched off."""
    monkeypatch.setattr(web_page, "built_files", lambda: {"index.html": BuiltFile.of("index.html", b"x")})
    page = WebPage.of(ServerSettings(hosts=hosts, api_keys=keys, start_page=asked))
    assert (page.files is not None) is is_on
    assert page.why_not == ("" if is_on or asked is False else OFF)
    assert (page.files is not None and page.files.has("/index.html")) is is_on


def test_a_page_that_was_not_built_is_said_so(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A folder of one's own is served all the same, also if anyone reaches it."""
    monkeypatch.setattr(web_page, "built_files", dict)
    assert WebPage.of(ServerSettings()) == WebPage(None, NOT_BUILT)
    assert web_page.page_facts() == {"is_built": False, "num_bytes": 0}
    page = WebPage.of(ServerSettings(page_folder=folder, hosts=("0.0.0.0",)))
    assert page.files is not None and page.files.has("/sub/index.html")


def test_the_files_of_an_installation_are_read_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """By their names within the folder, hidden names as well."""
    monkeypatch.setattr(web_page, "built_folder", lambda: folder)
    web_page.built_files.cache_clear()
    try:
        assert set(web_page.built_files()) == {"index.html", "sub/index.html", ".secret", "link.txt"}
        assert web_page.built_files() is web_page.built_files()
        monkeypatch.setattr(web_page, "built_folder", lambda: folder / "nothing")
        web_page.built_files.cache_clear()
        assert web_page.built_files() == {}
    finally:
        web_page.built_files.cache_clear()


def test_types_do_not_depend_on_the_system() -> None:
    """The files of a page are known here."""
    assert media_type("a/b.JS") == "text/javascript; charset=utf-8"
    assert media_type("x.webmanifest") == "application/manifest+json"
    assert media_type("x.unknown-type") == "application/octet-stream"
