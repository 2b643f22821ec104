"""Images in `paceline generate` and `paceline chat` as a user gives them: files, a projector, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.commands import Terminal, output, paceline_
from tests.pictures import picture, png

from paceline import LLM, Image
from paceline.testing.models import CHAT_TEMPLATE, Qwen2VlSpec, Qwen25VisionSpec, write_model

pytestmark = pytest.mark.native

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
FLAGS = ("-t", "1", "-n", "8", "--temperature", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, its projector beside it, and pictures, a cut file among them."""
    write_model(tmp_path / "model.gguf", Qwen2VlSpec(), metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    write_model(tmp_path / "mmproj-model.gguf", Qwen25VisionSpec())
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(png(picture(number)))
    (tmp_path / "cut.png").write_bytes(png(picture(3))[:-40])
    (tmp_path / "page.webp").write_bytes(b"RIFF....WEBP")
    return tmp_path


def generated(folder: Path, *args: str) -> dict[str, Any]:
    """The JSON object of a generation with the model of the folder."""
    common = ("-m", str(folder / "model.gguf"), *FLAGS, "--ignore-eos", "--json", "-q")
    found: dict[str, Any] = json.loads(output("generate", "what is it?", *common, *args))
    return found


def test_generate_sees_images_in_front_of_its_prompt(folder: Path) -> None:
    """As the library does, in their order; whichever way the projector is found."""
    one, two = str(folder / "1.png"), str(folder / "2.png")
    with LLM(folder / "model.gguf", n_threads=1, num_slots=1, n_ctx=4096) as llm:
        expected = llm.generate([Image(one), Image(two), "what is it?"], **GREEDY)
    found = generated(folder, "--image", one, "--image", two)
    assert found["token_ids"] == list(expected.token_ids)
    assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert generated(folder, "--image", two, "--image", one)["token_ids"] != found["token_ids"]
    moved = (folder / "mmproj-model.gguf").rename(folder / "projector")
    given = generated(folder, "--image", one, "--image", two, "--mmproj", str(moved), "--no-mmproj-offload")
    assert given["token_ids"] == found["token_ids"]
    more = generated(folder, "--image", one, "--mmproj", str(moved), "--image-min-tokens", "100")
    usual = generated(folder, "--image", one, "--mmproj", str(moved))
    assert more["usage"]["prompt_tokens"] > 100 > usual["usage"]["prompt_tokens"]


def test_an_image_may_take_more_than_the_usual_context(folder: Path) -> None:
    """Which is only known once the projector has counted its tokens; -c is kept to."""
    write_model(folder / "model.gguf", Qwen2VlSpec(n_ctx_train=16384))
    (folder / "large.png").write_bytes(png(picture(1, 1000, 1000)))
    large = ("--image", str(folder / "large.png"), "--image-min-tokens", "4200", "--image-max-tokens", "5000")
    found = generated(folder, *large)
    assert found["usage"]["prompt_tokens"] > 4200
    assert found["usage"]["completion_tokens"] == 8
    model = str(folder / "model.gguf")
    done = paceline_("generate", "a", "-m", model, *FLAGS, *large, "-c", "4096")
    assert done.returncode == 1 and b"lower --image-max-tokens, or raise --ctx-size (at most 16384)" in done.stderr


def test_wrong_images_and_projectors_are_one_line(folder: Path) -> None:
    """The error names the file, or the option; before a model is loaded if possible."""
    model = str(folder / "model.gguf")
    image = ("--image", str(folder / "1.png"))
    for command in ("generate", "chat"):
        for args, code, words in (
            (("--image", str(folder / "none.png")), 2, ("none.png", "No such file")),
            (("--image", str(folder / "cut.png")), 2, ("--image", "cut.png", "damaged")),
            (("--image", str(folder / "page.webp")), 2, ("page.webp", "WebP", "PNG")),
            ((*image, "--no-mmproj"), 2, ("--no-mmproj and --image",)),
            (("--mmproj", model, "--no-mmproj"), 2, ("--no-mmproj and --mmproj",)),
            ((*image, "--mmproj", model), 1, ("not a multimodal projector",)),
            ((*image, "--mmproj", str(folder / "none.gguf")), 1, ("none.gguf",)),
            ((*image, "--image-max-tokens", "0"), 2, ("image_max_tokens",)),
            ((*image, "--image-min-tokens", "9", "--image-max-tokens", "8"), 2, ("image_min_tokens",)),
        ):
            done = paceline_(command, "a", "-m", model, *FLAGS, "-q", *args)
            assert done.returncode == code, (command, args, done.stderr)
            lines = done.stderr.decode().splitlines()
            assert len(lines) == 1 and all(word in lines[0] for word in words), (command, args, lines)


def test_chat_sends_images_with_its_message(folder: Path) -> None:
    """As the library does."""
    model = folder / "model.gguf"
    with LLM(model, n_threads=1, num_slots=1) as llm:
        content = [Image(folder / "1.png"), {"type": "text", "text": "what is it?"}]
        options = {**GREEDY, "ignore_eos": False}
        expected = llm.chat([{"role": "user", "content": content}], **options).content
    args = ("chat", "what is it?", "-m", str(model), *FLAGS, "-q")
    assert output(*args, "--image", str(folder / "1.png")).rstrip("\n") == expected.rstrip("\n")
    assert output(*args).rstrip("\n") != expected.rstrip("\n")


def test_images_of_a_chat_on_a_terminal(folder: Path) -> None:
    """Each goes with the next message; a bad file changes nothing, and the chat is saved with them and goes on."""
    talk, one, two = folder / "talk.json", folder / "1.png", folder / "2.png"
    chat = Terminal(
        "chat", "-m", str(folder / "model.gguf"), *FLAGS, "-c", "400", "--image", str(one), "--plain", COLUMNS="500"
    )
    chat.read_until_seen(r"Ctrl-D\s+ends\.\n.*> ")
    for typed, reply in (
        ("/image", r"with the next message: \S+1\.png \(60 x 40\)"),
        (f"/image {folder / 'cut.png'}", r"/image \S+cut\.png: the image file is damaged"),
        (f"/image {folder / 'none.png'}", r"/image image cannot be read from \S+none\.png: No such file"),
        (f"/image {two}", r"1\.png \(60 x 40\), \S+2\.png"),
        ("word " * 300, r"the context 512; shorten it, or raise --ctx-size.*still to be sent: \S+1\.png"),
        ("what are they?", r"cut at the limit\)"),
        ("/image", r"no image is attached"),
        ("and now?", r"and now\?.*cut at the limit\)"),
        ("/retry", r"/retry.*cut at the limit\)"),
        (f"/save {talk}", r"saved 4 messages"),
        (f"/load {talk}", r"loaded 4 messages"),
        (f"/image {one}", r"1\.png \(60 x 40\)"),
        ("/image -", r"no image is attached"),
        ("bye", r"bye.*cut at the limit\)"),
    ):
        chat.seen = b""
        chat.press(f"{typed}\n")
        chat.read_until_seen(f"(?s){reply}.*\n> $")
    chat.press("\x04")
    assert chat.finish() == 0
    saved = json.loads(talk.read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert [part["type"] for part in saved[0]["content"]] == ["image_url", "image_url", "text"]
    assert isinstance(saved[2]["content"], str)


def test_a_chat_without_a_projector_goes_on_after_an_image(folder: Path) -> None:
    """And says how to get one."""
    chat = Terminal("chat", "-m", str(folder / "model.gguf"), *FLAGS, "--no-mmproj", "--plain", "-q", COLUMNS="500")
    chat.read_until_seen("> ")
    chat.press(f"/image {folder / '1.png'}\n")
    chat.read_until_seen(r"this model takes no images[^\n]*--mmproj FILE\n> $")
    chat.press("hello\n")
    chat.read_until_seen(r"cut at the limit\)\n\n> $")
    chat.press("\x04")
    assert chat.finish() == 0
