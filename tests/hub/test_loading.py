"""Models by name in `LLM`, `AsyncLLM` and the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hub.stand_in_hub import TOKEN, Fault, StandInHub
from tests.hub.test_commands import invoke, put_ollama

from paceline import LLM, AsyncLLM, demo_model_path, estimate_memory
from paceline.engine import dry_run, memory_needs
from paceline.errors import HubUnavailable, InvalidParams, InvalidType, ModelLoadError, ModelNotFound, PacelineError
from paceline.hub import remote_header
from paceline.runtime import memory
from paceline.testing.models import LlamaSpec, write_split_model

pytestmark = pytest.mark.native


@pytest.fixture
def demo(hub: StandInHub) -> StandInHub:
    """A hub with the demo model in a repository."""
    hub.add("user/demo").files["demo-Q4_K_M.gguf"] = demo_model_path().read_bytes()
    return hub


def test_a_model_of_the_hub_is_loaded_by_its_name(demo: StandInHub) -> None:
    """The same text as from its path; the second time nothing is downloaded."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    with LLM(num_slots=1) as llm:
        expected = llm.generate("Once", **options).text
    for _ in range(2):
        with LLM("hf:user/demo", num_slots=1) as llm:
            assert llm.generate("Once", **options).text == expected
    assert len(demo.requests("cdn")) == 1
    demo.seen.clear()
    with LLM("hf:user/demo:Q4_K_M", num_slots=1, offline=True) as llm:
        assert llm.generate("Once", **options).text == expected
    assert demo.seen == []


async def started(*args: Any, **options: Any) -> None:
    async with AsyncLLM(*args, **options):
        pass


def test_async_llm_loads_by_name_too(demo: StandInHub) -> None:
    """The download runs in the thread that loads."""
    import asyncio

    asyncio.run(started("hf:user/demo", num_slots=1))
    assert len(demo.requests("cdn")) == 1
    with pytest.raises(ModelNotFound, match="did you mean user/demo"):
        asyncio.run(started("hf:user/dem"))


def test_run_downloads_a_repository_once(demo: StandInHub) -> None:
    """The name needs no scheme, and the answer is the same from the cache."""
    command = [sys.executable, "-m", "paceline", "run", "user/demo", "-t", "1", "-n", "60", "--temperature", "0", "Hi!"]
    first, second = (subprocess.run(command, capture_output=True, check=True, timeout=60) for _ in range(2))
    assert first.stdout == second.stdout != b"\n"
    assert len(demo.requests("cdn")) == 1
    command[4] = "user/dem"
    failed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "did you mean user/demo" in failed.stderr


def test_a_split_set_is_loaded_by_name(hub: StandInHub, tmp_path: Path) -> None:
    """All parts lie side by side."""
    parts = write_split_model(tmp_path / "tiny-Q8_0.gguf", LlamaSpec(), parts=2)
    hub.add("user/split").files.update({part.name: part.read_bytes() for part in parts})
    with LLM("hf:user/split", num_slots=1) as llm:
        assert llm.generate([1, 2, 3], max_tokens=2).token_ids


def test_ollamas_models_are_loaded_by_name(hub: StandInHub, tmp_path: Path) -> None:
    """From the file that Ollama has."""
    put_ollama(tmp_path, "demo:latest", demo_model_path().read_bytes())
    with LLM("ollama:demo", num_slots=1) as llm:
        assert llm.generate("Once", max_tokens=2).text
    assert hub.seen == []


def test_a_worker_process_gets_the_file(demo: StandInHub) -> None:
    """The name is resolved once, before the worker starts."""
    with LLM("hf:user/demo", num_slots=1, isolation="process") as llm:
        assert llm.generate("Once", max_tokens=2).text
    assert len(demo.requests("cdn")) == 1


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_wrong_options_are_refused_at_once(hub: StandInHub, kind: Any) -> None:
    """Before anything is requested."""
    with pytest.raises(InvalidParams, match="hf:USER/REPO"):
        kind("hf:demo")
    with pytest.raises(InvalidType, match="offline"):
        kind("hf:user/demo", offline="yes")
    with pytest.raises(InvalidType, match="hf_token"):
        kind("hf:user/demo", hf_token=3)
    with pytest.raises(InvalidParams, match="num_slots"):
        kind("hf:user/demo", num_slotz=3)
    assert hub.seen == []


def test_a_repository_without_the_scheme_is_a_path(hub: StandInHub) -> None:
    """The error has the right spelling."""
    with pytest.raises(ModelLoadError, match="hf:user/demo"):
        LLM("user/demo")
    assert hub.seen == []


def test_commands_take_names_for_m(demo: StandInHub) -> None:
    """As `paceline tokenize -m hf:...`."""
    by_path = invoke("tokenize", "Once upon", "--ids")
    by_name = invoke("tokenize", "Once upon", "--ids", "-m", "hf:user/demo")
    assert by_name.exit_code == 0
    assert by_name.stdout == by_path.stdout
    assert "demo-Q4_K_M.gguf" in by_name.stderr


