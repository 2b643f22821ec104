"""`FakeEngineClient`: the double of an engine for tests of code that holds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine import EngineClient
from paceline.errors import EngineStopped, InvalidParams, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.testing import FakeEngineClient

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)


def text_of(engine: EngineClient, prompt: str) -> str:
    channel = engine.accept(engine.prepare(prompt, PARAMS, RequestOptions()))
    return "".join(chunk.text for chunk in channel)


def test_it_serves_requests_like_an_engine() -> None:
    """The same prompt gives the same text; slots, statistics and heartbeat are an engine's; closed, it refuses."""
    engine = FakeEngineClient()
    assert text_of(engine, "hello") == text_of(engine, "hello")
    assert engine.slots().num_waiting == 0
    assert engine.stats().completed == 2
    assert engine.heartbeat().is_alive
    assert len(engine.embed(["a", "b"], None, RequestOptions()).result(60)) == 2
    engine.close()
    assert engine.is_closed
    with pytest.raises(EngineStopped):
        engine.prepare("hello", PARAMS, RequestOptions())


def test_a_wrong_request_is_refused_and_the_next_one_is_served() -> None:
    """An empty prompt is refused as by any engine."""
    engine = FakeEngineClient()
    with pytest.raises(InvalidParams):
        engine.prepare([], PARAMS, RequestOptions())
    assert len(text_of(engine, "hello")) >= 1
    engine.close()


ended: list[int] = []


class SharingNgrams(NgramDrafter):
    def begin_shared(self, key: int, token_ids: Sequence[int], _namespace: object) -> None:
        self.begin(key, token_ids)

    def end(self, key: int) -> None:
        super().end(key)
        ended.append(key)


def test_it_drafts_with_the_drafter_of_its_config() -> None:
    """It gets the tokens of every sequence, within the config's limits; draft heads have no model to follow."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    drafter: Any = SharingNgrams(size_n=3)
    plain, engine = (
        FakeEngineClient(),
        FakeEngineClient(config=EngineConfig(speculation=drafter, max_draft=4)),
    )
    for _ in range(2):
        texts = [
            "".join(chunk.text for chunk in item.accept(item.prepare("hello", params, RequestOptions())))
            for item in (plain, engine)
        ]
        assert texts[0] == texts[1]
    assert engine.limits.max_draft == 4
    plain.close()
    engine.close()
    assert len(ended) == 2
    with pytest.raises(Unsupported, match="'ngram'"):
        FakeEngineClient(config=EngineConfig(speculation="mtp"))
