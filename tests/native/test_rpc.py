"""A model that another process computes over ggml's RPC: the same tokens, and the loss of that process."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.polling import wait_until
from tests.ports import free_port
from tests.rpc_world import LendingServer, hello, replying, stand_in, stopped

from paceline import LLM, estimate_memory
from paceline.config import EngineConfig
from paceline.demo import demo_model_path
from paceline.errors import EngineDied, EngineError, InvalidParams, RpcServerUnavailable
from paceline.runtime import build_info
from paceline.runtime.rpc import checked_cache, greet
from paceline.streaming import FinishReason, Stream

pytestmark = pytest.mark.skipif(not build_info().rpc, reason="this core was built without PACELINE_RPC=ON")

STORY = "Once upon a time"
LOCAL: dict[str, Any] = {**EXACT, "n_ctx": 4096}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[LendingServer]:
    with LendingServer() as made:
        yield made


@contextmanager
def lent(server: LendingServer, **options: Any) -> Iterator[LLM]:
    """An engine with all layers on the server."""
    wanted: dict[str, Any] = {"rpc": [server.address], "num_slots": 4, "rpc_timeout_s": 3, **LOCAL, **options}
    with LLM(isolation="process", **wanted) as llm:
        yield llm


@pytest.fixture(scope="module")
def local() -> Iterator[LLM]:
    """The same model on this machine."""
    with LLM(num_slots=4, use_extra_bufts=False, **LOCAL) as llm:
        yield llm


def assert_as_local(local: LLM, found: list[int] | tuple[int, ...], prompt: str = STORY) -> None:
    """Assert that tokens equal this machine's draws, none twice and none missing."""
    expected = local.generate(prompt, max_tokens=len(found), **GREEDY).token_ids
    assert_same_but_for_near_ties(local, local.tokenizer.encode(prompt), expected, found)


class Read:
    """A stream that is read in two parts: a loop that is left would cancel it."""

    def __init__(self, stream: Stream) -> None:
        self._chunks = iter(stream)

    def first(self, count: int = 5) -> list[int]:
        """Return that many tokens or a few more."""
        found: list[int] = []
        while len(found) < count:
            found += next(self._chunks).token_ids
        return found

    def rest(self) -> list[int]:
        return [token for chunk in self._chunks for token in chunk.token_ids]


def test_another_process_computes_the_same_tokens(server: LendingServer, local: LLM) -> None:
    """Several streams at once; and again with the next engine, as the server is done with the closed engine."""
    prompts = [STORY, "The cat", "A king"]
    with lent(server) as llm:
        for prompt, completion in zip(prompts, llm.generate(prompts, max_tokens=40, **GREEDY), strict=True):
            assert_as_local(local, completion.token_ids, prompt)
        seeded = llm.generate(STORY, max_tokens=30, seed=3).token_ids
    with lent(server) as again:
        assert again.generate(STORY, max_tokens=30, seed=3).token_ids == seeded


def test_its_layers_lie_there(server: LendingServer) -> None:
    """The memory that is planned is the server's, but for the embeddings of tokens, which this machine looks up."""
    estimate = estimate_memory(demo_model_path(), rpc=server.address, n_ctx=4096)
    devices = {device.device: device for device in estimate.devices}
    assert estimate.is_measured and devices["RPC0"].weights_bytes > 0.7 * estimate.weights_bytes
    assert devices["RPC0"].cache_bytes == estimate.cache_bytes
    assert devices["RPC0"].free_bytes is not None and estimate.fits
    from_header = estimate_memory(demo_model_path(), rpc=server.address, n_ctx=4096, dry_run=False)
    assert {device.device for device in from_header.devices} == {"RPC0", "Host"} or len(from_header.devices) == 2
    without = estimate_memory(demo_model_path(), rpc=server.address, n_ctx=4096, n_gpu_layers=0)
    assert all(device.weights_bytes == 0 for device in without.devices if device.device == "RPC0")