def test_show_reads_the_header(demo: StandInHub) -> None:
    """The facts that a person wants before loading it."""
    invoke("pull", "user/demo")
    (facts,) = json.loads(invoke("show", "user/demo", "--json").stdout)
    assert facts["architecture"] == "llama"
    assert facts["quantisation"] == "Q4_K_M"
    assert facts["context"] > 0
    text = invoke("show", "user/demo").stdout
    assert text.startswith("hf:user/demo:Q4_K_M\n")
    assert "demo-Q4_K_M.gguf" in text


def test_show_asks_the_hub_about_what_is_not_here(demo: StandInHub, tmp_path: Path) -> None:
    """The header alone is requested, and nothing is kept."""
    files = demo.repos["user/demo"].files
    files["demo-Q8_0.gguf"] = files["demo-Q4_K_M.gguf"]
    files["mmproj-F16.gguf"] = b"GGUF"
    (facts,) = json.loads(invoke("show", "user/demo", "--json").stdout)
    assert facts["name"] == "hf:user/demo:Q4_K_M"
    assert facts["architecture"] == "llama"
    assert facts["context"] > 0
    assert facts["quantisations"] == "Q4_K_M, Q8_0"
    assert facts["projector"] == "yes"
    assert facts["parts"] == ["demo-Q4_K_M.gguf"]
    assert [each.headers["range"] for each in demo.requests("cdn")] == [f"bytes=0-{(1 << 20) - 1}"]
    assert not (tmp_path / "hf" / "hub").exists()
    assert "offline" not in invoke("show", "user/demo:Q2_K").stderr
    assert invoke("show", "user/demo", "--offline").exit_code == 1
    assert invoke("show", "user/none").exit_code == 1


