"""LoRA adapters of a running server: loaded and unloaded by vLLM's routes, and chosen by the `model` of every API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.running import LONG_S, RunningServer

from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server.settings import ApiKey, ServerSettings
from paceline.streaming import StreamChannel
from paceline.testing.models import KINDS, LlamaSpec, write_lora, write_model

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"isolation": "thread", "num_slots": 2, "n_ctx": 512, "n_threads": 1}
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Who is there?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "llama.gguf", KINDS["llama"], metadata={"tokenizer.chat_template": TEMPLATE})
    for seed, name in enumerate(("base", "one", "two"), 1):
        write_lora(folder / f"{name}.gguf", KINDS["llama"], seed=seed)
    write_lora(folder / "other.gguf", LlamaSpec(n_embd=32, n_head=2, n_head_kv=1))
    return folder


def serving(folder: Path, **settings: Any) -> RunningServer:
    given = {"model": folder / "llama.gguf", "aliases": ("tiny",), "engine_options": ENGINE, "lora_loading": True}
    return RunningServer(ServerSettings(**{**given, **settings}))


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(folder) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def load(client: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(client: httpx.Client, name: str, **more: Any) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json() if response.headers["content-type"].startswith("application/json") else response.text


def names(client: httpx.Client) -> list[str]:
    return [entry["id"] for entry in ok(client.get("/v1/models"))["data"]]


def unread(server: RunningServer, adapter: str) -> StreamChannel:
    """A request with an adapter that waits for its reader."""
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    options = RequestOptions(lora={adapter: 1.0}, max_buffered_tokens=1)
    return server.engine.accept(server.engine.prepare("Who", params, options))


def by_completions_status(client: httpx.Client, model: str) -> int:
    return client.post("/v1/completions", json={"model": model, "prompt": "Who", "max_tokens": 1}).status_code


# ---- each API: what it generates for a model's name


def by_completions(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "prompt": "Who is there?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = ok(client.post("/v1/completions", json=body))
    assert response["model"] == model
    assert "warnings" not in response
    return response["choices"][0]["text"]


def by_chat(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = ok(client.post("/v1/chat/completions", json=body))
    assert "warnings" not in response
    return response["choices"][0]["message"]["content"]


def by_responses(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "input": "Who is there?", "max_output_tokens": 16, "temperature": 0, "ignore_eos": True}
    response = ok(client.post("/v1/responses", json=body))
    return response["output"][0]["content"][0]["text"]


def by_messages(client: httpx.Client, model: str) -> Any:
    response = ok(
        client.post("/v1/messages", json={"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0})
    )
    assert "warnings" not in response
    return response["content"]


def by_ollama_chat(client: httpx.Client, model: str) -> Any:
    options = {"temperature": 0, "num_predict": 12}
    body = {"model": f"{model}:latest", "messages": MESSAGES, "stream": False, "options": options}
    response = ok(client.post("/api/chat", json=body))
    assert "warnings" not in response
    return response["message"]["content"]


def by_ollama_generate(client: httpx.Client, model: str) -> Any:
    options = {"temperature": 0, "num_predict": 12}
    body = {"model": model, "prompt": "Who is there?", "raw": True, "stream": False, "options": options}
    return ok(client.post("/api/generate", json=body))["response"]


def by_llama_server(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "prompt": "Who is there?", "n_predict": 12, "temperature": 0, "ignore_eos": True}
    return ok(client.post("/completion", json=body))["content"]


APIS = [by_completions, by_chat, by_responses, by_messages, by_ollama_chat, by_ollama_generate, by_llama_server]


@pytest.mark.parametrize("api", APIS)
def test_the_model_field_chooses_an_adapter(
    client: httpx.Client, folder: Path, api: Callable[[httpx.Client, str], Any]
) -> None:
    """In every API: its output changes with the adapter, and only then."""
    plain = api(client, "tiny")
    for name in ("one", "two"):
        ok(load(client, name, folder / f"{name}.gguf"))
    found = [api(client, name) for name in ("one", "two")]
    assert plain not in found
    assert found[0] != found[1]
    assert api(client, "tiny") == plain


# ---- loading and unloading


def test_adapters_are_listed_with_their_parent(client: httpx.Client, folder: Path) -> None:
    """Beside the model, with their files' names and no folders; in llama-server's and Ollama's lists as well."""
    assert "one" in ok(load(client, "one", folder / "one.gguf"))
    model, adapter = ok(client.get("/v1/models"))["data"]
    assert (model["id"], adapter["id"]) == ("tiny", "one")
    assert (adapter["parent"], adapter["root"], adapter["object"]) == ("tiny", "one.gguf", "model")
    assert ok(client.get("/v1/models/one")) == adapter
    assert [item["path"] for item in ok(client.get("/lora-adapters"))] == ["one.gguf"]
    assert [model["name"] for model in ok(client.get("/api/tags"))["models"]] == ["tiny", "one"]
    assert ok(client.post("/api/show", json={"model": "one"}))["details"]["parent_model"] == "tiny"
    ok(unload(client, "one"))
    assert names(client) == ["tiny"]
    assert client.get("/v1/models/one").status_code == 404


