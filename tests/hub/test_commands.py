"""`paceline pull`, `list`, `show`, `rm`, `prune` over a hub of our own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tests.hub.stand_in_hub import TOKEN, Fault, StandInHub, gguf, sha256
from typer.testing import CliRunner

from paceline.cli.app import build_app
from paceline.hub.caches import find_leftovers, remove_leftovers
from paceline.hub.references import hub_settings

PULL = [sys.executable, "-m", "paceline", "pull"]


def invoke(*args: str) -> Any:
    return CliRunner().invoke(build_app(), list(args), prog_name="paceline")


def put_ollama(home: Path, name: str, data: bytes) -> Path:
    """A model as Ollama stores it."""
    models = home / ".ollama" / "models"
    blob = models / "blobs" / f"sha256-{sha256(data)}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    manifest = models / "manifests" / "registry.ollama.ai" / "library" / name.replace(":", "/")
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{sha256(data)}", "size": len(data)}
    manifest.write_text(json.dumps({"layers": [layer]}))
    return blob


def test_pull_writes_the_paths(hub: StandInHub) -> None:
    """On stdout, one a line, the file to load first; the choice is reported on stderr."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf", "mmproj-F16.gguf")
    result = invoke("pull", "user/tiny")
    model, projector = result.stdout.splitlines()
    assert Path(model).read_bytes() == gguf("tiny-Q4_K_M.gguf")
    assert Path(projector).name == "mmproj-F16.gguf"
    assert "Q4_K_M is the default" in result.stderr
    assert invoke("pull", "hf:user/tiny:Q4_K_M", "--no-mmproj").stdout == f"{model}\n"
    quiet = invoke("pull", "user/tiny", "--hf-file", "tiny-Q4_K_M.gguf", "-q", "--no-mmproj")
    assert (quiet.stdout, quiet.stderr) == (f"{model}\n", "")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nothing"], 2, "hf:USER/REPO"),
        (["llama3.2"], 2, "is downloaded by `ollama pull llama3.2`, and named ollama:llama3.2"),
        (["a/b/c"], 2, "write hf:USER/REPO, hf:USER/REPO:QUANT or hf:USER/REPO/FILE.gguf, such as"),
        (["user/none"], 1, "did you mean user/tiny"),
        (["user/tiny:Q2_K"], 1, "did you mean Q4_K_M"),
        (["user/tiny", "--hf-file", "x.gguf"], 1, "no file 'x.gguf'"),
        (["user/tiny", "--hf-file", "../x.gguf"], 2, "--hf-file"),
        (["ollama:x", "--hf-file", "x.gguf"], 2, "--hf-file"),
        (["user/gated"], 1, "HF_TOKEN"),
        (["user/tiny", "--offline"], 1, "offline"),
        (["ollama:llama3"], 1, "Ollama has no model"),
    ],
)
def test_pull_reports_errors(hub: StandInHub, args: list[str], code: int, words: str) -> None:
    """One line on stderr and an exit code."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.add("user/gated", "m-Q4_K_M.gguf", gated=True)
    result = invoke("pull", *args)
    assert result.exit_code == code
    assert words in result.stderr
    assert TOKEN not in result.stderr
    assert result.stdout == ""


def test_an_interrupted_pull_keeps_its_part_and_the_next_one_continues(hub: StandInHub, tmp_path: Path) -> None:
    """Ctrl-C: exit code 130."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    hub.fail("cdn", Fault(cut_after=20_000), *[Fault(status=503, headers={"Retry-After": "30"})] * 3)
    process = subprocess.Popen(
        [*PULL, "user/tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ.copy()
    )
    until = time.monotonic() + 30
    while len(hub.requests("cdn")) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert b"was stopped; the next one continues it" in errors
    (part,) = tmp_path.rglob("*.incomplete")
    assert part.stat().st_size == 20_000
    hub.faults.clear()
    hub.seen.clear()
    assert invoke("pull", "user/tiny").exit_code == 0
    assert [each.headers["range"] for each in hub.requests("cdn")] == ["bytes=20000-"]


def test_two_processes_that_pull_the_same_download_it_once(hub: StandInHub) -> None:
    """The lock is huggingface_hub's."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    started = [subprocess.Popen([*PULL, "user/tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    written = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(set(written)) == 1
    assert len(hub.requests("cdn")) == 1


def test_list_finds_the_models_of_every_program(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that load them, with sizes; half a model is none."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf")
    hub.add("user/big", *(f"big-Q8_0-0000{index}-of-00002.gguf" for index in (1, 2)))
    invoke("pull", "user/tiny")
    invoke("pull", "user/big")
    put_ollama(tmp_path, "llama3.2:1b", gguf("llama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "user_old_old-Q4_0.gguf").write_bytes(gguf("old"))
    (tmp_path / "llama" / "half-00001-of-00002.gguf").write_bytes(gguf("half"))
    records = json.loads(invoke("list", "--json").stdout)
    assert [(each["name"], each["size"], each["source"]) for each in records] == [
        ("hf:user/big:Q8_0", 100_000, "huggingface"),
        ("hf:user/tiny:Q4_K_M", 50_000, "huggingface"),
        (str(tmp_path / "llama" / "user_old_old-Q4_0.gguf"), 50_000, "llama.cpp"),
        ("ollama:llama3.2:1b", 50_000, "ollama"),
    ]
    table = invoke("list").stdout.splitlines()
    assert table[0].split() == ["NAME", "SIZE", "DOWNLOADED", "BY"]
    assert table[2].startswith("hf:user/tiny:Q4_K_M  ")
    assert "50 kB" in table[2]


def test_list_of_nothing_says_what_to_do(hub: StandInHub) -> None:
    """Not an empty table."""
    result = invoke("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "paceline pull" in result.stderr
    assert json.loads(invoke("list", "--json").stdout) == []


def test_rm_removes_a_quantisation_or_a_repository(hub: StandInHub, tmp_path: Path) -> None:
    """And no other; the last one takes the folder along."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny-Q6_K.gguf")
    for quantisation in ("Q4_K_M", "Q8_0", "Q6_K"):
        invoke("pull", f"user/tiny:{quantisation}")
    would = invoke("rm", "user/tiny:q8_0", "--dry-run")
    assert would.stdout == "hf:user/tiny:Q8_0\n"
    assert "50 kB would be free; nothing was removed" in would.stderr
    removed = invoke("rm", "user/tiny:q8_0")
    assert removed.stdout == "hf:user/tiny:Q8_0\n"
    assert "50 kB are free" in removed.stderr
    names = [each["name"] for each in json.loads(invoke("list", "--json").stdout)]
    assert names == ["hf:user/tiny:Q4_K_M", "hf:user/tiny:Q6_K"]
    folder = tmp_path / "hf" / "hub" / "models--user--tiny"
    assert len(list((folder / "blobs").iterdir())) == 2
    missing = invoke("rm", "user/tiny:Q8_0")
    assert missing.exit_code == 1
    assert "hf:user/tiny:Q6_K" in missing.stderr
    assert len(invoke("rm", "user/tiny").stdout.splitlines()) == 2
    assert not folder.exists()


