"""GGUF files from any web server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.stand_in_hub import Fault, HostileServer, StandInHub, endless, gguf
from tests.hub.test_downloads import Recorder, locate, no_waits, parts

from paceline.errors import AccessDenied, DownloadError, HubUnavailable, InvalidParams, ModelNotFound
from paceline.hub import local_model, network

_ = no_waits  # a fixture that these tests use


def test_a_url_is_downloaded_once(hub: StandInHub, tmp_path: Path) -> None:
    """Into paceline's cache, with the tag of its version beside it."""
    hub.files["a/tiny.gguf"] = gguf("tiny")
    hub.tags["a/tiny.gguf"] = '"one"'
    found = locate(f"{hub.url}/files/a/tiny.gguf")
    assert found.path.read_bytes() == gguf("tiny")
    assert found.path.is_relative_to(tmp_path / ".cache" / "paceline" / "models")
    assert found.source == "url"
    assert locate(f"{hub.url}/files/a/tiny.gguf") == found
    assert len(hub.requests("file")) == 1
    assert parts(tmp_path) == []


def test_files_of_the_same_name_from_two_places_are_two(hub: StandInHub) -> None:
    """A folder for each place."""
    hub.files["a/m.gguf"], hub.files["b/m.gguf"] = gguf("a"), gguf("b")
    first, second = (locate(f"{hub.url}/files/{place}/m.gguf") for place in "ab")
    assert (first.path.read_bytes(), second.path.read_bytes()) == (gguf("a"), gguf("b"))


def test_a_new_version_on_the_server_replaces_the_old_one(hub: StandInHub) -> None:
    """Its ETag tells; without a server the old one stays."""
    url = f"{hub.url}/files/m.gguf"
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("old"), '"1"'
    found = locate(url)
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("new"), '"2"'
    hub.fail("file HEAD", Fault(status=500))
    assert locate(url).path.read_bytes() == gguf("old")
    hub.fail("file", *[Fault(status=503)] * 6)
    with pytest.raises(HubUnavailable):
        locate(url)
    assert found.path.read_bytes() == gguf("old")
    hub.faults.clear()
    assert locate(url).path.read_bytes() == gguf("new")
    assert len(hub.requests("file")) == 1 + 6 + 1


def test_a_cut_download_is_continued_if_the_file_is_the_same(hub: StandInHub, tmp_path: Path) -> None:
    """If-Range has the ETag of the part."""
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("m"), '"1"'
    hub.fail("file", Fault(cut_after=20_000))
    assert locate(f"{hub.url}/files/m.gguf").path.read_bytes() == gguf("m")
    assert [each.headers.get("range") for each in hub.requests("file")] == [None, "bytes=20000-"]
    assert hub.requests("file")[1].headers["if-range"] == '"1"'


def test_a_file_that_changes_during_the_download_is_begun_anew(hub: StandInHub) -> None:
    """The first half of one version and the second of another are no file."""
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("one"), '"1"'
    hub.fail("file", Fault(cut_after=20_000))

    class Changes(Recorder):
        def note(self, text: str) -> None:
            super().note(text)
            hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("two"), '"2"'

    recorder = Changes()
    assert locate(f"{hub.url}/files/m.gguf", recorder=recorder).path.read_bytes() == gguf("two")
    assert any("begins anew" in note for note in recorder.notes)


def test_a_part_without_a_tag_is_not_continued_later(hub: StandInHub) -> None:
    """Nothing says that the file is still the same."""
    hub.files["m.gguf"] = gguf("m")
    hub.fail("file", Fault(cut_after=20_000), *[Fault(cut_after=0)] * 6)
    with pytest.raises(HubUnavailable):
        locate(f"{hub.url}/files/m.gguf")
    hub.faults.clear()
    hub.seen.clear()
    assert locate(f"{hub.url}/files/m.gguf").path.read_bytes() == gguf("m")
    assert "range" not in hub.requests("file")[0].headers


def test_a_tag_that_only_became_weak_is_the_same_version(hub: StandInHub) -> None:
    """Proxies and servers that compress mark it so, for some requests alone."""
    url = f"{hub.url}/files/m.gguf"
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("m"), '"1"'
    locate(url)
    hub.tags["m.gguf"] = 'W/"1"'
    assert locate(url).path.read_bytes() == gguf("m")
    assert len(hub.requests("file")) == 1


def test_a_weak_tag_tells_of_a_new_version(hub: StandInHub) -> None:
    """It is kept beside the file as well."""
    url = f"{hub.url}/files/m.gguf"
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("old"), 'W/"1"'
    locate(url)
    assert locate(url).path.read_bytes() == gguf("old")
    assert len(hub.requests("file")) == 1
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("new"), 'W/"2"'
    assert locate(url).path.read_bytes() == gguf("new")


@pytest.mark.parametrize("changes", [False, True])
def test_a_part_with_a_weak_tag_is_continued_if_the_rest_has_it_too(hub: StandInHub, changes: bool) -> None:
    """If-Range takes no weak tag, so the response is looked at; also by a later call."""
    url = f"{hub.url}/files/m.gguf"
    hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("one"), 'W/"1"'
    hub.fail("file", Fault(cut_after=20_000), *[Fault(cut_after=0)] * 6)
    with pytest.raises(HubUnavailable):
        locate(url)
    hub.faults.clear()
    hub.seen.clear()
    if changes:
        hub.files["m.gguf"], hub.tags["m.gguf"] = gguf("two"), 'W/"2"'
    assert locate(url).path.read_bytes() == gguf("two" if changes else "one")
    asked = [each.headers.get("range") for each in hub.requests("file")]
    assert asked == (["bytes=20000-", None] if changes else ["bytes=20000-"])
    assert "if-range" not in hub.requests("file")[0].headers


