"""Audio over HTTP, with tiny random models: in chats, responses, prompts with markers, and transcribed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.exact import EXACT
from tests.media_requests import image_part, text_part
from tests.server.openai_world import OpenAIServer
from tests.sounds import flac_file, int16, mp3_file, tone, wav_file

from paceline import LLM, Audio
from paceline.testing.models import CHAT_TEMPLATE, LlamaSpec, UltravoxAudioSpec, write_model

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"n_ctx": 2048, "num_slots": 4}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
QUESTION = "what is said?"
WAV = wav_file(int16(tone(1.0)))
DATA = base64.b64encode(WAV).decode()
MARKER = "<__media__>"
PATH = "/v1/audio/transcriptions"


def audio_part(data: str = DATA, kind: str = "wav") -> Any:
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


ASKED: Any = [{"role": "user", "content": [audio_part(), text_part(QUESTION)]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing")
    write_model(folder / "mmproj-hearing.gguf", UltravoxAudioSpec())
    spec = LlamaSpec(n_ctx_train=2048)
    return write_model(folder / "hearing.gguf", spec, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[OpenAIServer]:
    with OpenAIServer(ENGINE, model=model, media_marker=MARKER, max_images=3) as world:
        yield world


@pytest.fixture(scope="module")
def deaf(model: Path) -> Iterator[OpenAIServer]:
    """The same model without its projector."""
    with OpenAIServer({**ENGINE, "mmproj": False}, model=model, media_marker=MARKER) as world:
        yield world


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[str, str]:
    """The library chat's reply to the question, and to the instruction of a transcription."""
    with LLM(model, isolation="thread", **ENGINE, **EXACT) as llm:
        chats: Any = (
            [{"role": "user", "content": [Audio(WAV), text_part(QUESTION)]}],
            [{"role": "user", "content": [text_part("Transcribe audio to text"), Audio(WAV)]}],
        )
        first, second = (llm.chat(chat, ignore_eos=False, **GREEDY).content for chat in chats)
        return first, second


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[httpx.Client]:
    with world.client() as client:
        yield client


def transcribed(client: httpx.Client, data: bytes = WAV, **fields: Any) -> httpx.Response:
    fields = {"temperature": "0", "max_tokens": "8", **fields}
    return client.post(PATH, data=fields, files={"file": ("speech.wav", data)})


def refused(response: httpx.Response, words: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


# ---- parts


def test_chats_and_responses_have_audio(world: OpenAIServer, expected: tuple[str, str]) -> None:
    """Whole and streamed; usage counts its tokens."""
    with world.openai() as client:
        chat = client.chat.completions.create(model="tale", messages=ASKED, **GREEDY)
        assert chat.choices[0].message.content == expected[0]
        assert chat.usage is not None
        assert chat.usage.prompt_tokens > 30
        chunks = client.chat.completions.create(model="tale", messages=ASKED, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected[0]
        content: Any = [audio_part(), {"type": "input_text", "text": QUESTION}]
        response = client.responses.create(
            model="tale", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8
        )
        assert response.output_text == expected[0]
        assert response.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_prompts_with_markers_have_audio(client: httpx.Client) -> None:
    """A file's kind is detected; /props lists the model's inputs."""
    body = {"prompt": {"prompt_string": f"a{MARKER}b", "multimodal_data": [DATA]}, "n_predict": 4, "temperature": 0}
    found = client.post("/completion", json=body)
    assert found.status_code == 200, found.text
    assert found.json()["tokens_evaluated"] > 30
    assert client.get("/props").json()["modalities"] == {"vision": False, "video": False, "audio": True}
    image = {"prompt": {"prompt_string": f"a{MARKER}b", "multimodal_data": ["iVBORw0KGgo="]}}
    refused(client.post("/completion", json=image), "prompt.multimodal_data[0]: this model takes no images")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (audio_part(kind="mp3"), "messages[0].content[0].input_audio: format is 'mp3', but the data are of 'wav'"),
        (audio_part(kind="ogg"), "messages[0].content[0].input_audio: format"),
        (audio_part(data="%%%"), "messages[0].content[0].input_audio: data is not valid base64"),
        (audio_part(data=""), "messages[0].content[0].input_audio: audio must be a WAV, MP3 or FLAC file"),
        (audio_part(data=base64.b64encode(WAV[:-9]).decode()), "input_audio: the audio file is damaged"),
        ({"type": "input_audio"}, "messages[0].content[0].input_audio"),
        ({"type": "input_audio", "input_audio": {"url": "x"}}, "input_audio: url is not known"),
        (image_part(), "messages[0].content[0].image_url: this model takes no images"),
    ],
)
def test_wrong_parts_are_named(client: httpx.Client, part: Any, words: str) -> None:
    """With a 400; the server goes on."""
    asked = [{"role": "user", "content": [part, text_part(QUESTION)]}]
    refused(client.post("/v1/chat/completions", json={"messages": asked, **GREEDY}), words)
    assert client.post("/v1/chat/completions", json={"messages": ASKED, **GREEDY}).status_code == 200