def test_a_header_longer_than_the_first_request_is_read_whole(
    demo: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More bytes are asked for until it is."""
    monkeypatch.setattr("paceline.hub.remote_header._FIRST_BYTES", 100)
    (facts,) = json.loads(invoke("show", "user/demo", "--json").stdout)
    assert facts["architecture"] == "llama"
    assert [each.headers["range"] for each in demo.requests("cdn")][:2] == ["bytes=0-99", "bytes=0-799"]


def test_names_cost_programs_without_them_nothing() -> None:
    """Neither the hub's library nor a network's is loaded for a path."""
    code = (
        "import sys, paceline; paceline.LLM(num_slots=1).close();"
        "print([m for m in ('huggingface_hub', 'httpx', 'httpx2', 'filelock', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_damaged_header_is_not_sought_in_all_of_the_file(demo: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for more stop far from the size of a model."""
    asked: list[int] = []

    def damaged(file: object, count: int, *_: object) -> tuple[bytes, int]:
        asked.append(count)
        return b"GGUF" + b"\xff" * (count - 4), 40 << 30

    monkeypatch.setattr(remote_header, "first_bytes", damaged)
    files = demo.repos["user/demo"].files
    listed = [{"rfilename": path, "size": 40 << 30, "blobId": "0" * 40} for path in files]
    monkeypatch.setattr(demo.repos["user/demo"], "listing", lambda: listed)
    result = invoke("show", "user/demo")
    assert result.exit_code != 0
    assert max(asked) <= 64 << 20


# ---- what a model would need


@pytest.mark.parametrize("by", ["repository", "url", "split set", "split set by url"])
def test_info_says_whether_a_model_of_the_network_would_fit(hub: StandInHub, tmp_path: Path, by: str) -> None:
    """By the plan of llama.cpp, as for a file that is here; the header alone is requested, and nothing is kept."""
    path = demo_model_path()
    files = [path]
    if by.startswith("split"):
        files = write_split_model(tmp_path / "demo-Q4_K_M.gguf", LlamaSpec(), parts=2)
        path = files[0]
    stored = {
        f"demo-Q4_K_M{file.name[file.name.find('-0000') :] if len(files) > 1 else '.gguf'}": file for file in files
    }
    contents = {name: file.read_bytes() for name, file in stored.items()}
    hub.add("user/demo").files.update(contents)
    hub.files.update(contents)
    name = "hf:user/demo" if "url" not in by else f"{hub.url}/files/{next(iter(stored))}"
    asked = ("-c", "2048", "-np", "2")
    here, there = (json.loads(invoke("info", model, "--json", *asked).stdout) for model in (str(path), name))
    assert there["memory"]["fitted"] is not None
    for facts in (here, there):
        for device in (*facts["memory"]["needed"]["devices"], *facts["memory"]["fitted"]["estimate"]["devices"]):
            device.pop("free_bytes")
        del facts["path"]
    assert there.pop("name") == ("hf:user/demo:Q4_K_M" if "url" not in by else name)
    assert there == here
    text = invoke("info", name, *asked)
    assert f"not downloaded: {next(iter(stored))}" in text.stdout
    assert "  fits    yes" in text.stdout
    requests = hub.requests("cdn" if "url" not in by else "file")
    assert len(requests) == 2 * len(stored)
    assert {each.headers["range"] for each in requests} == {f"bytes=0-{(1 << 20) - 1}"}
    assert not [each for each in (tmp_path / "hf", tmp_path / ".cache") if each.exists()]


def test_info_says_what_does_not_fit(demo: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with 10 MiB, before anything is downloaded."""
    for module in (memory_needs, memory):
        monkeypatch.setattr(module, "available_memory", lambda: 10 << 20)
    monkeypatch.setattr(memory_needs, "plan", dry_run.answer)
    facts = json.loads(invoke("info", "hf:user/demo", "--json", "-c", "8192").stdout)
    assert facts["memory"]["fitted"] is None
    assert "are free" in facts["memory"]["note"]
    assert "no: the model needs" in invoke("info", "hf:user/demo", "-c", "8192").stdout
    assert not (tmp_path / "hf" / "hub").exists()


def test_info_of_what_is_here_requests_no_header(demo: StandInHub, tmp_path: Path) -> None:
    """The hub is asked which file is meant; offline, nothing is asked."""
    path = Path(invoke("pull", "user/demo").stdout.strip())
    demo.files["demo.gguf"] = demo_model_path().read_bytes()
    by_url = Path(invoke("pull", f"{demo.url}/files/demo.gguf").stdout.strip())
    blob = put_ollama(tmp_path, "demo:latest", demo_model_path().read_bytes())
    demo.seen.clear()
    for name, place in (("hf:user/demo", path), (f"{demo.url}/files/demo.gguf", by_url), ("ollama:demo", blob)):
        assert json.loads(invoke("info", name, "--json").stdout)["path"] == str(place)
    assert [each.kind for each in demo.seen] == ["api"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:user/dem", "did you mean user/demo"),
        ("hf:user/demo:Q2_K", "no quantisation 'Q2_K'"),
        ("hf:demo", "hf:USER/REPO"),
        ("user/demo", "is named hf:user/demo"),
        ("ollama:none", "Ollama has no model"),
        ("{url}/files/none.gguf", "HTTP 404"),
        ("{url}/files/page.gguf", "not a GGUF file"),
        ("hf:user/gated", "HF_TOKEN"),
    ],
)
def test_info_and_show_report_an_invalid_name(demo: StandInHub, name: str, words: str) -> None:
    """One line, as `pull` does."""
    demo.add("user/gated", "m-Q4_K_M.gguf", gated=True)
    demo.files["page.gguf"] = b"<!DOCTYPE html>" + b" " * 100
    result = invoke("info", name.format(url=demo.url))
    assert result.exit_code != 0
    assert words in result.stderr
    assert result.stdout == ""
    with pytest.raises(PacelineError):
        estimate_memory(name.format(url=demo.url))


def test_estimates_are_made_by_name(demo: StandInHub, tmp_path: Path) -> None:
    """Of a repository, a URL and an Ollama name; with and without a dry run."""
    demo.files["demo.gguf"] = demo_model_path().read_bytes()
    put_ollama(tmp_path, "demo:latest", demo_model_path().read_bytes())
    sizes: dict[str, Any] = {"n_ctx": 2048, "num_slots": 2}
    for planned in (True, False):
        expected = estimate_memory(demo_model_path(), dry_run=planned, **sizes)
        for name in ("hf:user/demo", f"{demo.url}/files/demo.gguf", "ollama:demo"):
            found = estimate_memory(name, dry_run=planned, **sizes)
            assert (found.total_bytes, found.cache_bytes) == (expected.total_bytes, expected.cache_bytes)
    assert not (tmp_path / "hf" / "hub").exists()
    with pytest.raises(ModelNotFound, match="offline"):
        estimate_memory("hf:user/demo", offline=True)
    with pytest.raises(ModelNotFound, match="offline"):
        estimate_memory(f"{demo.url}/files/demo.gguf", offline=True)


@pytest.mark.parametrize("model", [5, b"m.gguf", [], [5], {"a": 1}, 1.5])
def test_what_names_no_model_is_refused_by_an_estimate(model: Any) -> None:
    """By its type."""
    with pytest.raises(InvalidType, match="model"):
        estimate_memory(model)


def test_the_token_stays_at_the_hub_when_a_header_is_read(hub: StandInHub) -> None:
    """The servers that it redirects to get none."""
    hub.add("user/gated", gated=True).files["demo-Q4_K_M.gguf"] = demo_model_path().read_bytes()
    assert estimate_memory("hf:user/gated", dry_run=False, hf_token=TOKEN).weights_bytes > 0
    sent = {each.kind: each.headers.get("authorization", each.headers.get("Authorization")) for each in hub.seen}
    assert sent == {"api": f"Bearer {TOKEN}", "resolve": f"Bearer {TOKEN}", "cdn": None}


def test_an_overloaded_server_of_headers_is_waited_for(demo: StandInHub) -> None:
    """As long as Retry-After says, if that is bearable."""
    demo.fail("cdn", Fault(status=429, headers={"Retry-After": "0"}), Fault(status=503, headers={"Retry-After": "0"}))
    assert estimate_memory("hf:user/demo", dry_run=False).weights_bytes > 0
    demo.fail("cdn", Fault(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(HubUnavailable, match="429.*try again later"):
        estimate_memory("hf:user/demo", dry_run=False)