def test_two_servers_share_a_model(server: LendingServer, local: LLM) -> None:
    """Each has layers, in given shares; the error names the lost server."""
    with LendingServer() as other:
        both = [server.address, other.address]
        estimate = estimate_memory(demo_model_path(), rpc=both, n_ctx=4096, tensor_split=[3, 1])
        weights = {device.device: device.weights_bytes for device in estimate.devices}
        assert weights["RPC0"] > 1.5 * weights["RPC1"] > 0
        with LLM(isolation="process", rpc=both, rpc_timeout_s=1, num_slots=4, **LOCAL) as llm:
            assert_as_local(local, llm.generate(STORY, max_tokens=40, **GREEDY).token_ids)
            with llm.stream(STORY, max_tokens=2000, **GREEDY) as stream:
                read = Read(stream)
                read.first()
                other.kill()
                with pytest.raises(RpcServerUnavailable, match=other.address) as caught:
                    read.rest()
            assert server.address not in str(caught.value)
            other.start()
            wait_until(lambda: llm.heartbeat().state not in ("crash_loop", "starting"))
            assert_as_local(local, llm.generate(STORY, max_tokens=40, **GREEDY).token_ids)


def test_a_server_that_dies_in_mid_stream_is_awaited(server: LendingServer, local: LLM) -> None:
    """The streams go on at the same place once it is back: each token comes once."""
    with lent(server, rpc_timeout_s=60) as llm:
        with (
            llm.stream(STORY, max_tokens=120, **GREEDY) as one,
            llm.stream("The cat", max_tokens=120, **GREEDY) as other,
        ):
            some, more = Read(one), Read(other)
            first, second = some.first(), more.first()
            server.kill()
            wait_until(lambda: llm.heartbeat().num_crashes > 0)
            server.start()
            first, second = first + some.rest(), second + more.rest()
        assert (len(first), len(second)) == (120, 120)
        assert_as_local(local, first)
        assert_as_local(local, second, "The cat")
        assert llm.heartbeat().num_restarts >= 1


def test_requests_of_a_server_that_stays_away_end_with_its_address(
    server: LendingServer, local: LLM, tmp_path: Path
) -> None:
    """Open requests after rpc_timeout_s, new requests at once; when it is back, the engine works again."""
    with lent(server, rpc_timeout_s=2, state_folder=tmp_path) as llm:
        with llm.stream(STORY, max_tokens=2000, **GREEDY) as stream:
            read = Read(stream)
            read.first()
            server.kill()
            with pytest.raises(RpcServerUnavailable, match=f"{server.address} refuses connections"):
                read.rest()
        start_s = time.monotonic()
        for _ in range(20):
            with pytest.raises(RpcServerUnavailable, match=server.address):
                llm.generate(STORY, max_tokens=5)
            with pytest.raises(RpcServerUnavailable, match=server.address):
                llm.embed("a text")
        assert time.monotonic() - start_s < 60, "forty requests that wait for the server would take 80 s"
        with pytest.raises(RpcServerUnavailable, match=server.address):
            llm.save_prefix("story", STORY)
        wait_until(lambda: llm.heartbeat().state == "crash_loop")
        server.start()
        wait_until(lambda: llm.heartbeat().state not in ("crash_loop", "starting"))
        assert_as_local(local, llm.generate(STORY, max_tokens=20, **GREEDY).token_ids)


def test_a_server_that_hangs_is_given_up(server: LendingServer, local: LLM) -> None:
    """A stopped process keeps its connections: its silence counts, the heartbeat shows it, and the stream goes on after."""
    with lent(server, rpc_timeout_s=2) as llm, llm.stream(STORY, max_tokens=60, **GREEDY) as stream:
        read = Read(stream)
        tokens = read.first()
        with stopped(server):
            wait_until(lambda: (beat := llm.heartbeat()).state == "ticking" and beat.state_s > 1)
            wait_until(lambda: llm.heartbeat().num_crashes > 0)
        tokens += read.rest()
        assert len(tokens) == 60
        assert_as_local(local, tokens)


def test_a_server_that_hangs_for_good_ends_requests(server: LendingServer) -> None:
    """Twice rpc_timeout_s after the last token, and the time of greeting it."""
    with lent(server, rpc_timeout_s=2) as llm, llm.stream(STORY, max_tokens=2000, **GREEDY) as stream:
        read = Read(stream)
        read.first()
        with stopped(server), pytest.raises(EngineError, match=server.address) as caught:
            read.rest()
        assert isinstance(caught.value, RpcServerUnavailable)
        assert stream.finish_reason is FinishReason.ERROR


