"""How many shapes a token takes on its way from a row's output to the bytes of a chat chunk: by construction."""

from __future__ import annotations

import ast
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings

NUM_TOKENS = 200
OFTEN = NUM_TOKENS / 4  # a whole message is parsed less often; late readers get several tokens in a chunk
SHAPES = {
    "RowOutput",  # the row's output; may be of several tokens
    "StreamChunk",  # with its text
    "ChatChunk",  # with its part of the message; the dialect encodes that
}
PARTS = {
    "Delta",  # the envelope of a StreamChunk, with the key of its request
    "MessageDelta",  # of a ChatChunk
}
OF_THE_TICK = {"Row", "StepPlan", "PlanOutput", "SchedulerView", "TokenAllocation"}
OF_THE_VOCABULARY = {"TokenText"}  # made once for each token that is reported
REPORTS = {"RowRecord", "TickRecord"}  # for instruments


class Constructions:
    """Counts the records of the package that its code constructs, by the lines that run. Copies of a record do not count."""

    def __init__(self) -> None:
        self.is_on = False
        self.lines: Counter[tuple[str, int, bool]] = Counter()  # file, line, and whether of a lambda
        self._globals: dict[str, dict[str, Any]] = {}

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """See `sys.settrace`."""
        if not frame.f_globals.get("__name__", "").startswith("paceline."):
            return None
        path = frame.f_code.co_filename
        if self.is_on and event == "line" and not path.startswith("<"):  # else generated: the __init__ of a dataclass
            self.lines[path, frame.f_lineno, frame.f_code.co_name == "<lambda>"] += 1
            self._globals[path] = frame.f_globals
        return self.trace

    @contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """Trace the threads that begin meanwhile."""
        threading.settrace(self.trace)
        try:
            yield
        finally:
            threading.settrace(sys.gettrace())

    def counts(self) -> Counter[str]:
        """Return how many records of each class were constructed."""
        found: Counter[str] = Counter()
        for (path, line, in_lambda), count in self.lines.items():
            for name in calls(path).get((line, in_lambda), ()):
                made = self._globals[path].get(name)
                if isinstance(made, type) and (issubclass(made, msgspec.Struct) or dataclasses.is_dataclass(made)):
                    found[name] += count
        return found


@cache
def calls(path: str) -> dict[tuple[int, bool], list[str]]:
    """Return the names that a module calls, by line and whether a lambda calls them: its body may share a line with a call."""
    module = ast.parse(Path(path).read_text(encoding="utf-8"))
    in_lambdas = {part for node in ast.walk(module) if isinstance(node, ast.Lambda) for part in ast.walk(node.body)}
    found: dict[tuple[int, bool], list[str]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.setdefault((node.lineno, node in in_lambdas), []).append(node.func.id)
    return found


@pytest.mark.parametrize(
    ("asked", "more"),
    [
        pytest.param({}, set(), id="plain"),
        pytest.param({"stop": ["\u00a7\u00a7"]}, set(), id="stop"),
        pytest.param(
            {"logprobs": True, "top_logprobs": 2}, {"TokenLogprobs", "ChatLogprob", "TopLogprob"}, id="logprobs"
        ),
    ],
)
def test_a_token_of_a_chat_takes_four_shapes(asked: dict[str, Any], more: set[str]) -> None:
    """Three records, each with its parts, and the JSON of the dialect. Log-probabilities: one record, and the dialect's."""
    constructions = Constructions()
    with constructions.in_new_threads():
        server = RunningServer(ServerSettings(engine_options=DEMO_ENGINE))
    body = {
        "messages": [{"role": "user", "content": "A fox"}],
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    with server, server.client() as client:
        for is_counted in (False, True):  # the first request reads the chat format
            constructions.is_on = is_counted
            with client.stream("POST", "/v1/chat/completions", json=body | asked) as response:
                assert all(line == "" or line.startswith("data: ") for line in response.iter_lines())
    constructions.is_on = False
    counts = constructions.counts()
    often = {name for name, count in counts.items() if count > OFTEN}
    assert often - OF_THE_TICK - OF_THE_VOCABULARY - REPORTS == SHAPES | PARTS | more, counts
