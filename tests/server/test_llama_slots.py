"""GET /slots, and numbered slots saved, restored and erased; settings that turn endpoints off."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.drafters import force_depths
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.scheduling.records import SlotsSnapshot, SlotView
from paceline.server.settings import ApiKey, ServerSettings

pytestmark = pytest.mark.native

FRANCE = [30 + number % 90 for number in range(40)]
GERMANY = [*FRANCE[:34], *range(200, 206)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


def start(folder: Path) -> RunningServer:
    """A server that saves there."""
    return RunningServer(ServerSettings(engine_options={**DEMO_ENGINE, "state_folder": folder}))


@pytest.fixture(scope="module")
def saving(folder: Path) -> Iterator[RunningServer]:
    with start(folder) as running:
        yield running


@pytest.fixture
def slots(saving: RunningServer) -> Iterator[httpx.Client]:
    with saving.client() as client:
        yield client


def complete(client: httpx.Client, prompt: list[int], **fields: Any) -> dict[str, Any]:
    response = client.post(
        "/completion", json={"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True, **fields}
    )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def act(client: httpx.Client, number: int | str, action: str, **body: Any) -> httpx.Response:
    return client.post(f"/slots/{number}", params={"action": action}, json=body or None)


def test_what_ran_in_a_slot_is_saved_and_found_by_the_next_server(slots: httpx.Client, folder: Path) -> None:
    """In another slot of another server only the difference is computed."""
    assert complete(slots, FRANCE, id_slot=1)["id_slot"] == 1
    saved = act(slots, 1, "save", filename="france.bin").json()
    assert (saved["id_slot"], saved["filename"]) == (1, "france.bin")
    assert saved["n_saved"] >= len(FRANCE)
    assert saved["n_written"] == (folder / "france.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    with start(folder) as other, other.client() as client:
        restored = act(client, 0, "restore", filename="france.bin").json()
        assert (restored["id_slot"], restored["n_read"]) == (0, saved["n_written"])
        assert restored["n_restored"] >= len(FRANCE)
        timings = complete(client, GERMANY, id_slot=0)["timings"]
        assert (timings["cache_n"], timings["prompt_n"]) == (34, 6)


def test_slots_and_files_belong_to_a_tenant(tmp_path: Path) -> None:
    """Another one's number holds nothing, and its file is not there, whatever it is called; nor for a key without a tenant."""
    keys = (ApiKey(secret="first", tenant="one"), ApiKey(secret="second", tenant="two"), ApiKey(secret="third"))
    settings = ServerSettings(engine_options={**DEMO_ENGINE, "state_folder": tmp_path}, api_keys=keys)
    with RunningServer(settings) as running:
        one, two, none = (running.client(headers={"authorization": f"Bearer {key.secret}"}) for key in keys)
        with one, two, none:
            complete(one, FRANCE, id_slot=1)
            assert act(one, 1, "save", filename="mine").status_code == 200
            (path,) = (path for path in tmp_path.iterdir() if path.name != "key-usage.json")  # written now and then
            before = path.read_bytes()
            for other in (two, none):
                assert act(other, 1, "erase").json()["n_erased"] == 0
                complete(other, GERMANY, id_slot=1)
                for name in ("mine", path.name, path.name.upper()):
                    assert act(other, 1, "restore", filename=name).status_code == 400
                act(other, 1, "save", filename=path.name)
            assert path.read_bytes() == before
            assert act(one, 0, "restore", filename="mine").status_code == 200


def test_an_erased_slot_holds_nothing(slots: httpx.Client) -> None:
    """The response reports how much it held; then there is nothing to save."""
    completion = complete(slots, FRANCE, id_slot=2)
    erased = act(slots, 2, "erase").json()
    assert erased == {"id_slot": 2, "n_erased": len(FRANCE) + completion["tokens_predicted"]}
    assert act(slots, 2, "erase").json()["n_erased"] == 0
    for body in (b"", b"{}", b'{"filename": null}'):
        assert slots.post("/slots/2?action=erase", content=body).json() == {"id_slot": 2, "n_erased": 0}
        refused = slots.post("/slots/2?action=restore", content=body)
        assert (refused.status_code, "filename must be given" in refused.text) == (400, True)
    assert act(slots, 2, "save", filename="nothing.bin").status_code == 400


def test_a_slot_is_chosen_where_none_is_named(slots: httpx.Client) -> None:
    """The response names it; numbers beyond the last begin again."""
    assert complete(slots, FRANCE)["id_slot"] in range(4)
    assert complete(slots, FRANCE, id_slot=7)["id_slot"] == 3


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc/passwd", "a\\b", "a\0b", "x" * 200, ".hidden"])
def test_a_name_is_no_path(slots: httpx.Client, folder: Path, name: str) -> None:
    """Nothing outside of the folder is written or read."""
    complete(slots, FRANCE, id_slot=0)
    before = sorted(path.name for path in folder.parent.rglob("*"))
    for action in ("save", "restore"):
        response = act(slots, 0, action, filename=name)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert sorted(path.name for path in folder.parent.rglob("*")) == before


