"""The page of all limits has the figures of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from paceline import params, validation
from paceline.chat import chat_format, conversation, message_parts, tools
from paceline.chat_client import conversations
from paceline.cli import inputs
from paceline.config import _MAX_SLOTS, EngineConfig
from paceline.constraints import compiler, llguidance_schemas, schema_walk
from paceline.engine import media_encoder, questions, saved_prefixes
from paceline.engine.worker import black_box, open_requests, supervisor
from paceline.engine.worker.supervisor import RestartLimits
from paceline.hub import download, network, remote_header
from paceline.media import audio, audio_formats, image
from paceline.observability import trace_file
from paceline.request import RequestOptions
from paceline.runtime import gguf_check, gguf_file, projector, tokenizer
from paceline.sampling_table import BY_NAME
from paceline.server import (
    connection,
    in_flight,
    json_bodies,
    listeners,
    operator_lines,
    request_media,
    resumable_streams,
    running_request,
    service,
)
from paceline.server.dialects import request_body, vectors
from paceline.server.dialects.llama_server import llama_routes
from paceline.server.flags import setters as flag
from paceline.server.flags.table import FLAGS
from paceline.server.middleware import request_limits
from paceline.server.router import model_downloads
from paceline.server.settings import ServerSettings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"
REQUEST_NAMES = {field.name for field in dataclasses.fields(RequestOptions)}
SERVER, ENGINE = ServerSettings(), EngineConfig()


def _bytes(number: int) -> str:
    """Return a size in the largest binary unit that divides it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number % size == 0:
            return f"{number // size} {unit}"
    return f"{number:,}"


def _seconds(number: float) -> str:
    return f"{number:,g} s"


def _native_limit(header: str, name: str) -> int:
    """Return a constant of the compiled core, which is written as a number or as a shifted one."""
    text = (Path(__file__).parents[2] / "native" / header).read_text(encoding="utf-8")
    found = re.search(rf"\b{name}\s*=\s*([0-9']+)(?: << ([0-9]+))?;", text)
    assert found is not None
    return int(found[1].replace("'", "")) << int(found[2] or 0)


def _or_none(number: float | None) -> str:
    return "none" if number is None else f"{number:,}"