def test_a_split_set_is_downloaded_from_any_of_its_parts(hub: StandInHub) -> None:
    """Their names follow from one."""
    names = [f"m-0000{index}-of-00002.gguf" for index in (1, 2)]
    hub.files.update({f"x/{name}": gguf(name) for name in names})
    found = locate(f"{hub.url}/files/x/{names[1]}")
    assert [path.name for path in found.parts] == names
    assert found.path.read_bytes() == gguf(names[0])


def test_a_page_is_no_model(hub: StandInHub, tmp_path: Path) -> None:
    """For example a file's page, or a login page of a network."""
    hub.files["m.gguf"] = b"<!DOCTYPE html><html>" + b" " * 1000
    with pytest.raises(DownloadError, match="no GGUF file: it begins with b'<!DOCTYPE"):
        locate(f"{hub.url}/files/m.gguf")
    assert not any(path.stat().st_size for path in parts(tmp_path))


@pytest.mark.parametrize(
    ("status", "error"), [(404, ModelNotFound), (401, AccessDenied), (403, AccessDenied), (400, HubUnavailable)]
)
def test_statuses_are_errors_of_ours(hub: StandInHub, status: int, error: type[Exception]) -> None:
    """With the address, without its secrets."""
    hub.fail("file", Fault(status=status))
    with pytest.raises(error, match=str(status)) as raised:
        locate(f"http://me:secret@127.0.0.1:{hub.port}/files/m.gguf?signature=hidden")
    assert "secret" not in str(raised.value)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:9", "http://no.such.host.invalid", "http://exa mple", "http://a..b"]
)
def test_a_server_that_cannot_be_reached_is_an_error_soon(hub: StandInHub, place: str) -> None:
    """After a second attempt; nothing says that there ever was one."""
    recorder = Recorder()
    with pytest.raises(HubUnavailable, match="cannot download m.gguf from http://"):
        locate(f"{place}/m.gguf", recorder=recorder)
    assert len(recorder.notes) <= 1


def test_a_password_of_a_url_stays_with_its_host(hub: StandInHub) -> None:
    """If the server redirects to another server, the other gets none."""
    hub.files["m.gguf"] = gguf("m")
    hub.fail("file", Fault(status=302, headers={"Location": f"http://localhost:{hub.port}/files/m.gguf"}))
    locate(f"http://me:secret@127.0.0.1:{hub.port}/files/m.gguf")
    sent = [each.headers.get("authorization", each.headers.get("Authorization")) for each in hub.requests("file")]
    assert sent[0] is not None
    assert sent[1:] == [None]


def test_a_target_is_where_the_file_goes(hub: StandInHub, tmp_path: Path) -> None:
    """As llama-server's -m beside -mu."""
    hub.files["m.gguf"] = gguf("m")
    target = tmp_path / "models" / "mine.gguf"
    found = local_model(f"{hub.url}/files/m.gguf", target=target)
    assert (found.path, target.read_bytes()) == (target, gguf("m"))


def test_offline_a_url_is_what_was_downloaded_before(hub: StandInHub) -> None:
    """Or an error."""
    hub.files["m.gguf"] = gguf("m")
    found = locate(f"{hub.url}/files/m.gguf")
    hub.seen.clear()
    assert locate(f"{hub.url}/files/m.gguf", offline=True) == found
    with pytest.raises(ModelNotFound, match="offline"):
        locate(f"{hub.url}/files/other.gguf", offline=True)
    assert hub.seen == []


def test_a_name_that_is_none_is_refused(hub: StandInHub) -> None:
    """Before anything is requested."""
    with pytest.raises(InvalidParams):
        local_model("user/repo")
    assert hub.seen == []


def test_threads_of_one_process_share_a_download(hub: StandInHub) -> None:
    """Of a URL as well."""
    hub.files["m.gguf"] = gguf("m")
    threads = [threading.Thread(target=locate, args=(f"{hub.url}/files/m.gguf",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(hub.requests("file")) == 1


def test_a_server_that_drips_headers_does_not_keep_the_copy_from_being_used(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question for a newer version has a deadline as well."""
    monkeypatch.setattr(network, "HEAD_S", 0.5)
    data = gguf("m.gguf")
    whole = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n%s' % (len(data), data)

    def pieces(line: str) -> Iterator[bytes]:
        return iter([whole]) if line.startswith("GET") else endless(b"x", first=b"HTTP/1.1 200 OK\r\nx: ", pause_s=0.05)

    recorder = Recorder()
    with HostileServer(pieces) as server:
        first = locate(f"{server.url}/m.gguf")
        began_s = time.monotonic()
        assert locate(f"{server.url}/m.gguf", recorder=recorder).path == first.path
        assert time.monotonic() - began_s < 60
    assert any("no complete headers within 0.5 s" in note for note in recorder.notes)
