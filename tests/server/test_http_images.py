"""Images over HTTP, in every API, with tiny random models: as the library computes them, cached, counted, refused by name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.exact import EXACT
from tests.media_requests import DATA, FILE, URL, data_url, image_part, text_part
from tests.pictures import picture, png_of
from tests.server.openai_world import OpenAIServer

from paceline import LLM, Image
from paceline.server.flags import ModelPreset
from paceline.server.request_media import MediaFetcher
from paceline.server.router.model_listing import _modalities_of_files
from paceline.server.settings import ServerSettings
from paceline.testing.models import CHAT_TEMPLATE, Qwen2VlSpec, Qwen25VisionSpec, write_model

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"n_ctx": 2048, "num_slots": 4}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
QUESTION = "what is it?"
ASKED: Any = [{"role": "user", "content": [image_part(), text_part(QUESTION)]}]
MARKER = "<__media__>"
REMOTE = "https://images.example/cat.png"
OTHER = data_url(picture(8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_model(folder / "mmproj-seeing.gguf", Qwen25VisionSpec())
    return write_model(folder / "seeing.gguf", Qwen2VlSpec(), metadata={"tokenizer.chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[OpenAIServer]:
    """The projector beside the model is found."""
    with OpenAIServer(ENGINE, model=model, media_marker=MARKER, responses_store=4, max_images=3) as world:
        yield world


@pytest.fixture(scope="module")
def blind(model: Path) -> Iterator[OpenAIServer]:
    """The same model without its projector."""
    with OpenAIServer({**ENGINE, "mmproj": False}, model=model, media_marker=MARKER) as world:
        yield world


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """The reply of the library's chat."""
    with LLM(model, isolation="thread", **ENGINE, **EXACT) as llm:
        asked: Any = [{"role": "user", "content": [Image(FILE), text_part(QUESTION)]}]
        return llm.chat(asked, ignore_eos=False, **GREEDY).content


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[httpx.Client]:
    with world.client() as client:
        yield client