def test_an_adapter_that_was_unloaded_is_no_name_of_the_model(folder: Path) -> None:
    """404 with the nearest names in every API, until it is loaded again; a name that never was one is the model's."""
    with serving(folder, embeddings=True) as server, server.client() as client:
        assert "warnings" in ok(
            client.post("/v1/completions", json={"model": "style-1", "prompt": "x", "max_tokens": 1})
        )
        for name in ("style-1", "style-2"):
            ok(load(client, name, folder / "one.gguf"))
        adapted = by_completions(client, "style-1")
        ok(unload(client, "style-1"))
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
            "/v1/responses": {"input": "x"},
            "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
            "/api/chat": {"messages": MESSAGES},
            "/api/generate": {"prompt": "x"},
            "/completion": {"prompt": "x"},
            "/v1/embeddings": {"input": "x"},
            "/api/embed": {"input": "x"},
        }
        for path, body in bodies.items():
            for model in ("style-1", "style-1:latest"):
                response = client.post(path, json={**body, "model": model})
                assert response.status_code == 404, (path, response.text)
                assert "did you mean style-2?" in response.text, path
            assert client.post(path, json={**body, "model": "never"}).status_code == 200, path
        error = client.post("/v1/completions", json={"model": "style-1", "prompt": "x"}).json()["error"]
        assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "not_found_error")
        ok(load(client, "style-1", folder / "one.gguf"))
        assert by_completions(client, "style-1") == adapted