def test_audio_that_cannot_be_decoded_is_named(client: httpx.Client) -> None:
    """Its header is right, so the worker finds it; other requests go on."""
    cut = base64.b64encode(flac_file(int16(tone(2.0)))[:20_000]).decode()
    asked = [{"role": "user", "content": [audio_part(cut, "flac"), text_part(QUESTION)]}]
    response = client.post("/v1/chat/completions", json={"messages": asked, **GREEDY})
    refused(response, "messages[0].content[0].input_audio: the audio file is damaged")
    many = [{"role": "user", "content": [*[audio_part()] * 4, text_part(QUESTION)]}]
    response = client.post("/v1/chat/completions", json={"messages": many, **GREEDY})
    refused(response, "messages[0].content[3].input_audio: a request may have 3 images and audio")
    assert client.post("/v1/chat/completions", json={"messages": ASKED, **GREEDY}).status_code == 200


# ---- transcriptions


def test_openais_client_transcribes(world: OpenAIServer, expected: tuple[str, str]) -> None:
    """In each form of a response, and streamed."""
    options: Any = {"model": "tale", "file": ("speech.wav", WAV), "temperature": 0, "extra_body": {"max_tokens": "8"}}
    with world.openai() as client:
        found = client.audio.transcriptions.create(**options)
        assert found.text == expected[1]
        assert found.usage is not None
        assert found.usage.type == "tokens"
        assert found.usage.input_token_details is not None
        assert found.usage.input_token_details.audio_tokens == 30
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        text = client.audio.transcriptions.create(**options, response_format="text")
        assert text == expected[1] + "\n"
        verbose = client.audio.transcriptions.create(**options, response_format="verbose_json", language="en")
        assert (verbose.duration, verbose.language) == (1.0, "en")
        events = list(client.audio.transcriptions.create(**options, stream=True))
        assert [event.type for event in events[-1:]] == ["transcript.text.done"]
        assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == expected[1]
        assert events[-1].text == expected[1]  # type: ignore[union-attr]


def test_prompt_and_language_make_the_instruction(client: httpx.Client, model: Path) -> None:
    """As llama-server puts them together; llama-server's other path is the same."""
    with LLM(model, isolation="thread", **ENGINE, **EXACT) as llm:
        asked: Any = [{"role": "user", "content": [text_part("Write it down (language: de)"), Audio(WAV)]}]
        expected = llm.chat(asked, ignore_eos=False, **GREEDY).content
    fields = {"prompt": "Write it down", "language": "de", "temperature": "0", "max_tokens": "8"}
    for path in (PATH, "/audio/transcriptions"):
        response = client.post(path, data=fields, files={"file": ("speech.flac", flac_file(int16(tone(1.0))))})
        assert response.json()["text"] == expected
        assert "warnings" not in response.json()
    odd = transcribed(client, model="other", colour="red", include="logprobs", chunking_strategy="auto").json()
    assert [warning.split()[0].rstrip(":") for warning in odd["warnings"]] == ["include", "colour", "model"]


def test_a_limit_is_a_whole_number_and_minus_one_is_none(client: httpx.Client) -> None:
    """As in other requests."""
    limited = [transcribed(client, max_tokens=limit).json()["usage"]["output_tokens"] for limit in ("4", "4.0")]
    assert limited[0] == limited[1] <= 4
    assert transcribed(client, max_tokens="-1").status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "srt"}, "response_format 'srt' needs times"),
        ({"response_format": "yaml"}, "response_format"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "verbose_json"}, "not streamed"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": "-3"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": "-2"}, "max_tokens"),
        ({"max_tokens": "100.5"}, "max_tokens"),
        ({"max_tokens": "0"}, "max_tokens"),
    ],
)
def test_wrong_fields_are_named(client: httpx.Client, fields: dict[str, str], words: str) -> None:
    """With a 400; the next one is transcribed."""
    refused(transcribed(client, **fields), words)
    assert transcribed(client).status_code == 200


FILE_PART = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + WAV + b"\r\n"