def posted(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def works(client: httpx.Client) -> None:
    """The server generates."""
    assert posted(client, "/v1/chat/completions", messages=ASKED, **GREEDY)["usage"]["completion_tokens"] > 0


# ---- what is computed


def test_openais_clients_send_images(world: OpenAIServer, expected: str) -> None:
    """In chats, whole and streamed, as URL objects, as texts and with details; in responses, also of tools."""
    with world.openai() as client:
        chat = client.chat.completions.create(model="tale", messages=ASKED, **GREEDY)
        assert chat.choices[0].message.content == expected
        assert chat.usage is not None
        assert chat.usage.prompt_tokens > 20
        assert chat.usage.completion_tokens_details is None or not chat.usage.completion_tokens_details.reasoning_tokens
        near: Any = [{"role": "user", "content": [image_part(detail="high"), text_part(QUESTION)]}]
        again = client.chat.completions.create(model="tale", messages=near, n=2, **GREEDY)
        assert [choice.message.content for choice in again.choices] == [expected, expected]
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens
        chunks = client.chat.completions.create(model="tale", messages=near, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
        content: Any = [
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ]
        response = client.responses.create(
            model="tale", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8
        )
        assert response.output_text == expected
        assert response.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_anthropics_and_ollamas_clients_send_images(world: OpenAIServer, expected: str) -> None:
    """Their prompts are as long as OpenAI's."""
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    asked: Any = [{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}]
    with world.anthropic() as client:
        message = client.messages.create(model="tale", messages=asked, max_tokens=8, extra_body={"temperature": 0})
        assert message.content[0].text == expected  # type: ignore[union-attr]
        count = client.messages.count_tokens(model="tale", messages=asked)
        used = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert count.input_tokens == used
        with client.messages.stream(
            model="tale", messages=asked, max_tokens=8, extra_body={"temperature": 0}
        ) as stream:
            assert stream.get_final_text() == expected
    options = {"temperature": 0, "repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0, "num_predict": 8}
    with world.ollama() as client:
        chat = client.chat("tale", [{"role": "user", "content": QUESTION, "images": [FILE]}], options=options)
        assert chat.message.content == expected
        assert chat.prompt_eval_count
        made = client.generate("tale", QUESTION, images=[FILE], options=options)
        assert made.response == expected
        raw = client.generate("tale", QUESTION, images=[FILE], raw=True, options=options)
        assert raw.prompt_eval_count
        assert "vision" in (client.show("tale").capabilities or [])


def test_llama_servers_prompts_have_markers(client: httpx.Client, expected: str) -> None:
    """As its templates render them; /props has the marker."""
    props = client.get("/props").json()
    assert (props["media_marker"], props["modalities"]) == (MARKER, {"vision": True, "video": False, "audio": False})
    rendered = posted(client, "/apply-template", messages=ASKED)["prompt"]
    assert rendered.count(MARKER) == 1
    prompt = {"prompt_string": rendered, "multimodal_data": [DATA]}
    found = posted(client, "/completion", prompt=prompt, temperature=0, n_predict=8, top_k=0)
    assert found["content"] == expected
    assert found["prompt"] == rendered
    assert found["tokens_evaluated"] > len(posted(client, "/tokenize", content=rendered)["tokens"]) - 20
    plain = {"prompt_string": "plain"}
    several = posted(client, "/completion", prompt=[plain, prompt], temperature=0, n_predict=8, n=2, top_k=0)
    assert len(several) == 4
    whole = posted(client, "/v1/completions", prompt=prompt, temperature=0, max_tokens=8)
    assert whole["usage"]["prompt_tokens"] == found["tokens_evaluated"]
    lines = client.post(
        "/completion", json={"prompt": prompt, "stream": True, "temperature": 0, "n_predict": 8, "top_k": 0}
    )
    assert '"stop":true' in lines.text


def test_models_say_that_they_see(client: httpx.Client, blind: OpenAIServer) -> None:
    """As llama-server lists them."""
    assert client.get("/v1/models").json()["models"][0]["capabilities"] == ["completion", "multimodal"]
    with blind.client() as other:
        assert other.get("/v1/models").json()["models"][0]["capabilities"] == ["completion"]
        assert other.get("/props").json()["modalities"]["vision"] is False
        assert "vision" not in posted(other, "/api/show", model="tale")["capabilities"]


def test_tokens_are_counted_with_images(client: httpx.Client) -> None:
    """As the request uses them, even if they do not fit."""
    used = posted(client, "/v1/chat/completions", messages=ASKED, **GREEDY)["usage"]["prompt_tokens"]
    assert posted(client, "/v1/chat/completions/input_tokens", messages=ASKED)["input_tokens"] == used
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
    items = [{"role": "user", "content": content}]
    assert posted(client, "/v1/responses/input_tokens", input=items)["input_tokens"] == used
    long: Any = [{"role": "user", "content": [image_part(), text_part("word " * 4000)]}]
    assert posted(client, "/v1/chat/completions/input_tokens", messages=long)["input_tokens"] > 4000
    error = posted(client, "/v1/chat/completions", 400, messages=long)["error"]
    assert error["code"] == "context_length_exceeded"


def test_results_of_tools_have_images(client: httpx.Client) -> None:
    """In the APIs with parts as results."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]}
    asked = [{"role": "user", "content": "look"}, call, output]
    text = posted(client, "/v1/responses/input_tokens", input=[*asked[:2], {**output, "output": "seen"}])
    assert posted(client, "/v1/responses/input_tokens", input=asked)["input_tokens"] > text["input_tokens"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]}
    messages = [{"role": "user", "content": "look"}, use, result]
    assert posted(client, "/v1/messages", messages=messages, max_tokens=4)["usage"]["output_tokens"] > 0


def test_stored_responses_keep_their_images(client: httpx.Client) -> None:
    """So that a conversation about one goes on, from the cache."""
    content = [{"type": "input_image", "image_url": OTHER}, {"type": "input_text", "text": QUESTION}]
    first = posted(
        client, "/v1/responses", input=[{"role": "user", "content": content}], max_output_tokens=4, temperature=0
    )
    listed = client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert listed[0]["content"][0]["image_url"] == OTHER
    second = posted(client, "/v1/responses", input="and now?", previous_response_id=first["id"], max_output_tokens=4)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - 1


def test_truncation_leaves_out_messages_with_their_images(client: httpx.Client) -> None:
    """Their cells count in the length."""
    said = [
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "word " * 200}],
        }
    ]
    last = {
        "role": "user",
        "content": [{"type": "input_image", "image_url": OTHER}, {"type": "input_text", "text": "word " * 150}],
    }
    found = posted(client, "/v1/responses", input=[*said, last], truncation="auto", max_output_tokens=4)
    assert any("1 messages were left out" in warning for warning in found["warnings"])


def test_a_router_lists_what_models_see_before_they_are_loaded(model: Path, tmp_path: Path) -> None:
    """By the header of the projector that would be loaded; a file that is none is no error."""

    def listed(mmproj: Any = None, path: Path = model) -> Any:
        settings = ServerSettings(model=path, engine_options={"mmproj": mmproj})
        return _modalities_of_files(ModelPreset(name="x", settings=settings, source="preset", text=""))

    assert listed() == ("image",)
    assert listed(str(model.parent / "mmproj-seeing.gguf"), tmp_path / "other.gguf") == ("image",)
    assert listed(mmproj=False) == listed(path=tmp_path / "blind.gguf") == ()
    assert listed("https://x.example/mmproj.gguf") == listed(str(model)) == listed(str(tmp_path / "gone")) == ()


# ---- what is refused


def test_a_model_without_a_projector_refuses_in_every_api(blind: OpenAIServer) -> None:
    """With a 400 in the shape of each, which names the part and the flag."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    content = [{"type": "input_image", "image_url": URL}]
    with blind.client() as client:
        openai_error = posted(client, "/v1/chat/completions", 400, messages=ASKED)["error"]
        assert (openai_error["param"], openai_error["code"]) == ("messages", "unsupported")
        messages = [
            openai_error["message"],
            posted(client, "/v1/responses", 400, input=[{"role": "user", "content": content}])["error"]["message"],
            posted(client, "/v1/messages", 400, messages=[{"role": "user", "content": [block]}], max_tokens=4)["error"][
                "message"
            ],
            posted(client, "/api/chat", 400, messages=[{"role": "user", "content": "x", "images": [DATA]}])["error"],
            posted(client, "/api/generate", 400, prompt="x", images=[DATA])["error"],
            posted(client, "/completion", 400, prompt={"prompt_string": MARKER, "multimodal_data": [DATA]})["error"][
                "message"
            ],
            posted(client, "/apply-template", 400, messages=ASKED)["error"]["message"],
        ]
        assert all("this model takes no images" in message and "--mmproj" in message for message in messages)
        starts = ("messages[0]", "input[0]", "messages[0]", "messages[0]", "images[0]", "prompt", "messages[0]")
        assert [message.startswith(start) for message, start in zip(messages, starts, strict=True)] == [True] * 7
        assert posted(client, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **GREEDY)


CUT = base64.b64encode(FILE[:-40]).decode()
BOMB = base64.b64encode(png_of(b"\0" * 50_000_000, 8, 8)).decode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (CUT, "damaged|cut"),
        (BOMB, "more|larger|damaged|rows"),
        (base64.b64encode(png_of(b"", 50_000, 2)).decode(), "may be 16384 pixels wide"),
        (base64.b64encode(png_of(b"", 0, 0)).decode(), "must have pixels"),
        (base64.b64encode(b"%PDF-1.7").decode(), "not PDF"),
    ],
)
def test_files_that_cannot_be_are_named_and_the_server_goes_on(client: httpx.Client, data: str, words: str) -> None:
    """Whether their header says it, or only their data."""
    import re

    asked = [
        *ASKED,
        {"role": "user", "content": [text_part("a"), image_part(), image_part(f"data:image/png;base64,{data}")]},
    ]
    error = posted(client, "/v1/chat/completions", 400, messages=asked, **GREEDY)["error"]
    assert error["message"].startswith("messages[1].content[2].image_url: ")
    assert re.search(words, error["message"])
    with client.stream("POST", "/v1/chat/completions", json={"messages": asked, "stream": True, **GREEDY}) as streamed:
        body = streamed.read().decode()
        assert streamed.status_code == 400 or "messages[1].content[2].image_url: " in body
    works(client)


def test_images_of_a_request_are_counted(client: httpx.Client) -> None:
    """Over all messages; the fourth is named."""
    parts = [image_part()] * 2
    asked = [{"role": "user", "content": parts}, {"role": "user", "content": parts}]
    error = posted(client, "/v1/chat/completions", 400, messages=asked)["error"]
    assert error["message"].startswith("messages[1].content[1].image_url: a request may have 3 images")
    works(client)


def test_bodies_have_a_limit(model: Path) -> None:
    """A 413, before anything of it is read as an image."""
    with OpenAIServer(ENGINE, model=model, max_body_bytes=10_000) as world, world.client() as client:
        assert (
            client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": [image_part("x" * 20_000)]}]}
            ).status_code
            == 413
        )
        works(client)