def test_an_adapter_that_is_being_freed_is_no_name_of_the_model(
    server: RunningServer, client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is refused from when the adapter is not listed any more, and not only when its memory is free."""
    ok(load(client, "x", folder / "one.gguf"))
    engine, is_freed, may_end = server.engine, threading.Event(), threading.Event()
    free = engine._free_adapter

    def hold(key: str) -> None:
        free(key)
        is_freed.set()
        assert may_end.wait(LONG_S)

    monkeypatch.setattr(engine, "_free_adapter", hold)
    unloading = threading.Thread(target=lambda: ok(unload(client, "x")))
    unloading.start()
    try:
        assert is_freed.wait(LONG_S)
        assert names(client) == ["tiny"]
        assert by_completions_status(client, "x") == 404
    finally:
        may_end.set()
        unloading.join(LONG_S)


def test_an_adapter_that_is_unloaded_while_a_request_is_read_is_no_name_of_the_model(
    server: RunningServer, client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is refused; it does not run without the adapter that it named."""
    ok(load(client, "x", folder / "one.gguf"))
    engine = server.engine
    loras = engine.loras

    def unload_after() -> Any:
        found = loras()
        if found:
            engine.unload_lora("x")
        return found

    monkeypatch.setattr(engine, "loras", unload_after)
    assert by_completions_status(client, "x") == 400
    assert by_completions_status(client, "x") == 404


def test_a_file_that_is_no_adapter_is_refused(client: httpx.Client, folder: Path) -> None:
    """Each with its reason and field, and without the server's folders; nothing is loaded."""
    long = folder / ("x" * 300)
    secret = folder / "secret.txt"
    secret.write_text("k3y-of-the-house")
    statuses = {
        folder / "none.gguf": 404,
        long: 404,
        folder / "llama.gguf": 400,
        folder / "other.gguf": 400,
        secret: 400,
    }
    for path, status in statuses.items():
        response = load(client, "x", path)
        error = response.json()["error"]
        code = "adapter_file_not_found" if path.name == "none.gguf" else "adapter_error"
        assert (response.status_code, error["param"], error["code"]) == (status, "lora_path", code)
        assert str(folder) not in error["message"]
        assert "k3y" not in error["message"]
    assert names(client) == ["tiny"]


def test_names_that_are_taken_are_refused(client: httpx.Client, folder: Path) -> None:
    """The model's own, with Ollama's tag as well, and an adapter's, unless it is to be replaced."""
    for name in ("tiny", "tiny:latest"):
        response = load(client, name, folder / "one.gguf")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")
    ok(load(client, "x", folder / "one.gguf"))
    response = load(client, "x", folder / "two.gguf")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")
    first = by_completions(client, "x")
    ok(load(client, "x", folder / "two.gguf", load_inplace=True))
    assert by_completions(client, "x") != first
    assert names(client) == ["tiny", "x"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_name": "x"},
        {"lora_name": "", "lora_path": "x"},
        {"lora_name": 1, "lora_path": "x"},
        {"lora_name": "x\n", "lora_path": "x"},
        {"lora_name": "x\u2028", "lora_path": "x"},
        {"lora_name": "x", "lora_path": None},
        {"lora_name": "x", "lora_path": "y", "load_inplace": 1},
        {"lora_name": "x", "lora_path": "y", "scale": 1},
    ],
    ids=str,
)
def test_bodies_that_are_wrong_are_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    """With 400, as all of OpenAI's routes."""
    response = client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] or not body


def test_an_adapter_that_is_not_there_cannot_be_unloaded(client: httpx.Client) -> None:
    """404, with vLLM's field for a number, too."""
    response = unload(client, "x", lora_int_id=3)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_not_found")


def test_an_adapter_in_use_stays_until_its_requests_have_ended(
    server: RunningServer, client: httpx.Client, folder: Path
) -> None:
    """409 in time, and an unload that waits longer refuses new requests meanwhile."""
    ok(load(client, "x", folder / "one.gguf"))
    held = unread(server, "x")
    response = unload(client, "x", timeout_s=0)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "adapter_in_use")
    assert names(client) == ["tiny", "x"]
    unloading = threading.Thread(target=lambda: ok(unload(client, "x")))
    unloading.start()
    while by_completions_status(client, "x") != 400:
        assert unloading.is_alive()
    held.cancel()
    unloading.join(LONG_S)
    assert names(client) == ["tiny"]


def test_the_servers_own_scales_forget_an_adapter_that_is_unloaded(folder: Path) -> None:
    """Requests without a `lora` go on; an adapter that was not unloaded applies as before."""
    engine = {**ENGINE, "lora": {"base": folder / "base.gguf"}}
    with serving(folder, engine_options=engine, lora_scales={"base": 1.0}) as server, server.client() as client:
        adapted = by_llama_server(client, "tiny")
        held = unread(server, "base")
        assert unload(client, "base", timeout_s=0).status_code == 409
        assert by_llama_server(client, "tiny") == adapted
        held.cancel()
        ok(unload(client, "base"))
        assert by_llama_server(client, "tiny") != adapted
        assert ok(client.get("/lora-adapters")) == []