def test_an_idle_engine_survives_its_server(server: LendingServer, local: LLM) -> None:
    """Nothing is noticed while nothing is computed; the next request finds the connection lost, and is computed all the same."""
    with lent(server, rpc_timeout_s=30) as llm:
        llm.generate(STORY, max_tokens=3, **GREEDY)
        server.kill()
        server.start()
        assert_as_local(local, llm.generate(STORY, max_tokens=20, **GREEDY).token_ids)


def test_requests_may_fail_with_the_server(server: LendingServer) -> None:
    """With on_engine_death="fail" the error has the address as it was given, and the engine works once the server is back."""
    address = server.address.replace("127.0.0.1", "localhost")
    with lent(server, rpc=[address], on_engine_death="fail") as llm:
        with llm.stream(STORY, max_tokens=2000, **GREEDY) as stream:
            read = Read(stream)
            read.first()
            server.kill()
            with pytest.raises(EngineDied, match=f"the RPC server {address} was lost"):
                read.rest()
        server.start()
        wait_until(lambda: llm.heartbeat().state not in ("crash_loop", "starting"))
        assert len(llm.generate(STORY, max_tokens=5, **GREEDY).token_ids) == 5


def test_a_busy_server_is_refused(server: LendingServer) -> None:
    """A server has one engine at a time, and llama.cpp would wait without end; the first engine is not disturbed."""
    with lent(server) as llm, llm.stream(STORY, max_tokens=200, **GREEDY) as stream:
        read = Read(stream)
        tokens = read.first()
        with pytest.raises(RpcServerUnavailable, match="serves one program at a time"), lent(server, rpc_timeout_s=1):
            pass
        assert len(tokens + read.rest()) == 200


def silence(connection: socket.socket) -> None:
    pass


def of_a_web_server(connection: socket.socket) -> None:
    connection.recv(9)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (silence, "said nothing for 1 s"),
        (of_a_web_server, "is none that this build can use"),
        (replying(), "closed the connection"),
        (replying(hello(6)), r"speaks version 6\.0\.0"),
        (replying(hello(7, 9)), r"speaks version 7\.9\.0"),
        (replying(b"short"), "has 5 bytes instead of 28"),
        (replying(hello(7), struct.pack("<I", 0)), "has 0 devices"),
        (replying(hello(7), struct.pack("<I", 2**31)), "has 2147483648 devices"),
        (replying(hello(7), struct.pack("<I", 1), struct.pack("<QQ", 0, 0)), "has 0 bytes free of 0"),
        (replying(hello(7), struct.pack("<I", 1), struct.pack("<QQ", 2, 1)), "has 2 bytes free of 1"),
    ],
)
def test_a_server_of_another_version_is_refused(behave: Any, words: str) -> None:
    """Before llama.cpp connects, which would end the process; the error names the address."""
    with stand_in(behave) as address, pytest.raises(RpcServerUnavailable, match=words) as caught:
        greet(address, 1)
    assert address in str(caught.value)