def test_the_assistant_sends_none(client: httpx.Client) -> None:
    """Models write no images."""
    asked = [{"role": "assistant", "content": [image_part()]}, ASKED[0]]
    assert "not of the assistant" in posted(client, "/v1/chat/completions", 400, messages=asked)["error"]["message"]


def test_no_file_of_the_server_is_read(client: httpx.Client, tmp_path: Path) -> None:
    """Neither by a path nor by a URL of it."""
    (tmp_path / "secret.png").write_bytes(FILE)
    path = str(tmp_path / "secret.png")
    for part in (
        {"type": "image", "image": path},
        image_part(path),
        image_part(f"file://{path}"),
        {"type": "image", "image": {"path": path}},
    ):
        posted(client, "/v1/chat/completions", 400, messages=[{"role": "user", "content": [part]}])
        posted(client, "/v1/chat/completions", 400, messages=[{"role": "user", "content": [image_part(), part]}])
    posted(client, "/api/chat", 400, messages=[{"role": "user", "content": "x", "images": [path]}])


# ---- the web


def test_nothing_is_fetched_unless_it_is_allowed(client: httpx.Client) -> None:
    """The 400 names part and flag."""
    asked = [{"role": "user", "content": [image_part(REMOTE)]}]
    error = posted(client, "/v1/chat/completions", 400, messages=asked)["error"]
    assert error["message"].startswith("messages[0].content[0].image_url: this server fetches no images")
    assert "--media-domains" in error["message"]


