"""Send requests to every dialect of a server and return the bytes of its responses. The model writes a given text."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from tests.exact import EXACT
from tests.frozen.text import Normaliser, body_lines
from tests.server.router_world import RouterWorld
from tests.server.running import LONG_S, RunningServer

from paceline.server.settings import ServerSettings
from paceline.streaming import StreamChannel
from paceline.testing.models import BertSpec, write_model

SAID = "<think>\nA greeting.\n</think>\n\nHello, fox.\nGood day."
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = [{"role": "user", "content": "How is the weather?"}]

CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": ASKED, "max_tokens": 8},
    "/api/chat": {"messages": ASKED, "stream": False},
    "/completion": {"prompt": "Once"},
}
"""A path of each dialect with its smallest body."""


@dataclass(frozen=True)
class Exchange:
    """One request. says: the model's text; fails_at: index of the token with a failing draw."""

    title: str
    path: str
    body: Any = None
    method: str = "POST"
    says: str = SAID
    fails_at: int = -1
    headers: dict[str, str] = field(default_factory=dict)


class Script:
    """A logits processor that makes the model write a text. Before each token it waits until the earlier chunks are read."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._fails_at = -1
        self._failure: Exception | None = None
        self._channels: list[weakref.ref[StreamChannel]] = []

    def watch(self, engine: Any) -> None:
        """Record the streams of this engine."""
        self._engine, accept = engine, engine.accept

        def accepted(*args: Any) -> StreamChannel:
            channel: StreamChannel = accept(*args)
            self._channels.append(weakref.ref(channel))
            return channel

        engine.accept = accepted

    def begin(self, text: str, fails_at: int = -1, failure: Exception | None = None) -> None:
        """Set the text of the next request, and the token with a failing draw."""
        encode = self._engine.tokenizer.encode
        self._ids = encode(text + "<|im_end|>", add_special=False, parse_special=True)
        self._fails_at, self._channels = fails_at, []
        self._failure = failure

    def __call__(self, token_ids: Sequence[int], logits: Any) -> Any:
        channels = [channel for ref in self._channels if (channel := ref()) is not None]
        until_s = time.monotonic() + LONG_S
        while any(channel.interval == 1 and channel.num_buffered for channel in channels):
            assert time.monotonic() < until_s, "the stream is not read"
            time.sleep(0.0002)
        if len(token_ids) == self._fails_at:
            raise self._failure or RuntimeError("the draw fails")
        row = np.linspace(-50, -60, logits.size, dtype=logits.dtype)
        row[self._ids[len(token_ids)]] = 50
        return row


@contextmanager
def scripted_server(script: Script, **settings: Any) -> Iterator[RunningServer]:
    """Serve the demo model with all features on; the script sets its text."""
    engine = {**EXACT, "isolation": "thread", "num_slots": 2, "n_ctx": 1024, "cache_prompt": False}
    features = {"props": True, "embeddings": True, "lora_loading": True, "responses_store": 4, "heartbeat_s": LONG_S}
    options = {
        "engine_options": engine,
        "sampling": {"logits_processors": [script], "logprobs_mode": "sampled"},
        "media_marker": "<media>",
    }
    with RunningServer(ServerSettings(**{**options, **features, **settings})) as server:
        script.watch(server.engine)
        yield server


def asked(client: httpx.Client, exchange: Exchange) -> str:
    """Send a request; return request and response as text."""
    normalise, body = Normaliser(), exchange.body
    headers = {"x-request-id": "frozen", **exchange.headers}
    content = {"content": body} if isinstance(body, str) else {"json": body} if body is not None else {}
    response = client.request(exchange.method, exchange.path, headers=headers, **content)
    shown = {name: value for name, value in response.headers.items() if name != "date"}
    if "content-length" in shown:
        shown["content-length"] = "<number>"
    lines = [f"#### {exchange.title}", f"{exchange.method} {exchange.path}"]
    lines += [f"{name}: {value}" for name, value in exchange.headers.items()]
    lines += [] if body is None else [body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)[:400]]
    lines += [f"---- {response.status_code}", *(normalise(f"{name}: {value}") for name, value in sorted(shown.items()))]
    return "\n".join([*lines, "", *body_lines(response.text, normalise)]).rstrip("\n") + "\n"


def exchanged(exchanges: Sequence[Exchange]) -> str:
    """Send requests to a new server; return them with their responses."""
    script, found = Script(), []
    with scripted_server(script) as server, server.client() as client:
        for exchange in exchanges:
            script.begin(exchange.says, exchange.fails_at)
            found.append(asked(client, exchange))
    return "\n".join(found)


def generating(
    path: str, body: dict[str, Any], more: dict[str, dict[str, Any]], wrong: dict[str, Any]
) -> list[Exchange]:
    """Return the exchanges of a route that generates: whole and streamed, each also with more fields, and two errors."""
    variants = {"plain": {}, **more}
    found = []
    for stream in (False, True):
        for title, fields in variants.items():
            says = CALLED if "call" in title else SAID
            kind = "streamed" if stream else "whole"
            found.append(Exchange(f"{title}, {kind}", path, {**body, "stream": stream, **fields}, says=says))
        found.append(Exchange(f"a draw fails, {kind}", path, {**body, "stream": stream}, fails_at=6))
    return [*found, Exchange("a wrong field, streamed", path, {**body, "stream": True, **wrong})]


def _chat() -> str:
    function = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    more: dict[str, dict[str, Any]] = {
        "log-probabilities": {"logprobs": True, "top_logprobs": 2},
        "a call": {"tools": [function], "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}},
        "a limit and an unknown field": {"max_tokens": 8, "colour": "red"},
    }
    path, body = "/v1/chat/completions", {"messages": ASKED}
    usage = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return exchanged(
        [
            *generating(path, body, more, {"temperature": -1}),
            Exchange("two choices", path, {**body, "n": 2}),
            Exchange("usage, streamed", path, {**usage, "max_tokens": 6}),
            Exchange("progress, streamed", path, {**body, "stream": True, "return_progress": True, "max_tokens": 2}),
            Exchange("no JSON", path, "{"),
            Exchange("a prompt that is too long", path, {"messages": [{"role": "user", "content": "fox " * 2000}]}),
            Exchange("tokens of a chat", f"{path}/input_tokens", body),
            Exchange(
                "resumable", path, {**body, "stream": True, "max_tokens": 4}, headers={"x-conversation-id": "one"}
            ),
            Exchange("streams of a conversation", "/v1/streams/lookup", {"conversation_ids": ["one", "two"]}),
            Exchange("read a stream again", "/v1/stream?conv_id=one", method="GET"),
            Exchange("end a stream", "/v1/stream?conv_id=one", method="DELETE"),
            Exchange("read a stream that ended", "/v1/stream?conv_id=one", method="GET"),
        ]
    )


def _completions() -> str:
    more = {
        "log-probabilities": {"logprobs": 2, "max_tokens": 4},
        "echo": {"echo": True, "max_tokens": 3},
        "a stop text": {"stop": ["fox"]},
    }
    path, body = "/v1/completions", {"prompt": "Once"}
    usage = {**body, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    return exchanged(
        [
            *generating(path, body, more, {"top_p": 3}),
            Exchange("usage, streamed", path, usage),
            Exchange("two prompts", path, {"prompt": ["One", "Two"], "max_tokens": 3}),
        ]
    )


def _responses() -> str:
    function = {"type": "function", "name": "weather", "parameters": CITY}
    no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    more: dict[str, dict[str, Any]] = {
        "a call": {"tools": [function], "tool_choice": "required", **no_thinking},
        "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        "a limit": {"max_output_tokens": 12},
    }
    path = "/v1/responses"
    return exchanged(
        [
            *generating(path, {"input": "Hello."}, more, {"input": 5}),
            Exchange("tokens", f"{path}/input_tokens", {"input": "Hello."}),
            Exchange("an unknown response", f"{path}/resp_none", method="GET"),
        ]
    )


def _anthropic() -> str:
    tool = {"name": "weather", "input_schema": CITY}
    off = {"thinking": {"type": "disabled"}}
    more: dict[str, dict[str, Any]] = {
        "a call": {"tools": [tool], "tool_choice": {"type": "any"}, **off},
        "a limit": {"max_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        "a stop sequence": {"stop_sequences": ["fox"]},
    }
    path, body = "/v1/messages", {"messages": ASKED, "max_tokens": 100, "model": "tale"}
    return exchanged(
        [
            *generating(path, body, more, {"temperature": -1}),
            Exchange("tokens", f"{path}/count_tokens", {"messages": ASKED}),
            Exchange("models", "/v1/models", method="GET", headers={"anthropic-version": "2023-06-01"}),
        ]
    )


def _ollama() -> str:
    function = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    chat: dict[str, dict[str, Any]] = {
        "a call": {"tools": [function], "think": False},
        "log-probabilities": {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 8}},
        "thinking": {"think": True},
    }
    generate = {"raw": {"raw": True}, "a limit": {"options": {"num_predict": 3}}, "a suffix": {"suffix": "end"}}
    wrong = {"options": {"temperature": "hot"}}
    return exchanged(
        [
            *generating("/api/chat", {"model": "tale", "messages": ASKED}, chat, wrong),
            *generating("/api/generate", {"model": "tale", "prompt": "Hello."}, generate, wrong),
            Exchange("load", "/api/generate", {"model": "tale"}),
            Exchange("embed", "/api/embed", {"model": "tale", "input": ["One", "Two"]}),
            Exchange("embeddings", "/api/embeddings", {"model": "tale", "prompt": "One"}),
            Exchange("show", "/api/show", {"model": "paceline-demo"}),
            Exchange("show an unknown model", "/api/show", {"model": "none"}),
            Exchange("pull", "/api/pull", {"model": "paceline-demo"}),
            *(Exchange(name, f"/api/{name}", method="GET") for name in ("tags", "ps", "version")),
        ]
    )


def _llama_server() -> str:
    more: dict[str, dict[str, Any]] = {
        "probabilities and tokens": {"n_probs": 2, "return_tokens": True, "n_predict": 4},
        "probabilities after sampling": {"n_probs": 2, "post_sampling_probs": True, "n_predict": 2},
        "a stop word": {"stop": ["fox"]},
        "progress": {"return_progress": True, "timings_per_token": True, "n_predict": 2},
    }
    infill = {"input_prefix": "One", "input_suffix": "day", "prompt": "a fox"}
    return exchanged(
        [
            *generating("/completion", {"prompt": "Once"}, more, {"n_predict": "many"}),
            *generating("/infill", infill, {}, {"input_extra": [{}]}),
            Exchange("two choices", "/completion", {"prompt": "Once", "n_cmpl": 2, "n_predict": 2}),
            Exchange("tokenize", "/tokenize", {"content": "A fox", "with_pieces": True}),
            Exchange("detokenize", "/detokenize", {"tokens": [65, 300]}),
            Exchange("apply a template", "/apply-template", {"messages": ASKED}),
            Exchange("embedding", "/embedding", {"content": ["One", "Two"]}),
            Exchange("rerank", "/rerank", {"query": "One", "documents": ["Two"]}),
            Exchange("props", "/props", method="GET"),
            Exchange("change props", "/props", {}),
            Exchange("slots", "/slots", method="GET"),
            Exchange("save a slot", "/slots/0?action=save", {"filename": "x"}),
            Exchange("adapters", "/lora-adapters", method="GET"),
            Exchange("no route", "/nothing", method="GET"),
            Exchange("a wrong method", "/completion", method="PUT"),
        ]
    )


def _others() -> str:
    embeddings, lora = "/v1/embeddings", {"lora_name": "x", "lora_path": "none.gguf"}
    return exchanged(
        [
            Exchange("embeddings", embeddings, {"input": ["One", "Two"]}),
            Exchange("embeddings in base64", embeddings, {"input": [1, 2], "encoding_format": "base64", "dimensions": 4}),
            Exchange("a wrong embedding", embeddings, {"input": []}),
            Exchange("score", "/score", {"text_1": "One", "text_2": ["Two"]}),
            Exchange("classify", "/classify", {"input": "One"}),
            Exchange("a transcription", "/v1/audio/transcriptions", {}),
            Exchange("load an adapter", "/v1/load_lora_adapter", lora),
            Exchange("cancel", "/v1/requests/none/cancel"),
            *(
                Exchange(path, path, method="GET")
                for path in (
                    "/v1/models", "/v1/models/none", "/health", "/health/live", "/health/ready", "/tokenizer_info",
                    "/v1/engine/page", "/v1/engine/model", "/v1/stream",
                )
            ),
        ]
    )  # fmt: skip


def _router() -> str:
    world, model = RouterWorld(), {"model": "small"}
    world.fail("large")
    exchanges = [
        *(Exchange(path, path, method="GET") for path in ("/v1/models", "/props", "/health", "/v1/engine/page")),
        Exchange("load", "/models/load", model),
        Exchange("a completion", "/completion", {"prompt": "Once", "n_predict": 3, **model}),
        Exchange("a completion by an alias", "/v1/completions", {"prompt": "Once", "max_tokens": 3, "model": "s"}),
        Exchange("one model", "/v1/models/small", method="GET"),
        Exchange("tags", "/api/tags", method="GET"),
        Exchange("unload", "/models/unload", model),
        Exchange("unload again", "/models/unload", model),
        Exchange("load an unknown model", "/models/load", {"model": "none"}),
        Exchange("no model is named", "/completion", {"prompt": "Once"}),
        Exchange("remove", "/models/small", method="DELETE"),
    ]
    for path, body in CHATS.items():
        exchanges += [Exchange(f"{name} fails", path, {**body, "model": name}) for name in ("none", "large")]
        exchanges.append(Exchange("large fails in a stream", path, {**body, "model": "large", "stream": True}))
    try:
        found = []
        for exchange in exchanges:
            found.append(asked(world.client, exchange))
            world.settle()
        return "\n".join(found)
    finally:
        world.close()


def _ranking() -> str:
    engine = {**EXACT, "isolation": "thread", "num_slots": 2}
    documents = {"query": "the cat", "documents": ["a dog ran", "the cat sat"]}
    exchanges = (
        Exchange("rerank", "/rerank", documents),
        Exchange("rerank with texts", "/v1/rerank", {**documents, "top_n": 1, "return_text": True}),
        Exchange("score", "/score", {"text_1": "the cat", "text_2": ["a dog ran", "the cat sat"]}),
        Exchange("classify", "/classify", {"input": ["the cat sat"]}),
        Exchange("a chat", "/v1/chat/completions", {"messages": ASKED}),
    )
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "ranker.gguf", BertSpec(pooling="rank"))
        settings = ServerSettings(model=model, engine_options=engine, aliases=("ranker",))
        with RunningServer(settings) as server, server.client() as client:
            return "\n".join(asked(client, exchange) for exchange in exchanges)


EXCHANGES: dict[str, Callable[[], str]] = {
    "openai_chat.txt": _chat,
    "openai_completions.txt": _completions,
    "openai_responses.txt": _responses,
    "anthropic.txt": _anthropic,
    "ollama.txt": _ollama,
    "llama_server.txt": _llama_server,
    "other_routes.txt": _others,
    "ranking.txt": _ranking,
    "router.txt": _router,
}