FIGURES = {
    # HTTP
    "body of a request, decoded": _bytes(SERVER.max_body_bytes),
    "bodies of all requests in flight": _bytes(SERVER.max_total_body_bytes or 4 * SERVER.max_body_bytes),
    "bodies of a tenant beside its first, if there are several tenants": "as many bytes as stay free",
    "path, query and headers of a request": _bytes(SERVER.max_header_bytes),
    "extensions of a chunk, or trailers, of a body": _bytes(SERVER.max_header_bytes),
    "wait for the next bytes of a refused body, which are discarded for as long as a body may take": _seconds(
        connection._LINGER_S
    ),
    "open connections": f"{SERVER.max_connections:,}, or as many as there are descriptors for",
    "descriptors that are left for everything else": f"{listeners._MAX_DESCRIPTORS}, at most half of the limit",
    "connections that are refused at the same time": f"{connection._MAX_REFUSED:,}",
    "requests in flight": f"{SERVER.max_connections:,}",
    "requests of a tenant in flight, if there are several tenants": "three for each free place",
    "time for a TLS handshake, to send headers, or to send a body": _seconds(SERVER.body_timeout_s),
    "time that a client may read nothing of a response": _seconds(SERVER.body_timeout_s),
    "time of an idle connection": _seconds(SERVER.keep_alive_s),
    "pipelined requests of a connection": f"{connection._MAX_PIPELINED:,}",
    "members of a compressed body": f"{request_limits._MAX_MEMBERS:,}",
    "window of a body in zstd": _bytes(1 << request_limits._MAX_WINDOW_LOG),
    "fields of a JSON body": f"{json_bodies._MAX_FIELDS:,}",
    "lists, objects and fields within a JSON body": f"{json_bodies._MAX_PARTS:,}",
    "values within a JSON body": f"{json_bodies._MAX_VALUES:,}",
    "bytes kept of a resumable stream": _bytes(resumable_streams._MAX_STREAM_BYTES),
    "bytes kept of all resumable streams": _bytes(resumable_streams._MAX_TOTAL_BYTES),
    "resumable streams": f"{resumable_streams._MAX_STREAMS:,}",
    "bytes of a conversation's id": f"{resumable_streams.MAX_ID_BYTES:,}",
    "bytes of a tenant's stored responses": _bytes(SERVER.responses_store_bytes),
    "lines of the log that wait to be written": _bytes(operator_lines.MAX_WAITING_CHARS),
    "time that running requests get after SIGTERM": _seconds(SERVER.drain_s),
    # Queue and engine
    "sequences that run at once": f"{ENGINE.num_slots:,}",
    "largest number of slots": f"{_MAX_SLOTS:,}",
    "requests that are open beyond the slots": f"{ENGINE.max_queue:,}",
    "open requests of a tenant, if there are several tenants": "three for each free place",
    "prompt tokens of a tenant that wait, if there are several tenants": "three for each free one",
    "prompt tokens that wait": _or_none(ENGINE.max_queue_tokens),
    "time of a whole request": _or_none(SERVER.timeout_s),
    "log-probabilities of a response, or that wait for a stream's client": f"{running_request.MAX_LOGPROBS:,}",
    "tokens of a response of `/tokenize`": f"{llama_routes.MAX_TOKENS:,}",
    "characters of prompts that a response repeats": f"{running_request.MAX_REPEATED_CHARS:,}",
    "tokens that a stream's client may fall behind": f"{running_request.MAX_BUFFERED_TOKENS:,}",
    "wait before a crashed worker is started again": _seconds(RestartLimits().longest_wait_s),
    "time without a heartbeat of the worker": _seconds(ENGINE.hang_timeout_s),
    "duration of a pass, if that is longer": f"{black_box._PASS_FACTOR} times what is expected",
    (
        "loading a model, moving a saved state, preparing a request, as a multiple of the time without a heartbeat"
    ): f"{black_box.LONG_WORK}",
    "time that a worker has to end a request that is cancelled or past a deadline": _seconds(open_requests.GRACE_S),
    "time for a worker's reply about its state": _seconds(questions.REPLY_S),
    "time that a worker has to measure an image or a sound": _seconds(questions.MEASURE_REPLY_S),
    ("time that a worker has to save, load or erase a prefix, or to load or free an adapter"): _seconds(
        questions.FILE_REPLY_S
    ),
    "time that a question about an image, a prefix or an adapter waits for a new worker": _seconds(
        supervisor.NEW_WORKER_S
    ),
    "time that a worker has to end": _seconds(supervisor._STOP_PATIENCE_S),
    "wait before a model whose file was replaced is loaded again, after a failure": _seconds(service._LONGEST_WAIT_S),
    "size of a trace": _bytes(ENGINE.trace_max_bytes),
    # Sampling
    "choices of a prompt (`n`)": f"{BY_NAME['n'].high:,}",
    **{f"`{name}`: texts": f"{count:,}" for name, (count, _, _) in params._TEXTS.items()},
    **{f"`{name}`: characters of a text": f"{length:,}" for name, (_, length, _) in params._TEXTS.items()},
    **{f"`{name}`: characters together": f"{total:,}" for name, (_, _, total) in params._TEXTS.items() if total},
    "`logit_bias`: entries": f"{request_body._MAX_BIASES:,}",
    "`samplers`: names or letters": f"{request_body._MAX_SAMPLERS:,}",
    "`logprobs`, `prompt_logprobs` of a token": f"{BY_NAME['logprobs'].high:,}",
    "candidates of the sampler `infill`": f"{params._MAX_INFILL_CANDIDATES:,}",
    "logits processors": f"{params._MAX_PROCESSORS:,}",
    # Structured output and tools
    "characters of a JSON schema": f"{params._MAX_SCHEMA_CHARS:,}",
    "depth of a JSON schema": f"{params._MAX_SCHEMA_DEPTH:,}",
    "optional properties of an object in a JSON schema": f"{llguidance_schemas._MAX_OPTIONAL:,}",
    "nesting of a JSON schema through references": f"{llguidance_schemas._MAX_NESTING:,}",
    "bytes of a GBNF grammar": _bytes(_native_limit("grammar_guard.hpp", "max_bytes")),
    "characters of a regular expression or a Lark grammar": f"{compiler._MAX_TEXT_CHARS:,}",
    "characters of the grammar that a schema or tools are translated to": f"{compiler._MAX_GRAMMAR_CHARS:,}",
    "groups and quantifiers of a regular expression or a Lark terminal": f"{schema_walk.MAX_OPTIONAL:,}",
    "nesting of a Lark grammar": f"{compiler._MAX_LARK_NESTING:,}",
    "characters of `choice` together": f"{params._MAX_CHOICE_CHARS:,}",
    "`grammar_triggers`": f"{params._MAX_TRIGGERS:,}",
    "characters of a trigger": f"{params._MAX_TRIGGER_CHARS:,}",
    "characters of a trigger that is a pattern": f"{params._MAX_PATTERN_CHARS:,}",
    "grammars that are compiled at once": f"{compiler._MAX_COMPILES:,}",
    "cached grammars": f"{compiler._CACHED_GRAMMARS:,}",
    "memory of cached grammars, in the server and in the worker each": _bytes(compiler._CACHED_BYTES),
    "tools of a request": f"{tools.MAX_TOOLS:,}",
    "bytes of a tool's schema": _bytes(message_parts.MAX_SCHEMA_BYTES),
    "depth of a tool's schema": f"{message_parts.MAX_SCHEMA_DEPTH:,}",
    # Chats and embeddings
    "messages of a conversation": f"{conversation.MAX_MESSAGES:,}",
    "bytes of a conversation as JSON": _bytes(chat_format.MAX_BYTES),
    "tool calls of a message": f"{conversation.MAX_TOOL_CALLS:,}",
    "bytes of a call's arguments": _bytes(conversation.MAX_ARGUMENTS_BYTES),
    "depth of a call's arguments": f"{conversation.MAX_ARGUMENTS_DEPTH:,}",
    "members of an object in arguments, variables and tools' schemas": f"{message_parts.MAX_MEMBERS:,}",
    "bytes of a chat template's variables": _bytes(chat_format.MAX_KWARGS_BYTES),
    "depth of a chat template's variables": f"{chat_format.MAX_KWARGS_DEPTH:,}",
    "bytes of a prompt that is tokenised, without `truncate`": "tokens of the context times bytes of the longest token",
    f"bytes of requests beyond {_bytes(in_flight.SMALL_TEXT_BYTES)} whose texts are tokenised at once": (
        f"{_bytes(in_flight.MAX_TEXT_BYTES)}, half of it for a tenant's requests"
    ),
    "bytes of smaller requests whose texts are tokenised at once": (
        f"{_bytes(in_flight.MAX_SMALL_TEXTS_BYTES)}, half of it for a tenant's requests"
    ),
    f"memory that tokenising a text beyond {_bytes(tokenizer._UNCHECKED_BYTES)} may take, at {tokenizer._BYTES_PER_BYTE} bytes "
    "for each of its bytes": "the free memory, within a container's limit",
    "texts of a request for embeddings or scores, choices of `/v1/score_choices`": f"{vectors.MAX_TEXTS:,}",
    "characters of the prompt times choices of `/v1/score_choices`": f"{running_request.MAX_REPEATED_CHARS:,}",
    "scored tokens of `/v1/score_choices`": f"{running_request.MAX_LOGPROBS:,}",
    "numbers of a response with pooling `none`": f"{vectors.MAX_NUMBERS:,}",
    # Images and audio
    "images of a request": f"{SERVER.max_images:,}",
    "bytes of an image": _bytes(image.MAX_IMAGE_BYTES),
    "side of an image": f"{image.MAX_SIDE:,} pixels",
    "pixels of an image": f"{image.MAX_PIXELS:,}",
    "largest sample of a sound, whose range is -1 to 1": f"{projector.MAX_AMPLITUDE:,}",
    "bytes of a sound": _bytes(audio.MAX_AUDIO_BYTES),
    "length of all sounds of a request": _seconds(audio_formats.MAX_SECONDS),
    "bytes of an image that is fetched": _bytes(request_media.MAX_FILE_BYTES),
    "redirects of an image that is fetched": f"{request_media.MAX_REDIRECTS:,}",
    "time to fetch an image": _seconds(request_media.TIMEOUT_S),
    "time to fetch the images of a request": _seconds(request_media.REQUEST_TIMEOUT_S),
    "images that are fetched at once": f"{request_media._MAX_AT_ONCE:,}",
    "embeddings that wait for their prompts": _bytes(media_encoder.MAX_HELD_BYTES),
    "embeddings that are kept for later prompts": _bytes(ENGINE.media_cache_bytes),
    # Files
    "layers of a model": f"{gguf_check.MAX_LAYERS:,}",
    "experts of a model": f"{gguf_check.MAX_EXPERTS:,}",
    "bytes of a remote file's header": _bytes(remote_header._MOST_BYTES),
    "beginning of a model's file that is compared to notice a replaced file": _bytes(gguf_file._HEADER_BYTES),
    "bytes of a hub's listing": _bytes(network._MAX_LISTING_BYTES),
    "time until a hub has sent its headers, with redirects": _seconds(network.HEAD_S),
    "time until a hub's listing is complete, after its headers": _seconds(network.SMALL_BODY_S),
    "models that a server downloads at once": f"{model_downloads.MAX_DOWNLOADS}",
    f"slowest rate of a download, over {_seconds(network.RATE_WINDOW_S)}": f"{network.MIN_BYTES_S:,} bytes/s",
    "wait for a program that opens a pipe in place of a file": _seconds(validation.PIPE_WAIT_S),
    "bytes of a certificate or a key from a pipe": _bytes(listeners._MAX_PEM_BYTES),
    "bytes of a TOML file": _bytes(validation.MAX_CONFIG_BYTES),
    "bytes of a file that a flag names (keys, presets, templates)": _bytes(flag.MAX_FILE_BYTES),
    "bytes of a text file of a command": _bytes(inputs._MAX_TEXT_BYTES),
    "bytes of a saved conversation": _bytes(conversations._MAX_FILE_BYTES),
    "bytes of a line of a trace": _bytes(trace_file._MAX_LINE_BYTES),
    "images of a saved prefix": f"{saved_prefixes._MAX_MEDIA:,}",
    "redirects of a download": f"{network.MAX_REDIRECTS}",
    f"attempts in a row that bring less than {_bytes(download._MIN_PROGRESS)}": f"{download._ATTEMPTS}",
    "part of the disk that downloads leave free": (
        f"{download._RESERVED_SHARE * 100:g} %, at most {_bytes(download._MAX_RESERVE)}"
    ),
}
"""The figure of each row, by the row's first cell."""


def _rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "limit"]


def test_the_page_has_the_figures_of_the_code() -> None:
    """Each row's figure is the code's, no row is without a check, and no limit is there twice."""
    rows = _rows()
    assert len({row[0] for row in rows}) == len(rows)
    assert {row[0]: row[1] for row in rows} == FIGURES


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0])
def test_options_that_change_a_limit_exist(row: list[str]) -> None:
    """The third cell has a flag of the server, an option of a request, or a dash; the fourth has the effect."""
    assert len(row) == 4
    assert row[3]
    flags = {name for flag in FLAGS for name in flag.names}
    for option in re.findall("`([^`]+)`", row[2]):
        assert option in flags | REQUEST_NAMES
    assert row[2] == "-" or "`" in row[2]


def test_the_security_policy_names_files_and_flags_that_exist() -> None:
    """Each link of SECURITY.md leads to a file, and each flag is a flag of the server or of the command."""
    root = PAGE.parents[2]
    text = (root / "SECURITY.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text.replace("\n", " "))
    assert links
    assert [link for link in links if not (root / link).is_file()] == []
    flags = {name for flag in FLAGS for name in flag.names} | {"--version", "--host"}
    assert {found for found in re.findall(r"`(--[a-z-]+)", text) if found not in flags} == set()