class Body(httpx.AsyncByteStream):
    async def __aiter__(self) -> Any:
        yield FILE


def test_allowed_domains_are_fetched_from(model: Path, expected: str) -> None:
    """In every API that has URLs; failures are of their part."""
    fetched: list[str] = []

    def served(request: httpx.Request) -> httpx.Response:
        fetched.append(f"{request.headers['host']}{request.url.path}")
        return httpx.Response(200 if request.url.path == "/cat.png" else 404, stream=Body())

    async def resolve(host: str, _port: int) -> list[str]:
        return ["127.0.0.1" if host == "inside.example" else "93.184.215.14"]

    with OpenAIServer(ENGINE, model=model, media_domains=("images.example", "inside.example")) as world:
        world.service.media_fetcher = MediaFetcher(
            world.settings.media_domains,
            max_total_bytes=1 << 20,
            resolve=resolve,
            transport=httpx.MockTransport(served),
        )
        with world.client() as client:
            asked = [{"role": "user", "content": [image_part(REMOTE), text_part(QUESTION)]}]
            found = posted(client, "/v1/chat/completions", messages=asked, **GREEDY)
            assert found["choices"][0]["message"]["content"] == expected
            content = [{"type": "input_image", "image_url": REMOTE}, {"type": "input_text", "text": QUESTION}]
            posted(client, "/v1/responses", input=[{"role": "user", "content": content}], max_output_tokens=4)
            block = {"type": "image", "source": {"type": "url", "url": REMOTE}}
            posted(client, "/v1/messages", messages=[{"role": "user", "content": [block]}], max_tokens=4)
            assert fetched == ["images.example/cat.png"] * 3
            for url, words in (
                ("https://images.example/gone.png", "status 404"),
                ("https://inside.example/cat.png", "no public address"),
                ("https://other.example/cat.png", "does not fetch from"),
            ):
                asked = [{"role": "user", "content": [image_part(), image_part(url)]}]
                error = posted(client, "/v1/chat/completions", 400, messages=asked)["error"]
                assert error["message"].startswith("messages[0].content[1].image_url: ")
                assert words in error["message"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(world.service.engine()), "num_open", property(lambda _: 10**6))
                count = len(fetched)
                asked = [{"role": "user", "content": [image_part(REMOTE), text_part(QUESTION)]}]
                assert "try again" in posted(client, "/v1/chat/completions", 429, messages=asked)["error"]["message"]
                assert len(fetched) == count  # nothing for a request that is rejected
            assert posted(client, "/v1/chat/completions", messages=asked, **GREEDY)["choices"]