def test_rm_keeps_what_another_version_has_and_what_is_being_downloaded(hub: StandInHub, tmp_path: Path) -> None:
    """A content of two snapshots, a part of another download, files of other programs."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    invoke("pull", "user/tiny")
    repo.files["README.md"] = b"new"
    new = Path(invoke("pull", "user/tiny").stdout.strip())
    old = next(path for path in tmp_path.rglob("snapshots/*/tiny-Q4_K_M.gguf") if path != new)
    (new.parents[2] / "blobs" / "config").write_bytes(b"of another program")
    assert invoke("rm", f"user/tiny@{old.parent.name}").exit_code == 0
    assert not old.exists()
    assert new.read_bytes() == gguf("tiny-Q4_K_M.gguf")
    part = new.parents[2] / "blobs" / "abc.incomplete"
    part.write_bytes(b"arriving")
    assert invoke("rm", "user/tiny").exit_code == 0
    assert not new.exists()
    assert part.exists()


def test_rm_leaves_ollamas_models_to_ollama(hub: StandInHub, tmp_path: Path) -> None:
    """Its database would not know."""
    blob = put_ollama(tmp_path, "llama3.2:latest", gguf("llama"))
    result = invoke("rm", "ollama:llama3.2")
    assert result.exit_code == 1
    assert "ollama rm llama3.2" in result.stderr
    assert blob.is_file()
    assert invoke("pull", "ollama:llama3.2").stdout == f"{blob}\n"


def test_prune_removes_parts_and_replaced_versions(hub: StandInHub, tmp_path: Path) -> None:
    """Neither running downloads, nor other programs' files in the same cache."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    invoke("pull", "user/tiny")
    repo.files["tiny-Q4_K_M.gguf"] = gguf("newer")
    current = Path(invoke("pull", "user/tiny").stdout.strip())
    cache = tmp_path / "hf" / "hub"
    part = cache / "models--user--tiny" / "blobs" / "abc.incomplete"
    fresh = part.with_name("def.incomplete")
    other = cache / "models--user--bert" / "blobs" / "weights"
    for path in (part, fresh, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    old = time.time() - 3600
    for path in cache.rglob("blobs/*"):
        if path != fresh:
            os.utime(path, (old, old))
    would = invoke("prune", "--dry-run").stdout.splitlines()
    assert part.exists()
    done = invoke("prune")
    assert done.stdout.splitlines() == would
    assert "51 kB" in done.stderr
    assert not part.exists()
    assert fresh.exists()
    assert other.exists()
    assert current.read_bytes() == gguf("newer")
    assert [each["name"] for each in json.loads(invoke("list", "--json").stdout)] == ["hf:user/tiny:Q4_K_M"]
    nothing = invoke("prune")
    assert nothing.stdout == ""
    assert "nothing to remove" in nothing.stderr


@pytest.mark.parametrize("kind", ["cdn", "file"])
def test_prune_and_rm_leave_a_download_that_runs(hub: StandInHub, tmp_path: Path, kind: str) -> None:
    """However long it has been waiting for bytes: its lock is held."""
    hub.add("user/tiny", "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")
    hub.files["m.gguf"] = gguf("m")
    invoke("pull", "user/tiny:Q8_0")
    held = threading.Event()
    hub.fail(kind, Fault(cut_after=20_000, held=held))
    name = "user/tiny:Q4_K_M" if kind == "cdn" else f"{hub.url}/files/m.gguf"
    process = subprocess.Popen([*PULL, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not (parts := [part for part in tmp_path.rglob("*.incomplete") if part.stat().st_size]):
        assert time.monotonic() < until
        time.sleep(0.02)
    old = time.time() - 3600
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()):
        os.utime(path, (old, old))
    assert invoke("prune", "--dry-run").stdout == invoke("prune").stdout == ""
    assert invoke("rm", "user/tiny").exit_code == 0
    assert parts[0].exists()
    held.set()
    written, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert Path(written.strip()).read_bytes() == gguf("tiny-Q4_K_M.gguf" if kind == "cdn" else "m")
    assert "anew" not in errors


def test_what_a_download_has_taken_up_meanwhile_is_not_removed(hub: StandInHub, tmp_path: Path) -> None:
    """Between the search and the removal."""
    blobs = tmp_path / "hf" / "hub" / "models--user--tiny" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / "abc.incomplete"
    part.write_bytes(b"x" * 1000)
    old = time.time() - 3600
    os.utime(part, (old, old))
    found = find_leftovers(hub_settings())
    assert [each.path for each in found] == [part]
    lock = tmp_path / "hf" / "hub" / ".locks" / "models--user--tiny" / "abc.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        assert find_leftovers(hub_settings()) == []
        assert remove_leftovers(found) == []
        assert part.exists()
    assert remove_leftovers(found) == found
    assert not part.exists()


def test_files_of_older_versions_of_llama_cpp_are_shown_and_removed(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the path that `list` writes, or by repository and file; with llama.cpp's files beside them."""
    cache = tmp_path / "llama"
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    cache.mkdir()
    names = ["user_old_old-Q4_0.gguf", "user_old_old-Q8_0.gguf", *(f"a_b_c-0000{n}-of-00002.gguf" for n in (1, 2))]
    for name in names:
        (cache / name).write_bytes(gguf(name))
        (cache / f"{name}.json").write_text("{}")
    other = tmp_path / "mine.gguf"
    other.write_bytes(gguf("mine"))
    listed = [each["name"] for each in json.loads(invoke("list", "--json").stdout)]
    assert listed == [str(cache / name) for name in sorted(names) if "00002-of" not in name]
    assert json.loads(invoke("show", listed[0], "--json").stdout)[0]["downloaded_by"] == "llama.cpp"
    removed = invoke("rm", str(cache / names[0]))
    assert removed.stdout == f"{cache / names[0]}\n"
    assert "50 kB" in removed.stderr
    assert invoke("rm", "user/old/old-Q8_0.gguf").exit_code == 0
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        f"{name}{end}" for name in names[2:] for end in ("", ".json")
    )
    assert invoke("rm", str(cache / names[2])).exit_code == 0
    assert list(cache.iterdir()) == []
    for path in (other, cache / names[0]):
        refused = invoke("rm", str(path))
        assert refused.exit_code == 1
        assert f"no cache has {path}" in refused.stderr
    assert other.exists()
    for command in ("rm", "show"):
        refused = invoke(command, str(other))
        assert refused.stderr.endswith(f", a file outside the caches; `paceline info {other}` shows it\n")


def test_files_of_urls_are_shown_and_removed_by_their_url(hub: StandInHub, tmp_path: Path) -> None:
    """With the files beside them."""
    hub.files["tiny.gguf"], hub.tags["tiny.gguf"] = gguf("tiny"), '"1"'
    url = f"{hub.url}/files/tiny.gguf"
    path = Path(invoke("pull", url).stdout.strip())
    assert json.loads(invoke("show", url, "--json").stdout)[0]["parts"] == [str(path)]
    removed = invoke("rm", url)
    assert removed.stdout == f"{path}\n"
    assert "50 kB" in removed.stderr
    assert not list(path.parent.glob("tiny*"))
    assert invoke("rm", url).exit_code != 0


def test_rm_takes_the_projector_with_the_last_model(hub: StandInHub, tmp_path: Path) -> None:
    """Nothing lists it alone, so nothing else would remove it."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf")
    invoke("pull", "user/tiny")
    invoke("pull", "user/tiny:Q8_0")
    folder = tmp_path / "hf" / "hub" / "models--user--tiny"
    assert "50 kB" in invoke("rm", "user/tiny:Q8_0").stderr
    assert len(list(folder.rglob("snapshots/*/mmproj-F16.gguf"))) == 1
    assert "100 kB" in invoke("rm", "user/tiny:Q4_K_M").stderr
    assert not folder.exists()


def test_a_revision_names_what_was_downloaded_of_it(hub: StandInHub) -> None:
    """A branch or a commit, also if it is the current one."""
    repo = hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    invoke("pull", "user/tiny")
    for revision in ("main", repo.commit):
        shown = invoke("rm", f"user/tiny@{revision}", "--dry-run")
        assert shown.stdout == "hf:user/tiny:Q4_K_M\n"
    assert invoke("rm", "user/tiny@other", "--dry-run").exit_code != 0