def test_another_patch_of_the_protocol_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp takes it, though operations may have other numbers there."""
    replies = (hello(7, 0, 99), struct.pack("<I", 1), struct.pack("<QQ", 5, 9))
    with stand_in(replying(*replies)) as address:
        found = greet(address, 5)
    assert [(device.name, device.free_bytes, device.total_bytes) for device in found.devices] == [("RPC0", 5, 9)]
    assert "operations may have other numbers" in caplog.text


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3])
def test_a_server_that_is_lost_while_loading_is_an_error(dies_after: int) -> None:
    """Of the constructor, which returns; wherever in the load that is."""
    greeting = [hello(7), struct.pack("<I", 1), struct.pack("<QQ", 2**40, 2**40)]
    connections = iter(range(1000))

    def behave(connection: socket.socket) -> None:
        if next(connections) == 0:
            replying(*greeting)(connection)
        else:
            replying(*[hello(7), struct.pack("<I", 1), struct.pack("<Q", 64)][:dies_after])(connection)

    with stand_in(behave) as address, pytest.raises(EngineError, match=f"{address} (was lost|is none|closed)"):
        LLM(isolation="process", rpc=address, rpc_timeout_s=2, n_ctx=512, fit=False)


def test_a_server_that_hangs_while_loading_is_an_error() -> None:
    """Of the constructor, after rpc_timeout_s: llama.cpp would wait for a reply without end."""
    greeting = [hello(7), struct.pack("<I", 1), struct.pack("<QQ", 2**40, 2**40)]
    connections = iter(range(1000))

    def behave(connection: socket.socket) -> None:
        if next(connections) == 0:
            replying(*greeting)(connection)

    with stand_in(behave) as address, pytest.raises(RpcServerUnavailable, match=f"{address} was lost: it was silent"):
        LLM(isolation="process", rpc=address, rpc_timeout_s=1, n_ctx=512, fit=False)


def test_a_wrong_address_is_an_error_of_the_constructor() -> None:
    """No listener, or no such host; in any form of addresses."""
    port = free_port()
    for given in (f"127.0.0.1:{port}", [f"127.0.0.1:{port}"]):
        with pytest.raises(RpcServerUnavailable, match=f"127.0.0.1:{port} refuses connections"):
            LLM(isolation="process", rpc=given)
    with pytest.raises(RpcServerUnavailable, match=r"nowhere\.invalid:50052 has no IPv4 address"):
        LLM(isolation="process", rpc="nowhere.invalid:50052")
    with pytest.raises(RpcServerUnavailable, match=f"127.0.0.1:{port}"):
        estimate_memory(demo_model_path(), rpc=f"127.0.0.1:{port}")


def test_two_names_of_one_server_are_refused(server: LendingServer) -> None:
    """Its memory would count twice."""
    with pytest.raises(InvalidParams, match="are the same server"):
        LLM(isolation="process", rpc=[server.address, f"localhost:{server.port}"])


def test_a_thread_may_not_lose_a_server() -> None:
    """llama.cpp would end the caller's program."""
    with pytest.raises(InvalidParams, match='needs isolation="process"'):
        LLM(rpc="127.0.0.1:50052")


@pytest.mark.full
def test_a_peer_that_says_nothing_does_not_keep_the_server(server: LendingServer) -> None:
    """It serves one at a time, and hangs up on who connects without a greeting."""
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(b"\x0e")
        assert greet(server.address, 30).devices
        silent.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # where bytes of ours were left unread
            assert silent.recv(1) == b""


def test_damaged_tensors_of_the_cache_are_removed(tmp_path: Path) -> None:
    """Damaged files would become wrong weights; other files stay."""
    whole, damaged, other = (tmp_path / name for name in ("af63dc4c8601ec8c", "0123456789abcdef", "notes.txt"))
    for path in (whole, damaged, other):
        path.write_bytes(b"a")
    assert checked_cache(tmp_path) == [damaged]
    assert sorted(path.name for path in tmp_path.iterdir()) == [whole.name, other.name]
    assert checked_cache(tmp_path / "new") == [] and (tmp_path / "new").is_dir()


def test_addresses_are_checked() -> None:
    """In lists and texts, before anything is connected to."""
    assert EngineConfig(rpc="a:1, b.example:65535").rpc_addresses == ("a:1", "b.example:65535")
    assert EngineConfig().rpc_addresses == EngineConfig(rpc=[]).rpc_addresses == ()
    for wrong in (
        "a",
        "a:0",
        "a:65536",
        "a:" + "9" * 5000,  # more digits than Python turns into a number
        ":1",
        "a:x",
        "::1:5",
        "a b:1",
        "http://a:1",
        ["a:1", "a:1"],
        [1],
        5,
        b"a:1",
        "a:1,",
    ):
        with pytest.raises(InvalidParams, match="rpc"):
            EngineConfig(rpc=wrong)
    for seconds in (0, -1, float("nan"), "5"):
        with pytest.raises(InvalidParams, match="rpc_timeout_s"):
            EngineConfig(rpc_timeout_s=seconds)


def test_the_guide_works(server: LendingServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python runs, with the address of this server."""
    page = Path(__file__).parents[2] / "docs/guide/rpc.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert "127.0.0.1:50052" in block
    exec(compile(block.replace("127.0.0.1:50052", server.address), str(page), "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip()
