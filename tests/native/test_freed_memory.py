"""Closing an engine frees its weights, whatever of it the caller still holds. Measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.testing.models import CHAT_TEMPLATE, BertSpec, LlamaSpec, write_lora, write_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc"),
]

_SPEC = LlamaSpec(n_layer=8, n_embd=1024, n_head=8, n_head_kv=2, n_ff=4096)
_SLACK = 32  # MiB: what an interpreter and its allocator keep

_START = """
import asyncio, gc, json, re, sys
import paceline
from paceline import AsyncLLM, Conversation, LLM
from paceline.runtime import Model

sizes = {}
def measure(name):
    sizes[name] = int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

OPTIONS = {"n_ctx": 1024, "num_slots": 2, "host_cache_bytes": 0}
HELLO = [{"role": "user", "content": "Hello!"}]

def failure(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return error
    raise AssertionError("no error")

def use(llm):
    held = [llm.tokenizer, llm.model, llm.generate("a", max_tokens=2), llm.generate("a", max_tokens=2, regex="[a-z]+")]
    held.append(llm.chat(HELLO, max_tokens=2))
    talk = Conversation(llm)
    talk.say("Hello!", max_tokens=2)
    stream, chat = llm.stream("a", max_tokens=900), talk.stream("And?", max_tokens=900)
    next(iter(stream)), next(iter(chat))
    held += [talk, stream, chat, llm.engine.prepare("a", llm.engine.sampling_defaults, paceline.request.RequestOptions())]
    held.append(failure(llm.generate, "a" * 5000))
    held.append(failure(llm.generate, "a", grammar="root ::= x"))
    held.append(failure(llm.chat, HELLO, chat_template="{{ raise_exception('no') }}"))
    held.append(failure(llm.generate, "a", logits_processors=[lambda ids, row: 1 / 0]))
    held.append(failure(llm.load_lora, "name", sys.argv[1]))
    return held

with LLM(**OPTIONS) as llm:  # what is imported and allocated once
    use(llm)
del llm
gc.collect()
measure("before")
"""
_END = """
measure("closed")
print(json.dumps(sizes))
"""

LIBRARY = """
with LLM(sys.argv[1], **OPTIONS) as llm:
    held = use(llm)
    measure("open")
"""
MODEL_OF_ITS_OWN = """
llm = LLM(sys.argv[1], lora={"one": sys.argv[2]}, draft_model=sys.argv[1], **OPTIONS)
held = use(llm), llm.generate("a", max_tokens=4, lora={"one": 1.0})
measure("open")
llm.close()
"""
ASYNC = """
async def main():
    llm = AsyncLLM(sys.argv[1], **OPTIONS)
    await llm.generate("a", max_tokens=2)
    await llm.chat(HELLO, max_tokens=2)
    held = llm, llm.tokenizer, llm.model
    measure("open")
    await llm.aclose()
    return held
held = asyncio.run(main())
"""
EMBEDDINGS = """
llm = LLM(sys.argv[3])
held = llm.embed(["a", "b"]), llm.tokenizer
measure("open")
llm.close()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model of 130 MiB, an adapter for it, and an encoder of 100 MiB."""
    folder = tmp_path_factory.mktemp("models")
    encoder = BertSpec(n_layer=8, n_embd=1024, n_head=8, n_head_kv=8, n_ff=4096)
    return [
        write_model(folder / "model.gguf", _SPEC, weights="Q8_0", metadata={"tokenizer.chat_template": CHAT_TEMPLATE}),
        write_lora(folder / "adapter.gguf", _SPEC, rank=2),
        write_model(folder / "encoder.gguf", encoder, weights="Q8_0"),
    ]


def run(code: str, files: list[Path]) -> dict[str, float]:
    command = [sys.executable, "-c", _START + code + _END, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    sizes: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return sizes


@pytest.mark.parametrize(
    "code",
    [LIBRARY, MODEL_OF_ITS_OWN, ASYNC, EMBEDDINGS],
    ids=["with block", "adapter and draft model", "async", "embeddings"],
)
def test_closing_frees_the_weights(code: str, files: list[Path]) -> None:
    """The resident size is as before the engine while replies, streams, conversations, the tokenizer and errors are held."""
    sizes = run(code, files)
    assert sizes["open"] - sizes["before"] > 90
    assert sizes["closed"] - sizes["before"] < _SLACK


def test_a_model_of_the_caller_stays_open(files: list[Path]) -> None:
    """Closing an engine leaves a given `Model` unchanged; `free` closes the objects made from it."""
    sizes = run(
        """
with Model.load(sys.argv[1]) as model:
    llm = LLM(model, **OPTIONS)
    held = use(llm)
    llm.close()
    measure("open")
    assert model.tokenizer.encode("abc") and model.n_vocab
    tokenizer = model.tokenizer
    model.free()
        """,
        files,
    )
    assert sizes["open"] - sizes["before"] > 90
    assert sizes["closed"] - sizes["before"] < _SLACK


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_closed_engine_says_so_and_still_decodes(isolation: str, files: list[Path]) -> None:
    """Requests raise `EngineStopped`, encoding and the model's sizes `Closed`; decoding and the metadata stay."""
    from paceline import LLM, Conversation
    from paceline.errors import Closed, EngineStopped

    with LLM(files[0], n_ctx=1024, num_slots=2, isolation=isolation) as llm:
        tokenizer, talk = llm.tokenizer, Conversation(llm)
        ids = tokenizer.encode("Hello!")
        text, special = tokenizer.decode(ids), tokenizer.special_tokens
        stream = talk.stream("Hello!", max_tokens=900)
        next(iter(stream))
    assert (tokenizer.decode(ids), tokenizer.special_tokens, tokenizer.eog_ids != ()) == (text, special, True)
    assert llm.model.metadata["general.architecture"] == "llama"
    assert llm.model.paths[0].name == "model.gguf"
    assert list(stream)[-1].finish_reason is not None
    assert llm.stats() is not None
    assert not llm.heartbeat().is_alive
    hello = [{"role": "user", "content": "Hello!"}]
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.chat(hello),
        lambda: llm.stream_chat(hello),
        lambda: talk.say("a"),
        lambda: llm.embed("a"),
        llm.slots,
        lambda: llm.save_prefix("a", "b"),
        lambda: llm.load_lora("a", files[1]),
    ):
        with pytest.raises(EngineStopped):
            call()
    with pytest.raises(Closed, match="tokenizer"):
        tokenizer.encode("a")
    with pytest.raises(Closed, match=r"model\.gguf"):
        _ = llm.model.native
