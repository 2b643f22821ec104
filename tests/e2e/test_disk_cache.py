"""The disk cache of `paceline serve` when its processes are killed in the middle of a write: every text is right."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.served import LONG_S, Served
from tests.exact import EXACT, EXACT_FLAGS, assert_same_but_for_near_ties

import paceline
from paceline.engine.disk_blocks import ModelFolder, files_of

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="sessions of processes as Linux has them"),
]

NUM_TOKENS = 8
FLAGS = (*EXACT_FLAGS, "-np", "2")

# Imported by each process that Python starts. In the write of that number to a file, the process writes a part of the bytes, and
# then kills itself, or the server and its worker; once.
KILLER = """
import os, signal, stat

plan = os.environ.get("KILLED_IN_A_WRITE")
if plan:
    number, percent, victim, mark = plan.split("|")
    write, left = os.write, int(number)

    def killed(handle, data):
        global left
        if stat.S_ISREG(os.fstat(handle).st_mode) and "disk-writer" in __import__("threading").current_thread().name:
            left -= 1
            if left == 0 and not os.path.exists(mark):
                write(handle, memoryview(data)[: len(data) * int(percent) // 100])
                open(mark, "x").close()
                os.killpg(0, signal.SIGKILL) if victim == "server" else os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, data)

    os.write = killed
"""


def part(length: int, seed: int) -> list[int]:
    return [(7 * number * number + 31 * seed + number) % 220 + 30 for number in range(length)]


class Folder:
    """A disk cache's folder, and the servers that use it one after another."""

    def __init__(self, path: Path, oracle: paceline.LLM) -> None:
        self.root, self._path, self._oracle = path / "kv", path, oracle
        (path / "sitecustomize.py").write_text(KILLER)

    def serve(self, number: int = 0, percent: int = 0, victim: str = "") -> Served:
        """Start a server. victim: "server" or "worker", killed in the write with this number, after a percentage of it."""
        plan = f"{number}|{percent}|{victim}|{self._path / f'killed-{number}-{percent}'}" if victim else ""
        path = os.pathsep.join((str(self._path), os.environ.get("PYTHONPATH", "")))
        flags = (*FLAGS, "--disk-cache", str(self.root))
        return Served(*flags, is_session=True, PYTHONPATH=path, KILLED_IN_A_WRITE=plan)

    def ask(self, served: Served, prompt: list[int]) -> dict[str, Any]:
        """Send a request, compare its text, and return the response. Raises `httpx.TransportError` if the server is killed."""
        body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        response = httpx.post(f"{served.url}/completion", json=body, timeout=LONG_S)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        alone = self._oracle.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        assert_same_but_for_near_ties(self._oracle, prompt, alone.token_ids, found["tokens"])
        return found

    def check_and_age(self) -> None:
        """Every file under a name is whole. The others look as if they were written long ago."""
        for file in files_of(self.root):
            if file.name is None:
                os.utime(file.path, (0, 0))
            else:
                ModelFolder(self.root, bytes.fromhex(file.model)).read(file.name)

    def num_left_behind(self) -> int:
        return sum(file.name is None for file in files_of(self.root))


@pytest.fixture(scope="module")
def oracle() -> Iterator[paceline.LLM]:
    """The same model without any cache."""
    with paceline.LLM(cache_prompt=False, num_slots=1, **EXACT) as llm:
        yield llm


def test_a_server_that_is_killed_in_a_write_continues_from_the_whole_files(
    oracle: paceline.LLM, tmp_path: Path
) -> None:
    """The server and its worker at once. The next server also deletes the file that was left behind."""
    folder, prompt = Folder(tmp_path, oracle), part(900, 0)
    with folder.serve(
        number=5, percent=50, victim="server"
    ) as served:  # facts, head and cells of one file, head of another
        folder.ask(served, prompt)
        served.signal(signal.SIGTERM)
        assert served.code() == -signal.SIGKILL
    assert folder.num_left_behind() == 1
    folder.check_and_age()
    num_whole = sum(file.name.num_cells for file in files_of(folder.root) if file.name is not None)
    assert 0 < num_whole < len(prompt)
    with folder.serve() as served:
        body = {"model": "x", "prompt": prompt, "max_tokens": 1}
        usage = httpx.post(f"{served.url}/v1/completions", json=body, timeout=LONG_S).json()["usage"]
        read = 'paceline_disk_cache_tokens_total{event="read"}'
        served.wait_until(lambda: served.metrics()[read] == num_whole, "the whole files are read")
        if served.metrics()['paceline_prefix_hits_total{source="disk"}']:  # in less time than computing takes
            assert usage["prompt_tokens_details"] == {"cached_tokens": num_whole, "cached_from": "disk"}
        folder.ask(served, prompt)
        served.wait_until(lambda: not folder.num_left_behind(), "the file of the killed process is deleted")


@pytest.mark.full
def test_a_running_server_finds_what_another_one_has_written(oracle: paceline.LLM, tmp_path: Path) -> None:
    """A request moves to another replica of the machine: neither of them is started anew."""
    folder, prompt = Folder(tmp_path, oracle), part(900, 0)
    with folder.serve() as one, folder.serve() as other:
        assert folder.ask(other, part(300, 1))["tokens_cached"] > 0  # it has looked into the folder before
        folder.ask(one, prompt)
        one.wait_until(
            lambda: one.metrics()['paceline_disk_cache_tokens_total{event="written"}'] >= len(prompt),
            "the idle server writes the prefix",
        )
        folder.ask(other, prompt)
        read = 'paceline_disk_cache_tokens_total{event="read"}'
        other.wait_until(lambda: other.metrics()[read] >= len(prompt), "its files are read")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [range(at, at + 5) for at in range(0, 50, 5)], ids=str)
def test_texts_are_right_whichever_process_is_killed_and_when(
    oracle: paceline.LLM, tmp_path: Path, seeds: range
) -> None:
    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
        run(random.Random(seed), Folder(tmp_path / str(seed), oracle))


def run(chance: random.Random, folder: Folder) -> None:
    """Two servers that are killed, and one that finds their files."""
    prompts = [
        [*part(chance.choice([100, 520]), chance.randrange(2)), *part(chance.choice([20, 140]), chance.randrange(3))]
        for _ in range(4)
    ]
    for _ in range(2):
        victim = chance.choice(["server", "worker", "at any time"])
        number, percent = chance.randrange(1, 12), chance.randrange(101)
        with folder.serve(number, percent, victim) if victim != "at any time" else folder.serve() as served:
            with suppress(httpx.TransportError):
                for _ in range(chance.randrange(1, 5)):
                    folder.ask(served, chance.choice(prompts))
            if victim == "at any time":
                os.killpg(served.pid, signal.SIGKILL)
            else:
                served.signal(signal.SIGTERM)  # it writes the rest, and may be killed in that
            served.code()
        folder.check_and_age()
    with folder.serve() as served:
        for prompt in prompts:
            folder.ask(served, prompt)
        assert served.metrics()['paceline_disk_cache_blocks_total{event="damaged"}'] == 0
        served.wait_until(lambda: not folder.num_left_behind(), "files of killed processes are deleted")
