"""Requests of one accepted client that are small to send and wide or slow to look after: stop texts first."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.attack.harness import Attack, Measured, Poller, bound_memory, bystander, figure, measured, post
from tests.e2e.served import Served

FLAGS = ("-np", "4", "-c", "2048", "-t", "1")
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "Once", "max_tokens": 2}
TALK = [{"role": "user", "content": "Hi"}]


def _texts(number: int, length: int) -> list[str]:
    """Return texts of four bytes a character that share no beginning."""
    return [chr(0x1F300 + index) * length for index in range(number)]


def _send(path: str, bodies: list[Any], *, extra_mb: int, at_once: int = 1) -> tuple[Counter[int], Measured, float]:
    """Send bodies to a server that may grow by so much; return the statuses, the figures and a bystander's longest time."""
    encoded = [json.dumps(body, ensure_ascii=False).encode() for body in bodies]
    with Served(*FLAGS) as server, ThreadPoolExecutor(at_once) as threads:
        bound_memory(server, extra_mb)
        with Poller(server.url, bystander(), pause_s=0.2) as other, measured(server) as now:
            statuses = Counter(threads.map(lambda body: post(server, path, body).status_code, encoded))
    return statuses, now, other.longest_s


def _text(statuses: Counter[int], now: Measured, bystander_s: float) -> str:
    counted = ", ".join(f"{number} of {status}" for status, number in sorted(statuses.items()))
    return f"{counted}; {now}, a bystander's two tokens at most {bystander_s:.1f} s"


def refused_stops() -> str:
    """Send 20 sets of 256 texts of 4,080 characters within 300 MB."""
    sent = _send(COMPLETION, [{**SHORT, "stop": _texts(256, 4080)}] * 20, extra_mb=300)
    return figure(_text(*sent), held=sent[0] == {400: 20} and sent[1].server_mb < 100)


def largest_stops() -> str:
    """Send the largest set that is accepted 50 times within 300 MB, each time with other texts."""
    stops = [text[:-2] for text in _texts(256, 64)]
    sent = _send(
        COMPLETION, [{**SHORT, "stop": [f"{turn:02d}{text}" for text in stops]} for turn in range(50)], extra_mb=300
    )
    statuses, now, _ = sent
    return figure(_text(*sent), held=statuses == {200: 50} and now.server_mb < 60 and (now.worker_mb or 0) < 60)


def wide_requests() -> str:
    """Send requests with the largest lists and 256 choices, each accepted, within 400 MB."""
    words = [f"{index:05d}" + "ab" * 13 for index in range(1024)]
    bodies = [
        {**SHORT, "n": 256, "stop": _texts(256, 64)},
        {**SHORT, "n": 256, "bad_words": words},
        {**SHORT, "n": 256, "dry_multiplier": 1, "dry_sequence_breakers": _texts(64, 40)},
        {**SHORT, "n": 256, "json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(500)}}},
        {**SHORT, "logit_bias": [[index % 200, 0.5] for index in range(65_536)]},
    ]
    sent = _send(COMPLETION, bodies, extra_mb=400)
    statuses, now, bystander_s = sent
    return figure(
        _text(*sent), held=statuses == {200: 5} and now.server_mb + (now.worker_mb or 0) < 400 and bystander_s < 10
    )


def optional_properties() -> str:
    """Send a schema with 5,000 optional properties."""
    schema = {"type": "object", "properties": {f"p{index}": {"enum": ["a" * 20, "b"]} for index in range(5000)}}
    sent = _send(COMPLETION, [{**SHORT, "json_schema": schema}], extra_mb=400)
    return figure(_text(*sent), held=sent[0] == {400: 1} and sent[1].seconds < 5)


def many_members() -> str:
    """Send a conversation with a call with 100,000 arguments, and a template's variable likewise."""
    members = {f"k{index}": index for index in range(100_000)}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(members)}}
    messages = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "x"})
    bodies = [
        {"messages": messages, "max_tokens": 2},
        {"messages": TALK, "max_tokens": 2, "chat_template_kwargs": {"x": dict(list(members.items())[:50_000])}},
    ]
    sent = _send(CHAT, bodies, extra_mb=600)
    return figure(_text(*sent), held=sent[0] == {400: 2} and sent[1].seconds < 10)


def wide_tools() -> str:
    """Send 200 tools of 300 properties, eight times at once, to a server that may grow by 1,500 MB."""
    properties = {f"p{index}": {"type": "string", "description": "x" * 10} for index in range(300)}
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool_{index}", "parameters": {"type": "object", "properties": properties}},
        }
        for index in range(200)
    ]
    sent = _send(CHAT, [{"messages": TALK, "max_tokens": 2, "tools": tools}] * 8, extra_mb=1500, at_once=8)
    statuses, now, bystander_s = sent
    return figure(_text(*sent), held=set(statuses) <= {400, 429} and now.server_mb < 1500 and bystander_s < 30)


ATTACKS = (
    Attack(
        "refused",
        "256 stop texts of 4,080 characters are refused, and 20 such requests leave no memory behind.",
        "server +1533 MB, worker +1532 MB, 10 s; others saw 320 MB in each and 4 s for a request, and the fifth in 3 GB"
        " killed the server",
        refused_stops,
        sample=True,
    ),
    Attack(
        "largest",
        "The largest accepted set of stop texts, 50 times with other texts, is served within a small memory.",
        "server +928 MB, worker +936 MB, 13.3 s: 300 bytes for each byte of the texts, until a full collection",
        largest_stops,
    ),
    Attack(
        "wide",
        "256 choices with the largest stop texts, bad words, sequence breakers or a schema stay within 400 MB.",
        "not measured",
        wide_requests,
    ),
    Attack(
        "optional",
        "A JSON schema with 5,000 optional properties is refused before it is compiled.",
        "27.6 s, server +78 MB, worker +76 MB: compiled three times, in time with the square of their number",
        optional_properties,
        sample=True,
    ),
    Attack(
        "members",
        "Arguments of a call and variables of a template with 100,000 members are refused.",
        "66.4 s, server +155 MB: llama.cpp's chat layer looks through all members for each",
        many_members,
    ),
    Attack(
        "tools",
        "Eight clients that send 200 tools of 300 properties at once cost bounded memory, and others are served.",
        "server +2752 MB, 61.6 s, /health at most 3.17 s",
        wide_tools,
    ),
)
