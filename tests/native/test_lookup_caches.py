"""Lookup caches on the demo model: what one engine has learned, the next one drafts from; a static one, in llama.cpp's format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tests.exact import EXACT, EXACT_FLAGS
from tests.server.running import RunningServer

from paceline import LLM
from paceline.errors import InvalidParams
from paceline.server.flags import DiskFiles, resolve
from paceline.speculation.depth_chooser import DepthChooser

pytestmark = pytest.mark.native

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
ENGINE: dict[str, Any] = {**EXACT, "num_slots": 2, "n_ctx": 1024}


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence gets drafts, whatever they cost; in this process."""

    def choose(self: Any, candidates: Any, rows: Any, num_cells: int, most: int, *_: int) -> list[int]:
        return [min(cap, 4, most // len(candidates)) for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_next_engine_drafts_what_the_one_before_has_learned(tmp_path: Path, isolation: str) -> None:
    """The file is written when it is closed, and holds all of its requests; the text stays the same."""
    path = tmp_path / "dynamic.bin"
    speculation = {"name": "ngram-cache", "lookup_cache_dynamic": str(path)}
    with LLM(speculation=speculation, isolation=isolation, **ENGINE) as llm:
        alone = llm.generate(PROMPT, **GREEDY)
        for index in range(3):
            assert llm.generate(PROMPT, **GREEDY).token_ids == alone.token_ids, index
    assert path.stat().st_size > 60 * 28
    with LLM(speculation=speculation, **ENGINE) as llm:
        found = llm.generate(PROMPT, **GREEDY)
        assert found.token_ids == alone.token_ids
        assert found.usage.accepted_tokens > 25
        tenant = llm.generate(PROMPT, tenant="other", **GREEDY)
        assert tenant.usage.accepted_tokens < 10


def test_a_server_drafts_from_a_static_file(tmp_path: Path) -> None:
    """For every tenant, from its first request on."""
    with LLM(**ENGINE) as llm:
        alone = llm.generate(PROMPT, cache_prompt=False, **GREEDY)
        tokens = [*llm.tokenizer.encode(PROMPT), *alone.token_ids]
    pairs = {(token, two): three for token, two, three in zip(tokens, tokens[1:], tokens[2:], strict=False)}
    path = tmp_path / "static.bin"
    path.write_bytes(b"".join(struct.pack("7i", *pair, -1, -1, 1, token, 5) for pair, token in pairs.items()))
    flags = [
        "--spec-type",
        "ngram-cache",
        "-lcs",
        str(path),
        "--isolation",
        "thread",
        "-np",
        "1",
        "-c",
        "1024",
        *EXACT_FLAGS,
    ]
    settings = resolve(flags, {}, DiskFiles(print)).settings
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    with RunningServer(settings) as running, running.client() as client:
        found = client.post("/completion", json=body).json()
        assert found["tokens"] == list(alone.token_ids)
        assert found["timings"]["draft_n_accepted"] > 15


def test_a_file_of_another_model_is_refused_and_the_next_engine_is_made(tmp_path: Path) -> None:
    """With the reason, and nothing left of the one that was loaded."""
    path = tmp_path / "static.bin"
    path.write_bytes(struct.pack("7i", 1, 2, -1, -1, 1, 900_000, 5))
    for isolation in ("thread", "process"):
        with pytest.raises(InvalidParams, match="has token 900000, and the model's vocabulary has"):
            LLM(speculation=f"ngram-cache:lookup_cache_static={path}", isolation=isolation, **ENGINE)
    with LLM(speculation="ngram-cache", **ENGINE) as llm:
        assert len(llm.generate(PROMPT, **GREEDY).token_ids) == 60