def sent_by_hand(client: httpx.Client, fields: dict[str, bytes], content_type: str) -> httpx.Response:
    """A form with a file, with whatever content type."""
    body = FILE_PART
    for name, value in {"max_tokens": b"4", "temperature": b"0", **fields}.items():
        body += b'--x\r\ncontent-disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + value + b"\r\n"
    return client.post(PATH, content=body + b"--x--\r\n", headers={"content-type": f"{content_type}; boundary=x"})


def test_a_form_is_read_in_its_charset(client: httpx.Client) -> None:
    """Codecs that fail on every text are a 400; the type of a form is written in any case."""
    assert sent_by_hand(client, {"prompt": b"caf\xe9"}, "Multipart/Form-Data; charset=latin-1").status_code == 200
    for charset in ("undefined", "punycode"):
        response = sent_by_hand(client, {"prompt": b"caf\xe9"}, f"multipart/form-data; charset={charset}")
        refused(response, "the charset of the form")
    assert transcribed(client).status_code == 200


def test_fields_that_are_there_twice_are_refused(client: httpx.Client) -> None:
    """Which one is meant is not known. Of fields without effect every value is checked."""
    files = {"file": ("speech.wav", WAV)}
    refused(
        client.post(PATH, data={"temperature": ["0", "1"]}, files=files), "temperature is given 2 times; give it once"
    )
    refused(client.post(PATH, data={"file": "text"}, files=files), "file is given 2 times")
    times = {"timestamp_granularities[]": ["word", "segment"]}
    warnings = client.post(PATH, data=times, files=files).json()["warnings"]
    assert warnings == ["timestamp_granularities has no effect here and was ignored"]
    assert "warnings" not in transcribed(client, **{"timestamp_granularities[]": ["segment", "segment"]}).json()


def test_models_that_hear_are_listed_as_multimodal(client: httpx.Client, deaf: OpenAIServer) -> None:
    """Though they see nothing."""
    assert client.get("/v1/models").json()["models"][0]["capabilities"] == ["completion", "multimodal"]
    with deaf.client() as other:
        assert other.get("/v1/models").json()["models"][0]["capabilities"] == ["completion"]


def test_wrong_files_are_named(client: httpx.Client) -> None:
    """Of other kinds, damaged, too short, missing, and bodies that are no form."""
    for data, words in (
        (b"", "file: audio must be a WAV, MP3 or FLAC file, not an empty file"),
        (b"OggS\0\2", "file: audio must be a WAV, MP3 or FLAC file, not Ogg"),
        (WAV[:-9], "file: the audio file is damaged"),
        (wav_file(int16(tone(0.05))), "file: audio must last 0.1 s"),
        (flac_file(int16(tone(2.0)))[:20_000], "file: the audio file is damaged"),
    ):
        refused(transcribed(client, data), words)
    refused(client.post(PATH, data={"model": "tale"}), "file is missing")
    refused(client.post(PATH, data={"file": "text"}, files={"other": ("a.wav", WAV)}), "file is missing")
    refused(client.post(PATH, json={"file": DATA}), "file is missing")
    two = [("file", ("a.wav", WAV)), ("file", ("b.wav", WAV))]
    refused(client.post(PATH, files=two), "Too many files")
    broken = client.post(PATH, content=b"nothing", headers={"content-type": "multipart/form-data; boundary=x"})
    assert broken.status_code == 400
    assert transcribed(client, mp3_file(20)).status_code == 200


def test_a_model_that_does_not_hear_says_so(deaf: OpenAIServer) -> None:
    """In each route."""
    with deaf.client() as client:
        refused(transcribed(client), "this model takes no audio")
        response = client.post("/v1/chat/completions", json={"messages": ASKED, **GREEDY})
        refused(response, "messages[0].content[0].input_audio: this model takes no audio")
        plain = [{"role": "user", "content": "a"}]
        assert client.post("/v1/chat/completions", json={"messages": plain, **GREEDY}).status_code == 200
    with deaf.openai() as named, pytest.raises(openai.BadRequestError, match="takes no audio"):
        named.audio.transcriptions.create(model="tale", file=("speech.wav", WAV))


def test_a_transcription_ends_when_its_client_leaves(world: OpenAIServer) -> None:
    """As every stream."""
    with world.client() as client, world.watch.held(8):
        files = {"file": ("speech.wav", WAV)}
        with client.stream("POST", PATH, data={"stream": "true", "max_tokens": "400"}, files=files) as stream:
            lines = stream.iter_lines()  # the client hangs up when this is dropped
            first = next(line for line in lines if line.startswith("data: "))
            assert json.loads(first[6:])["type"] == "transcript.text.delta"
            world.watch.wait_held()
    with world.client() as client:
        assert transcribed(client).status_code == 200
