"""Audio in `paceline generate` and `paceline chat` as a user gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.commands import Terminal, output, paceline_
from tests.sounds import flac_file, int16, mp3_file, tone, wav_file

from paceline import LLM, Audio
from paceline.testing.models import CHAT_TEMPLATE, LlamaSpec, UltravoxAudioSpec, write_model

pytestmark = pytest.mark.native

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
FLAGS = ("-t", "1", "-n", "8", "--temperature", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, its projector beside it, and files of sound, a cut file among them."""
    spec = LlamaSpec(n_ctx_train=2048)
    write_model(tmp_path / "model.gguf", spec, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    write_model(tmp_path / "mmproj-model.gguf", UltravoxAudioSpec())
    (tmp_path / "one.wav").write_bytes(wav_file(int16(tone(1.0))))
    (tmp_path / "two.mp3").write_bytes(mp3_file(40))
    (tmp_path / "cut.flac").write_bytes(flac_file(int16(tone(2.0)))[:20_000])
    (tmp_path / "talk.ogg").write_bytes(b"OggS....")
    return tmp_path


def test_generate_hears_audio_in_front_of_its_prompt(folder: Path) -> None:
    """As the library does, in its order."""
    one, two = str(folder / "one.wav"), str(folder / "two.mp3")
    with LLM(folder / "model.gguf", n_threads=1, num_slots=1) as llm:
        expected = llm.generate([Audio(one), Audio(two), "what is it?"], **GREEDY)
    common = ("-m", str(folder / "model.gguf"), *FLAGS, "--ignore-eos", "--json", "-q")
    found = json.loads(output("generate", "what is it?", *common, "--audio", one, "--audio", two))
    assert found["token_ids"] == list(expected.token_ids)
    assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_wrong_audio_is_one_line(folder: Path) -> None:
    """Which names the option and the file."""
    model = ("-m", str(folder / "model.gguf"))
    for args, status, words in (
        (("--audio", str(folder / "none.wav")), 2, ("none.wav", "No such file")),
        (("--audio", str(folder / "cut.flac")), 2, ("--audio", "cut.flac", "damaged")),
        (("--audio", str(folder / "talk.ogg")), 2, ("talk.ogg", "Ogg", "MP3")),
        (("--audio", str(folder / "one.wav"), "--no-mmproj"), 2, ("--no-mmproj and --audio",)),
    ):
        done = paceline_("generate", "a", "-q", *FLAGS, *model, *args)
        assert done.returncode == status, done.stderr
        assert done.stderr.count(b"\n") == 1
        assert all(word.encode() in done.stderr for word in words), done.stderr


def test_audio_of_a_chat_on_a_terminal(folder: Path) -> None:
    """It goes with the next message; a bad file changes nothing, and the chat is saved with it and goes on."""
    talk, one = folder / "talk.json", folder / "one.wav"
    chat = Terminal(
        "chat", "-m", str(folder / "model.gguf"), *FLAGS, "-c", "600", "--audio", str(one), "--plain", COLUMNS="500"
    )
    chat.read_until_seen(r"Ctrl-D\s+ends\.\n.*> ")
    for typed, reply in (
        ("/audio", r"with the next message: \S+one\.wav \(1\.0 s\)"),
        (f"/audio {folder / 'cut.flac'}", r"/audio \S+cut\.flac: the audio file is damaged"),
        ("/audio -", r"no audio is attached"),
        (f"/audio {one}", r"one\.wav \(1\.0 s\)"),
        ("what is it?", r"cut at the limit\)"),
        ("and now?", r"and now\?.*cut at the limit\)"),
        (f"/save {talk}", r"saved 4 messages"),
        (f"/load {talk}", r"loaded 4 messages"),
        ("bye", r"bye.*cut at the limit\)"),
    ):
        chat.seen = b""
        chat.press(f"{typed}\n")
        chat.read_until_seen(f"(?s){reply}.*\n> $")
    chat.press("\x04")
    assert chat.finish() == 0
    saved = json.loads(talk.read_text())["messages"]
    assert [part["type"] for part in saved[0]["content"]] == ["input_audio", "text"]