def test_a_slot_that_was_saved_with_an_adapter_is_restored_for_that_adapter_alone(folder: Path, tmp_path: Path) -> None:
    """A restored slot is for the scales of the server; with others the request is refused, and nothing is restored."""
    engine = {**ENGINE, "lora": {"base": folder / "base.gguf"}, "state_folder": tmp_path}
    body = {"prompt": "Who is there? " * 8, "n_predict": 4, "temperature": 0, "id_slot": 1}
    with serving(folder, engine_options=engine) as server, server.client() as client:
        ok(client.post("/completion", json={**body, "lora": [{"id": 0, "scale": 1.0}]}))
        ok(client.post("/slots/1?action=save", json={"filename": "x.bin"}))
        refused = client.post("/slots/0?action=restore", json={"filename": "x.bin"})
        assert (refused.status_code, "loaded for no LoRA adapter" in refused.text) == (400, True)
        assert ok(client.post("/completion", json=body))["timings"]["cache_n"] == 0
        ok(client.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]))
        assert ok(client.post("/slots/0?action=restore", json={"filename": "x.bin"}))["n_restored"] > 0


def test_adapters_do_not_apply_to_vectors(folder: Path) -> None:
    """Naming one there is an error of its own, not a vector of the model."""
    with serving(folder, embeddings=True) as server, server.client() as client:
        ok(load(client, "x", folder / "one.gguf"))
        for route, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/embedding", {"content": "a"}),
            ("/api/embed", {"input": "a"}),
        ):
            assert client.post(route, json={"model": "x", **body}).status_code in (400, 501)
            assert client.post(route, json={"model": "tiny", **body}).status_code == 200


def test_loading_is_off_unless_the_server_was_started_with_it(folder: Path) -> None:
    """The flag is named; adapters of the start can be chosen all the same."""
    engine = {**ENGINE, "lora": {"base": folder / "base.gguf"}}
    with serving(folder, engine_options=engine, lora_loading=False) as server, server.client() as client:
        for response in (load(client, "x", folder / "one.gguf"), unload(client, "base")):
            assert response.status_code == 501 or response.json()["error"]["code"] == "unsupported"
            assert "--enable-lora-loading" in response.json()["error"]["message"]
        assert names(client) == ["tiny", "base"]
        assert by_completions(client, "base") != by_completions(client, "tiny")


def test_many_clients_load_use_and_unload_at_once(server: RunningServer, folder: Path) -> None:
    """Each gets its adapter's output, and at the end none is left."""
    with server.client() as client:
        ok(load(client, "expected", folder / "one.gguf"))
        expected = by_completions(client, "expected")
        ok(unload(client, "expected"))
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with server.client() as client:
                for _ in range(3):
                    ok(load(client, name, folder / "one.gguf"))
                    assert by_completions(client, name) == expected
                    ok(unload(client, name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"client{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not failures
    with server.client() as client:
        assert names(client) == ["tiny"]


def test_tenants_set_scales_by_request_and_the_operator_sets_them_for_all(folder: Path) -> None:
    """A tenant's scales change its own texts alone, also beside other tenants' requests and after a common prompt."""
    keys = (ApiKey(secret="op"), ApiKey(secret="a", tenant="a"), ApiKey(secret="b", tenant="b"))
    engine = {**ENGINE, "lora": {"one": str(folder / "one.gguf")}}
    body = {"prompt": "Who is there, and who was there before?", "n_predict": 12, "temperature": 0}
    scaled = [{"id": 0, "scale": 1.0}]

    def text(client: httpx.Client, **more: Any) -> str:
        return str(ok(client.post("/completion", json={**body, **more}))["content"])

    with serving(folder, engine_options=engine, api_keys=keys) as server:
        operator, tenant, other = (server.client(headers={"authorization": f"Bearer {key.secret}"}) for key in keys)
        plain, adapted = text(other), text(tenant, lora=scaled)
        assert plain != adapted
        assert tenant.post("/lora-adapters", json=scaled).status_code == 403
        assert (text(other), text(tenant), text(tenant, lora=scaled)) == (plain, plain, adapted)
        with ThreadPoolExecutor(8) as threads:  # in common batches
            calls = [
                threads.submit(text, item, **more) for item in (tenant, other) for more in ({"lora": scaled}, {}) * 4
            ]
            assert [call.result() for call in calls] == [adapted, plain] * 8
        assert ok(operator.post("/lora-adapters", json=scaled)) == {"success": True}
        assert (text(other), text(tenant), text(other, lora=[])) == (adapted, adapted, plain)
        for client in (operator, tenant, other):
            client.close()