# ---- the engine's side


def test_a_worker_names_the_part_as_well(model: Path) -> None:
    """Which decodes the images."""
    with (
        OpenAIServer({**ENGINE, "isolation": "process", "instruments": []}, model=model) as world,
        world.client() as client,
    ):
        works(client)
        asked = [{"role": "user", "content": [text_part("a"), image_part(f"data:image/png;base64,{CUT}")]}]
        error = posted(client, "/v1/chat/completions", 400, messages=asked)["error"]
        assert error["message"].startswith("messages[0].content[1].image_url: ")
        works(client)


def test_slots_with_images_are_saved(model: Path, tmp_path: Path) -> None:
    """The next server goes on from the file without encoding them; a slot that was restored is not saved again."""
    engine = {**ENGINE, "state_folder": str(tmp_path)}
    prompt = {"prompt_string": f"a{MARKER}b", "multimodal_data": [DATA]}
    with OpenAIServer(engine, model=model, media_marker=MARKER) as world, world.client() as client:
        first = posted(client, "/completion", prompt=prompt, n_predict=4, id_slot=1, temperature=0)
        num_saved = posted(client, "/slots/1?action=save", filename="x.bin")["n_saved"]
        assert num_saved > first["tokens_evaluated"]
    with OpenAIServer(engine, model=model, media_marker=MARKER) as world, world.client() as client:
        assert posted(client, "/slots/0?action=restore", filename="x.bin")["n_restored"] == num_saved
        again = posted(client, "/completion", prompt=prompt, n_predict=4, id_slot=0, temperature=0)
        assert again["content"] == first["content"]
        assert again["timings"]["cache_n"] >= first["tokens_evaluated"] - 1
        posted(client, "/slots/2?action=restore", filename="x.bin")
        error = posted(client, "/slots/2?action=save", 400, filename="y.bin")["error"]
        assert "restored from a file" in error["message"]
        assert posted(client, "/slots/2?action=erase")["n_erased"] == num_saved


def test_openais_package_raises_bad_request(world: OpenAIServer) -> None:
    """With the part in the message."""
    asked: Any = [{"role": "user", "content": [image_part("data:image/png;base64,aGk=")]}]
    with world.openai() as client, pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].image_url"):
        client.chat.completions.create(model="tale", messages=asked)
