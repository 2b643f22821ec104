"""Prompts with a picture: four turns about it, eight questions about it at once, and a picture that arrives among four streams.

python -m benchmarks.media [--servers library,llama-server] [--workloads turns,questions,arrival] [--rounds 1]

The model has half a billion weights (`benchmarks.model`), with a projector in the shape of LLaVA 1.5's (a ViT-L of 336 pixels,
576 tokens a picture, random weights). `library` is an `LLM` in this process, `paceline` a served model, `llama-server` the
build of `python -m benchmarks.peers build llama-server`. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.model import half_billion, written
from benchmarks.peers.builds import Variant, build_info, find_llama_server
from benchmarks.peers.client import LlamaServerDialect
from benchmarks.peers.servers import Launch, serving
from paceline import LLM, Image
from paceline.media.image import png_bytes
from paceline.testing.models import LlavaVisionSpec, write_model

_NUM_SLOTS, _N_CTX = 8, 16384
_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
_QUESTIONS = [f"Question {number}: what is in the picture, and which colour has it?" for number in range(8)]

Messages: TypeAlias = list[dict[str, Any]]
Chat: TypeAlias = Callable[[Messages, int], Iterator[str]]
"""Streams a reply of that many tokens in pieces, each as it comes."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A reply: when it was asked for, when its pieces came, in seconds, and its text."""

    start_s: float
    times: list[float]
    text: str

    @property
    def first_s(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.start_s

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Return the seconds between pieces that overlap a period."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [last - first for first, last in pairs if last > begin_s and first < end_s]


def timed(chat: Chat, messages: Messages, num_tokens: int, on_piece: Callable[[], object] = lambda: None) -> Timed:
    """Return a reply with its times."""
    start_s, times, texts = time.perf_counter(), [], []
    for piece in chat(messages, num_tokens):
        times.append(time.perf_counter())
        texts.append(piece)
        on_piece()
    return Timed(start_s, times, "".join(texts))


def projector() -> Path:
    """Return the path of the projector, written on first use (0.6 gigabytes)."""
    spec = LlavaVisionSpec(
        n_embd_text=896, n_embd=1024, n_head=16, n_layer=24, n_ff=4096, image_size=336, patch_size=14
    )
    return written("vision/llava-half-billion-f16.gguf", lambda path: write_model(path, spec, seed=1, weights="F16"))


def url_of(seed: int) -> str:
    """Return the data URL of a picture that no other seed has."""
    pixels = np.random.default_rng(seed).integers(0, 256, (336, 336, 3), dtype=np.uint8)
    return "data:image/png;base64," + base64.b64encode(png_bytes(pixels.tobytes(), 336, 336)).decode()


def about(url: str, question: str) -> dict[str, Any]:
    """Return a message with a picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"role": "user", "content": parts}


# ---- workloads


def turns(chat: Chat, seed: int) -> dict[str, float]:
    """Four turns about one picture, 16 tokens each: seconds to the first token of the first, and of the others."""
    messages = [about(url_of(seed), _QUESTIONS[0])]
    firsts = []
    for question in _QUESTIONS[1:5]:
        reply = timed(chat, messages, 16)
        firsts.append(reply.first_s)
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]
    return {"first turn, ttft s": firsts[0], "later turns, ttft s": statistics.median(firsts[1:])}


def questions(chat: Chat, seed: int) -> dict[str, float]:
    """Eight questions about one picture at once, 16 tokens each: seconds to the last token of all."""
    url = url_of(seed)
    replies = together([lambda question=question: timed(chat, [about(url, question)], 16) for question in _QUESTIONS])  # type: ignore[misc]
    begin_s, end_s = min(reply.start_s for reply in replies), max(reply.times[-1] for reply in replies)
    return {"8 questions, s": end_s - begin_s}


def arrival(chat: Chat, seed: int) -> dict[str, float]:
    """Let a picture arrive among four streams: their longest gap until its first token, and the usual one before."""
    under_way = threading.Barrier(5)
    done = threading.Event()

    def stream(number: int) -> Timed:
        seen = 0

        def count() -> None:
            nonlocal seen
            seen += 1
            if seen == 20:
                under_way.wait()
            if done.is_set() and seen > 40:
                raise _Enough

        times: list[float] = []
        start_s = time.perf_counter()
        try:
            for _ in chat([{"role": "user", "content": f"Tell me story {seed} {number}."}], 2000):
                times.append(time.perf_counter())
                count()
        except _Enough:
            pass
        return Timed(start_s, times, "")

    def picture() -> Timed:
        under_way.wait()
        try:
            return timed(chat, [about(url_of(seed), _QUESTIONS[0])], 1)
        finally:
            done.set()

    *streams, pictured = together([*(lambda n=n: stream(n) for n in range(4)), picture])
    end_s = pictured.times[0]
    during = [gap for stream in streams for gap in stream.gaps(pictured.start_s, end_s)]
    before = [gap for stream in streams for gap in stream.gaps(stream.times[5], pictured.start_s)]
    return {
        "longest gap, ms": 1000 * max(during),
        "median gap, ms": 1000 * statistics.median(during),
        "median gap before, ms": 1000 * statistics.median(before),
        "picture's ttft, s": pictured.first_s,
        "tokens of the streams until then": float(len(during)),
    }


class _Enough(Exception):
    """Ends a stream when its measurement is complete."""


def together(works: Sequence[Callable[[], Timed]]) -> list[Timed]:
    """Run all calls at once; return the outcomes in order. Raises the first exception."""
    outcomes: list[Timed | BaseException] = [AssertionError("not run")] * len(works)

    def run(index: int) -> None:
        try:
            outcomes[index] = works[index]()
        except BaseException as error:  # noqa: BLE001 - raised below
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: list[Timed] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        found.append(outcome)
    return found


WORKLOADS: dict[str, Callable[[Chat, int], dict[str, float]]] = {
    "turns": turns,
    "questions": questions,
    "arrival": arrival,
}


# ---- servers


@contextmanager
def library(model: Path, mmproj: Path) -> Iterator[Chat]:
    """Yield the chat of an engine in this process."""
    with LLM(model, mmproj=mmproj, num_slots=_NUM_SLOTS, n_ctx=_N_CTX, chat_template="chatml") as llm:
        images: dict[str, Image] = {}

        def loaded(part: dict[str, Any]) -> Any:
            if part["type"] != "image_url":
                return part
            url = part["image_url"]["url"]
            return images.setdefault(url, Image.from_url(url))

        def chat(messages: Messages, num_tokens: int) -> Iterator[str]:
            taken = [
                message
                if isinstance(message["content"], str)
                else message | {"content": [loaded(part) for part in message["content"]]}
                for message in messages
            ]
            with llm.stream_chat(taken, max_tokens=num_tokens, **_GREEDY) as stream:
                for chunk in stream:
                    if chunk.token_ids:
                        yield "".join(delta.content or "" for delta in chunk.deltas)

        yield chat


@contextmanager
def served(name: str, model: Path, mmproj: Path) -> Iterator[Chat]:
    """Yield the chat of a server, by OpenAI's API."""
    if name == "paceline":
        program: tuple[str, ...] = (sys.executable, "-m", "paceline", "serve", "--log-level", "error")
    else:
        found = find_llama_server(build_info(Path(sys.executable)), Variant())
        if found is None:
            raise SystemExit("python -m benchmarks.peers build llama-server")
        program = (str(found),)
    flags = (
        "-m",
        str(model),
        "--mmproj",
        str(mmproj),
        "-np",
        str(_NUM_SLOTS),
        "-c",
        str(_N_CTX),
        "--chat-template",
        "chatml",
    )
    what = Launch(command=(*program, *flags), dialect=LlamaServerDialect())
    with tempfile.TemporaryDirectory() as folder, serving(what, Path(folder) / "log") as server:
        yield lambda messages, num_tokens: _events(server.port, messages, num_tokens)


def _events(port: int, messages: Messages, num_tokens: int) -> Iterator[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        body = {"messages": messages, "max_tokens": num_tokens, "stream": True, **_GREEDY}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode(errors="replace")[:500])
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event))
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                if "role" not in delta and ("content" in delta or "reasoning_content" in delta):
                    yield delta.get("content") or ""
    finally:
        connection.close()


def main() -> None:
    """Run the workloads on the servers of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="library,llama-server")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    model, mmproj = half_billion(None), projector()
    for name in args.servers.split(","):
        with library(model, mmproj) if name == "library" else served(name, model, mmproj) as chat:
            timed(chat, [{"role": "user", "content": "warm up"}], 4)
            for workload in args.workloads.split(","):
                for number in range(args.rounds):
                    figures = WORKLOADS[workload](chat, 1000 * number + sum(map(ord, workload)))
                    words = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                    print(f"{name} {workload}: {words}", flush=True)


if __name__ == "__main__":
    main()
