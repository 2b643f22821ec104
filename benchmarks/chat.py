"""The cost of a chat beyond its tokens: parsing a long message, and the time to the first token.

python -m benchmarks.chat [--part reading|ttft] [--tokens N] [--pairs N] [--templates FOLDER]

reading  messages of N tokens, a chunk a token: all time in `ChatReader.read` together, and the part of the chunks that need
         the parser, in the demo model's format and the formats of a folder of templates (llama.cpp's models/templates).
ttft     the same prompt as a chat and as a completion, both streamed by `paceline serve` in a process of its own, in
         interleaved pairs: milliseconds to the first event, and the median of the differences. The prompt is cached after
         the first pair, so the rest is rendering, tokenising, constraining and reading.

Figures of ttft are differences within one run; run it on a quiet machine. On two shared cores a plain chat took 2.0 and 2.1 ms
longer than its completion, a chat with a tool 4.5 and 3.7 ms (two runs of 60 pairs). Its preparation is 0.7 ms (plain) and 1.3 ms
(a tool), of which the template is 0.5 and 0.6 ms and tokenising 0.1 and 0.3 ms; grammar and parser of the tools are kept from
the turn before. The rest is the larger body, turns of threads, and reading the first piece with the parser.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server import serving
from paceline.chat import ChatFormat, ChatOptions, ChatReader, RenderedPrompt
from paceline.demo import demo_model_path
from paceline.runtime import Model
from paceline.streaming import FinishReason, StreamChunk, Usage

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather now.", "parameters": CITY}}]
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and the weather in Paris."}]
PROSE = 'Once upon a time, a fox (1 < 2) said: [x] {y} `code` "q"; it rained.\n\n'
FORMATS = ("Qwen-Qwen3-0.6B", "Qwen3-Coder", "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-V3.1")


# ---- reading


def texts_of(prompt: RenderedPrompt, num_tokens: int) -> dict[str, str]:
    """Return long messages: content, thinking, and a call with long arguments if the format has tagged JSON."""
    prose = PROSE * (1 + num_tokens * 4 // len(PROSE))
    prose = prose[: num_tokens * 4]
    texts = {"content": prose}
    if prompt.thinking_start:
        texts["thinking"] = f"{prompt.thinking_start}\n{prose}\n{prompt.thinking_ends[0]}\n\nSo."
    if any(trigger.value.startswith("<tool_call>") for trigger in prompt.triggers):
        argument = prose.replace('"', "'").replace("\n", " ")
        texts["call"] = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{argument}"}}}}\n</tool_call>'
    return texts


def time_reading(prompt: RenderedPrompt, text: str) -> tuple[float, float, float]:
    """Return the milliseconds of CPU that reading a text in pieces of 4 characters takes: all, with the parser, the longest."""
    reader, total, parsing, longest = ChatReader(prompt), 0.0, 0.0, 0.0
    for start in range(0, len(text), 4):
        is_last = start + 4 >= len(text)
        chunk = StreamChunk(
            index=start // 4,
            text=text[start : start + 4],
            token_ids=(1,),
            finish_reason=FinishReason.STOP if is_last else None,
            usage=Usage() if is_last else None,
        )
        begin = time.thread_time()
        needs_parser = reader.needs_parser(chunk)
        reader.read(chunk)
        taken = 1000 * (time.thread_time() - begin)
        total += taken
        parsing += taken if needs_parser else 0
        longest = max(longest, taken)
    return total, parsing, longest


def reading(options: argparse.Namespace) -> None:
    """Print a row for each format and kind of message."""
    model = Model.load(demo_model_path(), vocab_only=True)
    formats = {"demo": ChatFormat(model)}
    if options.templates is not None:
        sources = {name: options.templates / f"{name}.jinja" for name in FORMATS}
        formats |= {name: ChatFormat(model, path.read_text()) for name, path in sources.items() if path.exists()}
    print(
        f"reading messages of {options.tokens} tokens, best of {options.rounds}: all, with the parser, longest chunk; ms of CPU"
    )
    for name, chat_format in formats.items():
        prompt = chat_format.render(MESSAGES, options=ChatOptions(tools=TOOLS))
        for kind, text in texts_of(prompt, options.tokens).items():
            best = min(time_reading(prompt, text) for _ in range(options.rounds))
            print(f"  {name:28} {kind:9} {best[0]:7.1f} {best[1]:7.1f} {best[2]:7.2f}")


# ---- time to first token


def first_event_ms(client: httpx.Client, path: str, body: dict[str, Any]) -> float:
    """Return the milliseconds from sending a request to the first event of its stream."""
    begin = time.perf_counter()
    with client.stream("POST", path, json={"max_tokens": 2, "temperature": 0, "stream": True, **body}) as response:
        response.raise_for_status()
        events = response.iter_lines()
        next(events)
        taken = 1000 * (time.perf_counter() - begin)
        for _ in events:
            pass
    return taken


def ttft(options: argparse.Namespace) -> None:
    """Print the medians for a chat with and without tools."""
    chats: dict[str, dict[str, Any]] = {"plain": {}, "tools": {"tools": TOOLS}}
    with (
        serving(["-m", "paceline", "serve"], ["-c", "4096"]) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        for name, more in chats.items():
            chat = {"messages": MESSAGES, **more}
            whole = client.post("/v1/chat/completions", json={**chat, "max_tokens": 1, "return_token_ids": True})
            prompt = {"prompt": whole.json()["choices"][0]["prompt_token_ids"]}
            rows = []
            for _ in range(options.pairs):
                completion = first_event_ms(client, "/v1/completions", prompt)
                rows.append((completion, first_event_ms(client, "/v1/chat/completions", chat)))
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            least = [min(column) for column in zip(*rows, strict=True)]
            more_ms = statistics.median(chat_ms - completion_ms for completion_ms, chat_ms in rows)
            print(
                f"  {name:6} {len(prompt['prompt'])} prompt tokens: completion {medians[0]:.2f} ms (least {least[0]:.2f}), "
                f"chat {medians[1]:.2f} ms (least {least[1]:.2f}), {more_ms:+.2f} ms"
            )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("reading", "ttft"), action="append", help="one of them; both by default")
    parser.add_argument("--tokens", type=int, default=8192, help="of a message")
    parser.add_argument("--rounds", type=int, default=3, help="of reading")
    parser.add_argument("--pairs", type=int, default=40, help="of first tokens")
    parser.add_argument("--templates", type=Path, help="folder of more chat templates")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.1f}" + (": the figures are of a busy machine" if load > 1 else ""))
    for part in options.part or ("reading", "ttft"):
        reading(options) if part == "reading" else ttft(options)


if __name__ == "__main__":
    main()
