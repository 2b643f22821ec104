"""Models from a hub: requests, stored files, failures."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.hub.stand_in_hub import (
    CHUNKED,
    HELD_S,
    TOKEN,
    Fault,
    HostileServer,
    StandInHub,
    chunked,
    endless,
    gguf,
    listing_bytes,
    sha256,
)
from tests.hub.test_commands import put_ollama

from paceline.errors import Aborted, AccessDenied, DiskFull, DownloadError, HubUnavailable, ModelNotFound, PacelineError
from paceline.hub import download, local_model, network
from paceline.hub.caches import LocalModel
from paceline.hub.locate import Locator
from paceline.hub.references import hub_settings, parse_reference


class Recorder:
    """An observer that keeps its notifications."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.reached_bytes: list[int] = []
        self.files: list[str] = []
        self.num_open = 0

    def begin(self, name: str, total: int | None) -> None:
        if not self.files or self.files[-1] != name:
            self.files.append(name)
            self.num_open += 1

    def reached(self, num_bytes: int) -> None:
        self.reached_bytes.append(num_bytes)

    def end(self) -> None:
        self.num_open -= 1

    def note(self, text: str) -> None:
        self.notes.append(text)


def locate(name: str, *, recorder: Recorder | None = None, cancel: threading.Event | None = None, projector: bool = False,
           **settings: object) -> LocalModel:  # fmt: skip
    locator = Locator(
        settings=hub_settings(**settings),  # type: ignore[arg-type]
        observer=recorder or Recorder(),
        cancel=cancel or threading.Event(),
        fits=lambda model: True,
        with_projector=projector,
    )
    return locator.locate(parse_reference(name))


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between attempts take no time."""
    wait = threading.Event.wait

    def briefly(self: threading.Event, seconds: float | None = None) -> bool:
        return wait(self, seconds if seconds is None or seconds in (HELD_S, network.HEAD_S) else min(seconds, 0.01))

    monkeypatch.setattr(threading.Event, "wait", briefly)


def parts(home: Path) -> list[Path]:
    return list(home.rglob("*.incomplete"))


# ---- what is downloaded


def test_a_model_is_downloaded_into_huggingface_hubs_cache(hub: StandInHub, tmp_path: Path) -> None:
    """A snapshot with a link to a blob named by its hash, and the branch's commit."""
    repo = hub.add("user/tiny-GGUF", "README.md", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    recorder = Recorder()
    found = locate("hf:user/tiny-GGUF", recorder=recorder)
    assert found.path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert (found.name, found.source) == ("hf:user/tiny-GGUF:Q4_K_M", "huggingface")
    folder = tmp_path / "hf" / "hub" / "models--user--tiny-GGUF"
    assert found.path == folder / "snapshots" / repo.commit / "tiny-Q4_K_M.gguf"
    assert found.path.is_symlink()
    assert (folder / "blobs" / sha256(gguf("tiny-Q4_K_M.gguf"))).is_file()
    assert (folder / "refs" / "main").read_text() == repo.commit
    assert recorder.files == ["tiny-Q4_K_M.gguf"]
    assert recorder.reached_bytes[-1] == 50_000
    assert recorder.num_open == 0
    assert any("tiny-Q4_K_M.gguf" in note and "default" in note for note in recorder.notes)


def test_huggingface_hub_finds_what_was_downloaded(hub: StandInHub, tmp_path: Path) -> None:
    """Without a network, by its own functions."""
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    found = locate("hf:user/tiny")
    cache = tmp_path / "hf" / "hub"
    assert try_to_load_from_cache("user/tiny", "tiny-Q4_K_M.gguf", cache_dir=cache) == str(found.path)
    report = scan_cache_dir(cache)
    assert not report.warnings
    assert [repo.repo_id for repo in report.repos] == ["user/tiny"]


def test_what_is_there_is_not_downloaded_again(hub: StandInHub) -> None:
    """One request for the listing, none for the file."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    first = locate("hf:user/tiny")
    hub.seen.clear()
    assert locate("hf:user/tiny").path == first.path
    assert [each.kind for each in hub.seen] == ["api"]


def test_a_new_commit_downloads_only_what_has_changed(hub: StandInHub) -> None:
    """Blobs are shared between snapshots."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    first = locate("hf:user/tiny")
    repo.files["README.md"] = b"new"
    second = locate("hf:user/tiny")
    assert second.path != first.path
    assert second.path.resolve() == first.path.resolve()
    repo.files["tiny-Q4_K_M.gguf"] = gguf("another")
    assert locate("hf:user/tiny").path.read_bytes() == gguf("another")
    assert len(hub.requests("cdn")) == 2


def test_split_sets_and_projectors_are_downloaded_whole(hub: StandInHub) -> None:
    """All parts side by side; the projector on request."""
    names = [f"big-Q4_K_M-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    hub.add("user/big", *names, "mmproj-F16.gguf", "big-Q8_0.gguf")
    found = locate("hf:user/big", projector=True)
    assert [part.name for part in found.parts] == names
    assert len({part.parent for part in found.parts}) == 1
    assert found.projector is not None
    assert found.projector.read_bytes() == gguf("mmproj-F16.gguf")
    assert len(hub.requests("cdn")) == 4


def test_revisions_and_files_can_be_named(hub: StandInHub) -> None:
    """A commit needs no ref; a file decides instead of a quantisation."""
    repo = hub.add("user/tiny", "a/tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    assert locate("hf:user/tiny/a/tiny-Q4_K_M.gguf").path.name == "tiny-Q4_K_M.gguf"
    assert locate(f"hf:user/tiny@{repo.commit}:Q8_0").name == f"hf:user/tiny@{repo.commit}:Q8_0"
    with pytest.raises(ModelNotFound, match="no branch, tag or commit 'dev'"):
        locate("hf:user/tiny@dev")


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub: StandInHub) -> None:
    """The files' own host gets no Authorization."""
    hub.add("user/gated", "m-Q4_K_M.gguf", gated=True)
    locate("hf:user/gated", token=TOKEN)
    sent = {each.kind: each.headers.get("authorization", each.headers.get("Authorization")) for each in hub.seen}
    assert sent["api"] == sent["resolve"] == f"Bearer {TOKEN}"
    assert sent["cdn"] is None


def test_the_token_of_the_environment_is_used(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_TOKEN, as huggingface_hub reads it."""
    hub.add("user/private", "m-Q4_K_M.gguf", private=True)
    with pytest.raises(ModelNotFound, match="private and needs a token"):
        locate("hf:user/private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert locate("hf:user/private").path.is_file()


# ---- resumption


def test_a_cut_connection_is_continued(hub: StandInHub) -> None:
    """The next request asks for the rest, and the checksum is that of the whole."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000), Fault(cut_after=5_000))
    recorder = Recorder()
    assert locate("hf:user/tiny", recorder=recorder).path.read_bytes() == gguf("tiny-Q4_K_M.gguf")
    ranges = [each.headers.get("range") for each in hub.requests("cdn")]
    assert ranges == [None, "bytes=20000-", "bytes=25000-"]
    assert recorder.reached_bytes == sorted(recorder.reached_bytes)


def test_what_has_arrived_is_continued_by_the_next_call(hub: StandInHub, tmp_path: Path) -> None:
    """Also after this process gave up, or was killed."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=30_000), *[Fault(cut_after=0)] * 10)
    with pytest.raises(HubUnavailable, match="30000 bytes are kept"):
        locate("hf:user/tiny")
    hub.faults.clear()
    hub.seen.clear()
    assert [part.stat().st_size for part in parts(tmp_path)] == [30_000]
    assert locate("hf:user/tiny").path.read_bytes() == gguf("tiny-Q4_K_M.gguf")
    assert [each.headers.get("range") for each in hub.requests("cdn")] == ["bytes=30000-"]
    assert parts(tmp_path) == []


def test_a_complete_part_is_only_verified(hub: StandInHub, tmp_path: Path) -> None:
    """A process may have been killed between the last byte and the move."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    blobs = tmp_path / "hf" / "hub" / "models--user--tiny" / "blobs"
    blobs.mkdir(parents=True)
    data = gguf("tiny-Q4_K_M.gguf")
    (blobs / f"{sha256(data)}.incomplete").write_bytes(data)
    assert locate("hf:user/tiny").path.read_bytes() == data
    assert hub.requests("cdn") == []


@pytest.mark.parametrize("left", [b"GGUF" + b"x" * 9_996, b"x" * 90_000])
def test_a_part_that_is_wrong_is_downloaded_anew(hub: StandInHub, tmp_path: Path, left: bytes) -> None:
    """Its bytes differ from the file's, or there are too many."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    blobs = tmp_path / "hf" / "hub" / "models--user--tiny" / "blobs"
    blobs.mkdir(parents=True)
    data = gguf("tiny-Q4_K_M.gguf")
    (blobs / f"{sha256(data)}.incomplete").write_bytes(left)
    assert locate("hf:user/tiny").path.read_bytes() == data


def test_a_server_without_ranges_begins_anew(hub: StandInHub) -> None:
    """200 in place of 206: the bytes so far are not doubled."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000), Fault(ignores_range=True))
    assert locate("hf:user/tiny").path.read_bytes() == gguf("tiny-Q4_K_M.gguf")


def test_a_download_can_be_stopped_and_keeps_its_part(hub: StandInHub, tmp_path: Path) -> None:
    """As Ctrl-C does in a command."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000))
    cancel = threading.Event()

    class Stops(Recorder):
        def reached(self, num_bytes: int) -> None:
            if num_bytes >= 20_000:
                cancel.set()

    with pytest.raises(Aborted, match="continues"):
        locate("hf:user/tiny", recorder=Stops(), cancel=cancel)
    (part,) = parts(tmp_path)
    assert part.read_bytes() == gguf("tiny-Q4_K_M.gguf")[:20_000]


def test_an_interrupt_keeps_the_part(hub: StandInHub, tmp_path: Path) -> None:
    """A KeyboardInterrupt of the main thread comes at any place."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000))

    class Interrupts(Recorder):
        def reached(self, num_bytes: int) -> None:
            if num_bytes >= 20_000:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        locate("hf:user/tiny", recorder=Interrupts())
    assert [part.stat().st_size for part in parts(tmp_path)] == [20_000]
    assert locate("hf:user/tiny").path.read_bytes() == gguf("tiny-Q4_K_M.gguf")


# ---- what goes wrong


def test_wrong_bytes_are_downloaded_twice_and_then_refused(hub: StandInHub, tmp_path: Path) -> None:
    """Nothing of them is left, and there is no file in the model's place."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    wrong = gguf("something else")
    hub.fail("cdn", Fault(body=wrong), Fault(body=wrong))
    with pytest.raises(DownloadError, match=f"SHA-256 is {sha256(wrong)}, not {sha256(gguf('tiny-Q4_K_M.gguf'))}"):
        locate("hf:user/tiny")
    assert parts(tmp_path) == []
    assert not any(path.is_file() for path in (tmp_path / "hf").rglob("blobs/*"))
    hub.fail("cdn", Fault(body=wrong))
    assert locate("hf:user/tiny").path.read_bytes() == gguf("tiny-Q4_K_M.gguf")


def test_a_file_of_another_length_is_refused_at_once(hub: StandInHub) -> None:
    """The announced size is compared before the bytes come."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(body=gguf("x", 60_000)))
    with pytest.raises(DownloadError, match="should have 50000 bytes, and localhost sends 60000"):
        locate("hf:user/tiny")


def test_a_file_that_changes_between_two_requests_is_noticed(hub: StandInHub) -> None:
    """The rest of another file does not fit to the first half: it is downloaded anew."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000), Fault(body=gguf("something else")))
    recorder = Recorder()
    assert locate("hf:user/tiny", recorder=recorder).path.read_bytes() == gguf("tiny-Q4_K_M.gguf")
    assert any("downloading it anew" in note for note in recorder.notes)


@pytest.mark.parametrize("kind", ["api", "cdn"])
@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_server_is_waited_for(hub: StandInHub, kind: str, status: int) -> None:
    """As long as Retry-After asks for, or with growing pauses."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail(kind, Fault(status=status, headers={"Retry-After": "7"}), Fault(status=status))
    recorder = Recorder()
    assert locate("hf:user/tiny", recorder=recorder).path.is_file()
    waits = [note for note in recorder.notes if "trying again in" in note]
    assert len(waits) == 2
    assert "7.0 s" in waits[0]


@pytest.mark.parametrize("kind", ["api", "cdn"])
def test_patience_ends(hub: StandInHub, kind: str) -> None:
    """An hour is too long, and so are many refusals in a row."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail(kind, Fault(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(HubUnavailable, match="429"):
        locate("hf:user/tiny")
    hub.fail(kind, *[Fault(status=503)] * 6)
    with pytest.raises(HubUnavailable, match="503"):
        locate("hf:user/tiny")


def test_a_gated_repository_needs_a_token(hub: StandInHub) -> None:
    """The message has the address of its conditions, and the variable to set."""
    hub.add("user/gated", "m-Q4_K_M.gguf", gated=True)
    with pytest.raises(AccessDenied, match=f"gated: accept its conditions at {hub.url}/user/gated, .* HF_TOKEN"):
        locate("hf:user/gated")
    hub.fail("cdn", Fault(status=403))
    with pytest.raises(AccessDenied, match="this token's account may not read it"):
        locate("hf:user/gated", token=TOKEN)
    with pytest.raises(AccessDenied, match="refuses the token"):
        locate("hf:user/gated", token="hf_wrong")


def test_a_repository_that_does_not_exist_is_named_with_the_nearest(hub: StandInHub) -> None:
    """Of the same owner."""
    hub.add("user/gemma-3-1b-it-GGUF", "m.gguf")
    hub.add("user/gemma-3-4b-it-GGUF", "m.gguf")
    with pytest.raises(
        ModelNotFound, match=r"no repository user/gemma-3-1b-GGUF.*did you mean user/gemma-3-1b-it-GGUF"
    ):
        locate("hf:user/gemma-3-1b-GGUF")
    with pytest.raises(ModelNotFound, match="no models of unknown"):
        locate("hf:unknown/gemma")


def test_a_repository_without_gguf_says_where_to_look(hub: StandInHub) -> None:
    """Other programs' weights are no model here."""
    hub.add("user/gemma", "config.json", "model.safetensors")
    with pytest.raises(ModelNotFound, match="user/gemma-GGUF"):
        locate("hf:user/gemma")


def test_a_disk_without_space_is_noticed_before(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing and the free space, and another place for the cache."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, used=10**6 - 1000, free=1000))
    with pytest.raises(DiskFull, match="50000 bytes are missing and 1000 are free.*HF_HOME"):
        locate("hf:user/tiny")


def test_a_disk_that_fills_up_keeps_what_has_arrived(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may take the space meanwhile."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000))
    copy = download._Transfer._copy
    calls = []

    def full_at_the_second(self: Any, response: Any, file: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(self, response, file)

    monkeypatch.setattr(download._Transfer, "_copy", full_at_the_second)
    with pytest.raises(DiskFull, match="No space left on device"):
        locate("hf:user/tiny")
    assert [part.stat().st_size for part in parts(tmp_path)] == [20_000]
    assert locate("hf:user/tiny").path.read_bytes() == gguf("tiny-Q4_K_M.gguf")


def test_a_folder_that_cannot_be_written_is_named(hub: StandInHub, tmp_path: Path) -> None:
    """Here a file is in the place of the folder."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    cache = tmp_path / "hf" / "hub"
    cache.parent.mkdir()
    cache.write_text("no folder")
    with pytest.raises(DownloadError, match="cannot write tiny-Q4_K_M.gguf to .*HF_HOME"):
        locate("hf:user/tiny")


def test_what_the_hub_sends_by_its_own_protocol_alone_is_left_to_its_library(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files above 50 GB; here all of them."""
    monkeypatch.setattr("paceline.hub.locate._LARGEST_BY_HTTP", 0)
    hub.add("user/huge", "huge-Q4_K_M.gguf")
    assert locate("hf:user/huge").path.read_bytes() == gguf("huge-Q4_K_M.gguf")
    assert hub.requests("cdn")[0].headers["user-agent"].startswith("paceline/None; hf_hub/")


def test_two_downloads_of_the_same_file_make_one(hub: StandInHub) -> None:
    """The second waits for the first, in another thread or process, and says so."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    held = threading.Event()
    hub.fail("cdn", Fault(cut_after=20_000, held=held))
    found: list[LocalModel] = []
    recorders = [Recorder(), Recorder()]
    threads = [
        threading.Thread(target=lambda recorder=recorder: found.append(locate("hf:user/tiny", recorder=recorder)))
        for recorder in recorders
    ]
    threads[0].start()
    while not hub.requests("cdn"):
        time.sleep(0.01)
    threads[1].start()
    while not any("waiting" in note for note in recorders[1].notes):
        time.sleep(0.01)
    held.set()
    for thread in threads:
        thread.join(30)
    assert [each.path.read_bytes() for each in found] == [gguf("tiny-Q4_K_M.gguf")] * 2
    assert len(hub.requests("cdn")) == 1


# ---- without a network


def test_without_a_network_the_cache_is_used(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a note; a missing model is an error with advice."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    first = locate("hf:user/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    recorder = Recorder()
    assert locate("hf:user/tiny", recorder=recorder) == first
    assert any("cannot reach http://127.0.0.1:9" in note and "using the copy" in note for note in recorder.notes)
    with pytest.raises(HubUnavailable, match=r"cannot reach http://127\.0\.0\.1:9.*HTTPS_PROXY"):
        locate("hf:user/other")


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(cut_after=0), Fault(status=403)])
def test_without_its_servers_of_files_the_cache_is_used(hub: StandInHub, fault: Fault) -> None:
    """The hub lists a newer version that cannot be downloaded: the file of the earlier one serves, and that is said."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf", "mmproj-F16.gguf")
    first = locate("hf:user/tiny", projector=True)
    repo.files["tiny-Q4_K_M.gguf"] = gguf("newer")
    hub.fail("cdn", *[fault] * 6)
    recorder = Recorder()
    again = locate("hf:user/tiny", recorder=recorder, projector=True)
    assert (again.path, again.projector, again.name) == (first.path, first.projector, "hf:user/tiny:Q4_K_M")
    assert again.path.read_bytes() == gguf("tiny-Q4_K_M.gguf")
    assert any("using the copy in the cache, which may be of an earlier commit" in note for note in recorder.notes)
    hub.faults.clear()
    assert locate("hf:user/tiny").path.read_bytes() == gguf("newer")


def test_another_revision_or_file_is_no_copy(hub: StandInHub) -> None:
    """The named file is loaded, or an error is raised."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    locate("hf:user/tiny:Q8_0")
    repo.files["README.md"] = b"new"
    hub.fail("cdn", *[Fault(status=503)] * 24)
    for name in ("hf:user/tiny", "hf:user/tiny:Q4_K_M"):
        with pytest.raises(HubUnavailable, match="503"):
            locate(name)
    repo.files["tiny-Q8_0.gguf"] = gguf("newer")
    with pytest.raises(HubUnavailable, match="503"):
        locate(f"hf:user/tiny@{repo.commit}:Q8_0")
    repo.files["mmproj-F16.gguf"] = gguf("eyes")
    with pytest.raises(HubUnavailable, match="503"):
        locate("hf:user/tiny:Q8_0", projector=True)


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_offline_requests_nothing(hub: StandInHub, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """offline=True or HF_HUB_OFFLINE=1."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    first = locate("hf:user/tiny")
    hub.seen.clear()
    options: dict[str, object] = {"offline": True} if by == "argument" else {}
    if by == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate("hf:user/tiny", **options).path == first.path
    assert locate("hf:user/tiny:Q4_K_M", **options).path == first.path
    with pytest.raises(ModelNotFound, match=r"offline forbids.*did you mean user/tiny.*paceline pull hf:user/tinny"):
        locate("hf:user/tinny", **options)
    with pytest.raises(ModelNotFound, match="paceline list"):
        locate("hf:user/tiny:Q8_0", **options)
    assert hub.seen == []


def test_half_a_split_set_is_none_offline(hub: StandInHub) -> None:
    """All parts, or an error."""
    names = [f"big-Q4_K_M-0000{index}-of-00002.gguf" for index in (1, 2)]
    hub.add("user/big", *names)
    found = locate("hf:user/big")
    found.parts[1].unlink()
    with pytest.raises(ModelNotFound):
        locate("hf:user/big", offline=True)


# ---- what other programs have downloaded


def test_a_file_that_ollama_has_is_used_where_it_is(hub: StandInHub, tmp_path: Path) -> None:
    """Known by its hash; nothing is downloaded or copied."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    data = gguf("tiny-Q4_K_M.gguf")
    blob = tmp_path / ".ollama" / "models" / "blobs" / f"sha256-{sha256(data)}"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    found = locate("hf:user/tiny")
    assert (found.path, found.source) == (blob, "ollama")
    assert hub.requests("cdn") == []


def test_a_file_that_llama_cpp_has_is_used_where_it_is(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its present layout and in that of older versions, with and without a network."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    cache = tmp_path / "llama"
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    cache.mkdir()
    flat = cache / "user_tiny_tiny-Q4_K_M.gguf"
    flat.write_bytes(gguf("tiny-Q4_K_M.gguf"))
    assert locate("hf:user/tiny").path == flat
    assert locate("hf:user/tiny", offline=True).path == flat
    flat.unlink()
    snapshot = cache / "models--user--tiny" / "snapshots" / repo.commit / "tiny-Q4_K_M.gguf"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_bytes(gguf("tiny-Q4_K_M.gguf"))
    assert locate("hf:user/tiny").path == snapshot
    assert locate("hf:user/tiny", offline=True).source == "llama.cpp"
    assert hub.requests("cdn") == []


def test_every_error_is_one_of_ours(hub: StandInHub) -> None:
    """A hub that does not behave like one."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    for fault in (Fault(status=418), Fault(status=302), Fault(status=404)):
        hub.fail("api", fault)
        with pytest.raises(PacelineError):
            locate("hf:user/tiny")


def test_a_part_that_is_removed_in_the_middle_is_downloaded_anew(hub: StandInHub, tmp_path: Path) -> None:
    """By `paceline prune` while the download waits: the checksum is right, and the file would be its tail alone."""

    class Remover(Recorder):
        def note(self, text: str) -> None:
            super().note(text)
            if "trying again" in text:
                for part in parts(tmp_path):
                    part.unlink()

    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000))
    recorder = Remover()
    found = locate("hf:user/tiny", recorder=recorder)
    assert found.path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert any("downloading it anew" in note for note in recorder.notes)


@pytest.mark.parametrize("change", [{"rfilename": "../../../../outside.gguf"}, {"rfilename": "/outside.gguf"}])
def test_a_listing_that_leads_out_of_the_cache_is_refused(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    """Names of files and of contents are only as good as the hub they come from."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    listed = [{key: value for key, value in entry.items() if key != "lfs"} | change for entry in repo.listing()]
    monkeypatch.setattr(repo, "listing", lambda: listed)
    with pytest.raises(HubUnavailable, match="check HF_ENDPOINT"):
        locate("hf:user/tiny")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_projector_is_downloaded_beside_a_model_of_another_program(hub: StandInHub, tmp_path: Path) -> None:
    """The model is used in place."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf", "mmproj-F16.gguf")
    blob = put_ollama(tmp_path, "tiny:latest", repo.files["tiny-Q4_K_M.gguf"])
    found = locate("hf:user/tiny", projector=True)
    assert (found.path, found.source) == (blob, "ollama")
    assert found.projector is not None
    assert found.projector.read_bytes() == repo.files["mmproj-F16.gguf"]


def test_contents_are_not_named_by_an_invalid_hash(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An identity with a path in it would lead out of the folder of contents."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    listed = [{key: value for key, value in each.items() if key != "lfs"} for each in repo.listing()]
    monkeypatch.setattr(repo, "listing", lambda: [each | {"blobId": "../../../outside"} for each in listed])
    found = locate("hf:user/tiny")
    assert found.path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert not list(tmp_path.rglob("outside*"))


def test_the_token_of_a_login_is_a_token_in_messages(hub: StandInHub, tmp_path: Path) -> None:
    """It was sent: another one is needed, not the first one."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf", private=True)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_" + "b" * 34)
    with pytest.raises(ModelNotFound, match="the token may not see it"):
        locate("hf:user/tiny")


def test_words_of_a_server_cannot_drive_the_terminal(hub: StandInHub) -> None:
    """Names of files come from the hub: in notes and errors their control characters are question marks."""
    names = ["m\x1b[2J\x07-Q4_K_M.gguf", "m\u202eff-Q8_0.gguf"]
    hub.add("user/evil", *names)
    notes: list[str] = []
    local_model("hf:user/evil", note=notes.append, stream=io.StringIO())
    assert any("m?[2J?-Q4_K_M.gguf" in note for note in notes)
    assert all(note.isprintable() for note in notes)
    with pytest.raises(ModelNotFound, match=r"m\?\[2J") as raised:
        local_model("hf:user/evil/m-Q4_K_M.gguf")
    assert str(raised.value).isprintable()
    hub.add("user/split").files["\x1b[2J-00001-of-00002.gguf"] = gguf("part")
    with pytest.raises(ModelNotFound, match="is one of 2 parts") as raised:
        local_model("hf:user/split")
    assert str(raised.value).isprintable()


# ---- a hub that is hostile

BIG = b"GGUF".ljust(1 << 16, b"x")


def hostile(monkeypatch: pytest.MonkeyPatch, file: Callable[[], Iterator[bytes]], **listed: object) -> HostileServer:
    """Return a hub that lists a file, and sends this for it."""
    server = HostileServer(lambda line: iter([listing_bytes(**listed)]) if " /api/" in line else file())
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


@pytest.mark.parametrize("size", [50_000, 1 << 20, 1])
def test_a_body_that_is_longer_than_listed_is_deleted(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Although the server announces no length; no more of it is read."""
    with hostile(monkeypatch, lambda: endless(chunked(BIG), first=CHUNKED), size=size) as server:
        with pytest.raises(DownloadError, match=f"127.0.0.1 sends more than the {size} bytes of tiny-Q4_K_M.gguf"):
            locate("hf:user/tiny")
    assert server.num_sent < size + (16 << 20)
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_body_without_a_length_leaves_a_reserve_of_the_disk(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the listing nor the response has a length: the body ends when 2 % of the disk are free, and is deleted."""
    folder = tmp_path / "hf"

    def usage(_: object) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in folder.rglob("*.incomplete"))
        return SimpleNamespace(total=100 << 20, used=used, free=(12 << 20) - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    recorder = Recorder()
    with hostile(monkeypatch, lambda: endless(chunked(BIG), first=CHUNKED), size=None):
        with pytest.raises(DiskFull, match="tiny-Q4_K_M.gguf whose length the server does not say"):
            locate("hf:user/tiny", recorder=recorder)
    assert 9 << 20 <= max(recorder.reached_bytes) <= 11 << 20
    assert parts(tmp_path) == []


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (lambda: endless(chunked(b"[" * 65_536), first=CHUNKED), "more than 16 MiB"),
        (lambda: iter([CHUNKED, chunked(b"[" * 100_000), b"0\r\n\r\n"]), "does not respond as the hub does"),
        (lambda: endless(b"x-more: " + b"y" * 4096 + b"\r\n", first=b"HTTP/1.1 200 OK\r\n"), "cannot reach"),
        (lambda: endless(b"HTTP/1.1 103 Early Hints\r\n\r\n"), "no complete headers within 0.5 s"),
        (lambda: endless(b"x", first=b"HTTP/1.1 200 OK\r\nx-slow: ", pause_s=0.05), "no complete headers within 0.5 s"),
        (lambda: endless(chunked(b" "), first=CHUNKED, pause_s=0.05), "less than 1024 bytes/s"),
        (lambda: endless(chunked(b" " * 1024), first=CHUNKED, pause_s=0.01), "not complete after 1 s"),
        (lambda: iter([b"HTTP/1.1 302 Found\r\nLocation: /api/models/x\r\nContent-Length: 0\r\n\r\n"]), "10 redirects"),
        (lambda: endless(b"x" * 65_536, first=b"HTTP/1.1 302 Found\r\nLocation: /api/x\r\n\r\n"), "10 redirects"),
        (lambda: iter([b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"]), "compressed"),
        (lambda: iter([b"SSH-2.0-OpenSSH_9.2\r\n"]), "cannot reach"),
    ],
)  # fmt: skip
def test_a_listing_without_an_end_ends(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, response: Callable[[], Iterator[bytes]], words: str
) -> None:
    """In bytes, in time, and in redirects."""
    monkeypatch.setattr(network, "HEAD_S", 0.5)
    monkeypatch.setattr(network, "RATE_WINDOW_S", 0.5)
    monkeypatch.setattr(network, "SMALL_BODY_S", 1.0)
    with HostileServer(lambda _: response()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        began = time.monotonic()
        with pytest.raises(HubUnavailable, match=words):
            locate("hf:user/tiny")
        assert time.monotonic() - began < 60
    assert server.num_sent < 64 << 20


def test_a_file_that_drips_is_given_up(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """After six attempts with next to nothing each, whether the server closes the connection or sends a byte at a time."""
    monkeypatch.setattr(network, "RATE_WINDOW_S", 0.2)
    head = b"HTTP/1.1 200 OK\r\nAccept-Ranges: bytes\r\nContent-Length: 50000\r\n\r\n"
    with hostile(monkeypatch, lambda: endless(b"GGUF", first=head, pause_s=0.05)) as server:
        with pytest.raises(HubUnavailable, match="less than 1024 bytes/s"):
            locate("hf:user/tiny")
    assert len(server.requests) == 1 + 6
    with hostile(monkeypatch, lambda: iter([head + b"GGUF"])) as server:
        with pytest.raises(HubUnavailable, match="cannot download tiny-Q4_K_M.gguf"):
            locate("hf:user/tiny")
    assert len(server.requests) == 1 + 6


@pytest.mark.parametrize(
    "listed",
    [
        {"size": "many"}, {"size": -1}, {"size": 1 << 60}, {"size": [1]}, {"size": 1.5}, {"rfilename": 7}, {"rfilename": None},
        {"rfilename": "a\0-Q4_K_M.gguf"}, {"rfilename": "\ud800-Q4_K_M.gguf"}, {"rfilename": "x" * 300 + ".gguf"},
        {"rfilename": "a/" * 40 + "m.gguf"},
    ],
)  # fmt: skip
def test_a_listing_with_wrong_types_is_an_error_of_ours(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, listed: dict[str, object]
) -> None:
    """And nothing of it is requested."""
    with hostile(monkeypatch, lambda: iter([]), **listed) as server:
        with pytest.raises(HubUnavailable, match="check HF_ENDPOINT"):
            locate("hf:user/tiny")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [b"null", b"7", b"[]", b"{}", b'{"sha": 1, "siblings": []}', b'{"sha": "a", "siblings": [1]}']
)
def test_json_that_is_no_listing_is_an_error_of_ours(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """Whatever its type."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    with HostileServer(lambda _: iter([head + body])) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(HubUnavailable, match="does not list files as the hub does"):
            locate("hf:user/tiny")


def test_what_the_hubs_library_downloads_must_fit(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of an impossible size is not begun."""
    with hostile(monkeypatch, lambda: iter([]), size=1 << 49) as server:
        with pytest.raises(DiskFull, match=f"{1 << 49} bytes are missing"):
            locate("hf:user/tiny")
    assert len(server.requests) == 1
