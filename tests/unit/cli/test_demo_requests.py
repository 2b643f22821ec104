"""A demo's requests from a file, and errors in them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import demo
from paceline.cli.demo import DemoRequest, completed, parse_requests, read_requests
from paceline.errors import InvalidParams


def read(tmp_path: Path, content: Any) -> list[DemoRequest]:
    path = tmp_path / "requests.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_requests(path)


def test_a_list_has_prompts_and_objects(tmp_path: Path) -> None:
    """A text alone is a prompt; an object has a prompt, as text or ids, and options of both kinds."""
    items = ["a", {"prompt": "b", "n": 2, "max_tokens": None, "interval": 4}, {"prompt": [1, 2], "stop": ["x"]}]
    first, second, third = read(tmp_path, items)
    assert (first.number, first.prompt, first.options) == (1, "a", {})
    assert (second.prompt, len(second.choices), second.options["interval"]) == ("b", 2, 4)
    assert (third.number, third.prompt, third.options) == (3, (1, 2), {"stop": ["x"]})
    assert [request.options["max_tokens"] for request in completed([first, second, third], 1, None)] == [256, None, 256]


def test_the_token_ids_of_biases_may_be_texts(tmp_path: Path) -> None:
    """The keys of a JSON object cannot be numbers."""
    (only,) = read(tmp_path, [{"prompt": "a", "logit_bias": {"15": -1.5}}])
    assert only.options == {"logit_bias": {15: -1.5}}


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests may come through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'["a"]')))
    assert [read_request.prompt for read_request in read_requests(Path("-"))] == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "requests.json is not valid JSON: "),
        ("[" * 100_000, "requests.json is not valid JSON: "),
        ('[{"prompt": "a", "n": 1, "n": 2}]', "an object has the key 'n' twice"),
        ({"prompt": "a"}, "must be a list of prompts or of objects with a prompt, not an object"),
        ([], "is an empty list"),
        (["a", 7], "request 2 must be a prompt or an object with a prompt, not a number"),
        (["a", ["b"]], "request 2 must be a prompt or an object with a prompt, not a list"),
        ([None], "request 1 must be a prompt or an object with a prompt, not null"),
        (["a", {"n": 2}], "request 2 has no prompt"),
        ([{"prompt": True}], "request 1: prompt must be a text or a list of token ids, not true or false"),
        ([{"prompt": [1, "x"]}], "request 1: prompt[1] must be an integer"),
        ([{"prompt": [-1]}], "request 1: prompt[0] must be an integer"),
        (
            ["a", {"prompt": "b", "temprature": 1}],
            "request 2: unknown option 'temprature'; did you mean 'temperature'?",
        ),
        ([{"prompt": "a", "temperature": "1"}], "request 1: temperature must be a finite number"),
        ('[{"prompt": "a", "temperature": NaN}]', "request 1: temperature must be a finite number"),
        ([{"prompt": "a", "n": True}], "request 1: n must be an integer"),
        ([{"prompt": "a", "interval": 0}], "request 1: interval must be an integer >= 1"),
        ([{"prompt": "a", "truncate": "lef"}], "request 1: truncate must be one of"),
        ([{"prompt": "a", "logit_bias": {"x": 1}}], "request 1: logit_bias: the token id must be an integer"),
    ],
)
def test_an_error_is_named_with_its_request_and_field(tmp_path: Path, content: Any, message: str) -> None:
    """The number of the request, the field, and the allowed values."""
    with pytest.raises(InvalidParams) as raised:
        read(tmp_path, content)
    assert str(raised.value).startswith("--requests ") and message in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the option it was given to."""
    with pytest.raises(InvalidParams, match="--requests: cannot read .*none.json: No such file"):
        read_requests(tmp_path / "none.json")


def options_of(items: list[Any], name: str, *limits: Any) -> list[Any]:
    return [request.options[name] for request in completed(parse_requests(items, ""), *limits)]


def test_a_limit_shortens_and_never_lengthens() -> None:
    """--max-tokens holds for all; a request with a lower limit keeps it."""
    asked = [
        {"prompt": "a", "max_tokens": 5},
        {"prompt": "b", "max_tokens": None},
        "c",
        {"prompt": "d", "max_tokens": 50},
    ]
    assert options_of(asked, "max_tokens", 1, 20) == [5, 20, 20, 20]
    assert options_of(asked, "max_tokens", 1, None) == [5, None, 256, 50]


def test_seeds_count_on_and_keep_explicit_values() -> None:
    """Two requests with the same prompt have different outputs, and a seed of a request's own stays."""
    assert options_of(["a", {"prompt": "b", "seed": 7}, "c"], "seed", 2**32 - 2, None) == [2**32 - 2, 7, 0]


def test_a_limit_of_the_backlog_keeps_explicit_limits() -> None:
    """A limit of the request's own stays."""
    asked = ["a", {"prompt": "b", "max_buffered_tokens": 7}]
    assert options_of(asked, "max_buffered_tokens", 1, None, 16) == [16, 7]


@pytest.mark.parametrize("ours", [demo.FOR_DEMO_MODEL, demo.FOR_ANY_MODEL])
def test_our_own_requests_are_eight_and_right(ours: Any) -> None:
    """They pass the checks of a file, and one request has two choices."""
    found = parse_requests(ours, "ours")
    assert len(found) == 8 and sum(len(request.choices) for request in found) == 9