def test_a_file_that_is_none_is_refused(slots: httpx.Client, folder: Path) -> None:
    """Whether it does not exist or is not a saved slot; the error names no folder."""
    (folder / "damaged.bin").write_bytes(b"no state")
    for name in ("missing.bin", "damaged.bin"):
        response = act(slots, 0, "restore", filename=name)
        assert response.status_code == 400
        assert "Unable to restore slot" in response.json()["error"]["message"]
        assert str(folder) not in response.text


@pytest.mark.parametrize(
    ("number", "action", "body"),
    [
        ("x", "save", {"filename": "a"}),
        ("-1", "save", {"filename": "a"}),
        ("0", "", {"filename": "a"}),
        ("0", "delete", {"filename": "a"}),
        ("0", "save", {}),
        ("0", "save", {"filename": 3}),
        ("0", "restore", {}),
    ],
)
def test_invalid_action_on_a_slot_is_refused(
    slots: httpx.Client, number: str, action: str, body: dict[str, Any]
) -> None:
    """In llama-server's shape."""
    response = act(slots, number, action, **body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_idle_slots_are_listed_without_what_they_do(client: httpx.Client) -> None:
    """One for each that the engine has."""
    found = client.get("/slots").json()
    assert [slot["id"] for slot in found] == [0, 1, 2, 3]
    assert all(slot["n_ctx"] == 1024 and not slot["speculative"] for slot in found)


def test_drafts_are_shown_under_llama_servers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter, in slots and settings; the number of drafts of a request, in its timings; none if it wants none."""
    force_depths(monkeypatch, 4)  # on a busy machine drafts may not pay
    drafting = {**DEMO_ENGINE, "speculation": "tests.drafters:LastAgain,ngram"}
    with RunningServer(ServerSettings(engine_options=drafting)) as running, running.client() as client:
        assert all(slot["speculative"] for slot in client.get("/slots").json())
        shown = client.get("/props").json()["default_generation_settings"]["params"]["speculative.types"]
        assert shown == "tests.drafters:LastAgain,ngram-simple"
        again = {"n_predict": 20, "logit_bias": [[97, 100.0]]}
        found = complete(client, [97] * 8, **again)
        assert found["generation_settings"]["speculative.types"] == shown
        assert 0 < found["timings"]["draft_n_accepted"] <= found["timings"]["draft_n"]
        without = complete(client, [97] * 8, **again, **{"speculative.n_max": 0, "speculative.n_min": 2})
        assert "draft_n" not in without["timings"]
        assert without["generation_settings"]["speculative.types"] == "none"
        assert [warning.split()[0] for warning in without["warnings"]] == ["speculative.n_min"]
        assert without["content"] == found["content"]


def listed(server: RunningServer, monkeypatch: pytest.MonkeyPatch, *slots: SlotView) -> None:
    """Make the engine report these as its slots from now on."""

    def snapshot() -> Future[SlotsSnapshot]:
        response: Future[SlotsSnapshot] = Future()
        response.set_result(SlotsSnapshot(slots, 0))
        return response

    monkeypatch.setattr(server.engine, "ask_slots", snapshot)


BUSY = SlotView(
    id=0,
    state="decoding",
    key=7,
    num_prompt_tokens=9,
    num_cached=4,
    num_computed_tokens=11,
    num_generated=3,
    max_tokens=5,
    cached_from="disk",
)


def test_a_running_slot_shows_its_request(
    client: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under llama-server's names."""
    listed(server, monkeypatch, BUSY, SlotView(id=1))
    busy, idle = client.get("/slots", params={"fail_on_no_slot": 1}).json()
    assert busy == {
        "id": 0, "n_ctx": 1024, "speculative": False, "is_processing": True, "id_task": 7, "n_prompt_tokens": 11,
        "n_prompt_tokens_processed": 5, "n_prompt_tokens_cache": 4, "cached_from": "disk",
        "next_token": [{"has_next_token": True, "has_new_line": False, "n_remain": 2, "n_decoded": 3}],
    }  # fmt: skip
    assert idle["is_processing"] is False


def test_with_every_slot_taken_there_is_none(
    client: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that asks for a free slot is refused; one that only looks is not."""
    listed(server, monkeypatch, BUSY)
    response = client.get("/slots", params={"fail_on_no_slot": 1})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
    assert client.get("/slots").status_code == 200


def test_a_slot_shows_the_settings_of_its_request(client: httpx.Client) -> None:
    """Tried until the look falls into a request's life."""
    body = {"prompt": [5], "n_predict": -1, "ignore_eos": True, "stream": True}
    found: list[dict[str, Any]] = []
    for _ in range(50):
        with client.stream("POST", "/completion", json=body) as response:
            lines = response.iter_lines()  # kept: dropping it disconnects
            next(lines)
            with httpx.Client(base_url=client.base_url) as other:
                found = [slot["params"] for slot in other.get("/slots").json() if "params" in slot]
        if found:
            break
    assert found[0]["ignore_eos"] is True


def test_endpoints_that_are_off_say_so() -> None:
    """The response is llama-server's: 501, with the flag that turns them on."""
    settings = ServerSettings(engine_options=DEMO_ENGINE, slots=False, props=False)
    with RunningServer(settings) as running, running.client() as client:
        for response, flag in (
            (client.get("/slots"), "--slots"),
            (client.post("/props", json={}), "--props"),
            (act(client, 0, "erase"), "--slot-save-path"),
        ):
            assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")
            assert flag in response.json()["error"]["message"]
