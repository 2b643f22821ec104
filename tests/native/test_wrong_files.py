"""Missing files, and files that are no model: the error has the kind of the file and the way out."""

from __future__ import annotations

import errno
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, validation
from paceline.errors import (
    AdapterError,
    AdapterFileNotFound,
    InvalidParams,
    ModelFileForbidden,
    ModelFileNotFound,
    ModelLoadError,
)
from paceline.hub import check_is_path
from paceline.runtime import Model
from paceline.runtime.gguf_file import read_gguf
from paceline.server.flags import readers
from paceline.testing.models import Gemma3VisionSpec, LlamaSpec, write_lora, write_model
from paceline.testing.models.gguf_parts import Tensor

pytestmark = pytest.mark.native


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", LlamaSpec())


def message(model: object, **options: object) -> str:
    """Return the message with which the library refuses to load a model, and check that it is one line."""
    with pytest.raises((ModelLoadError, AdapterError, InvalidParams)) as caught:
        LLM(model, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    """With errno and filename, from the library and for projectors and draft models; also after pickling."""
    missing = tmp_path / "none.gguf"
    for call in (
        lambda: LLM(missing),
        lambda: LLM(str(missing), isolation="process"),
        lambda: Model.load(missing),
        lambda: LLM(draft_model=missing),
        lambda: LLM(mmproj=missing),
    ):
        with pytest.raises(ModelFileNotFound) as caught:
            call()
        error: FileNotFoundError = caught.value
        assert (error.errno, Path(error.filename)) == (errno.ENOENT, missing)
        assert str(missing) in str(error)
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.filename) == (ModelFileNotFound, str(error), error.filename)


def test_a_missing_adapter_is_a_file_not_found_error(tmp_path: Path) -> None:
    """At the start and while the engine runs."""
    missing = tmp_path / "none.gguf"
    with pytest.raises(AdapterFileNotFound) as caught:
        LLM(lora=[missing])
    assert isinstance(caught.value, FileNotFoundError)
    with LLM(num_slots=1, n_ctx=512) as llm, pytest.raises(FileNotFoundError, match="no adapter file"):
        llm.load_lora("name", missing)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_a_permission_error(model: Path) -> None:
    """Its message says who lacks the right."""
    model.chmod(0)
    with pytest.raises(ModelFileForbidden, match="right to read") as caught:
        Model.load(model)
    assert isinstance(caught.value, PermissionError)


def test_a_forbidden_file_is_named_by_its_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an ordinary user, whoever runs the tests."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(validation, "_open_at_once", refuse)
    with pytest.raises(PermissionError, match=r"cannot read .*m\.gguf: Permission denied") as caught:
        read_gguf(tmp_path / "m.gguf")
    assert (type(caught.value), caught.value.errno) == (ModelFileForbidden, errno.EACCES)


@pytest.mark.parametrize("name", ["modle.gguf", "model", "modl", "Model.gguf"])
def test_a_similar_file_is_suggested(name: str, model: Path) -> None:
    """Also for a name without its ending; a name that is like no file gets no suggestion."""
    assert message(str(model.with_name(name))).endswith(f"did you mean {model}?")
    assert "did you mean" not in message(str(model.with_name("zebra.gguf")))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The error names the first wrong folder of the path."""
    assert f"there is no folder {tmp_path / 'models'}" in message(tmp_path / "models" / "a.gguf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3.2", "a model of Ollama is named ollama:llama3.2"),
        ("llama3.2:1b", "a model of Ollama is named ollama:llama3.2:1b"),
        ("user/repo", "a model of the Hugging Face Hub is named hf:user/repo"),
        ("user/repo:Q4_K_M", "a model of the Hugging Face Hub is named hf:user/repo:Q4_K_M"),
    ],
)
def test_names_without_a_scheme_are_named_with_it(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the library, which loads nothing by this name."""
    monkeypatch.chdir(tmp_path)
    assert expected in message(name)
    with pytest.raises(FileNotFoundError):
        check_is_path(name)


def test_a_home_folder_is_expanded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In paths of models, draft models, projectors and adapters, and in flags of the server."""
    monkeypatch.setenv("HOME", str(model.parent))
    write_lora(model.parent / "adapter.gguf", LlamaSpec())
    with LLM("~/model.gguf", draft_model="~/model.gguf", lora=["~/adapter.gguf"], n_ctx=512, num_slots=1) as llm:
        assert llm.model.paths == (model,)
        assert [adapter.path for adapter in llm.loras()] == [str(model.parent / "adapter.gguf")]
    with LLM("~/model.gguf", n_ctx=512, num_slots=1, isolation="process") as llm:
        assert llm.generate("a", max_tokens=1).text is not None
    assert str(model.parent / "mm.gguf") in message("~/model.gguf", mmproj="~/mm.gguf")
    AsyncLLM("~/model.gguf")
    assert readers.path("--chat-template-file", "~/a.jinja") == model.parent / "a.jinja"
    assert readers.model("-m", "~/model.gguf") == model
    assert readers.path("-m", "~nobody-here/a") == Path("~nobody-here/a")


_SAFETENSORS = struct.pack("<Q", 2) + b"{}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n", "git lfs pull"),
        (_SAFETENSORS, "safetensors file; look for a repository of GGUF files"),
        (b"PK\x03\x04archive/data.pkl", "as PyTorch saves models"),
        (b"\x80\x02}q\x00.", "as PyTorch saves models"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", "it is a web page"),
        (b"\n<html>", "it is a web page"),
        (b"", "the file is empty"),
        (b"\0" * 4096, "a download that has not ended"),
        (b"GGUF\x03\0\0\0", "not complete"),
        (b'{"error": "Repository not found"}', "it is JSON text"),
        (b"tjgg\x03\0\0\0", "from before GGUF"),
        (b"\x1f\x8b\x08\0", "it is compressed"),
        (b"anything else", "it does not begin with b'GGUF'"),
    ],
)
def test_invalid_gguf_file_is_named(content: bytes, expected: str, tmp_path: Path) -> None:
    """By its first bytes, with the way out."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    found = message(path)
    assert expected in found
    assert str(path) in found


def test_a_half_of_a_download_is_not_complete(model: Path) -> None:
    """The message has the sizes."""
    data = model.read_bytes()
    model.write_bytes(data[: len(data) // 2])
    assert f"is not complete: it has {len(data) // 2} bytes" in message(model)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), "is a folder without a GGUF file; give the path of a GGUF file"),
        (("a.gguf", "b.gguf"), "give the path of a GGUF file in it: a.gguf, b.gguf"),
        (("model.safetensors", "config.json"), "convert_hf_to_gguf.py"),
    ],
)
def test_a_folder_is_named_with_its_files(files: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    """The possible names."""
    for name in files:
        (tmp_path / name).touch()
    assert expected in message(tmp_path)


def adapter(folder: Path) -> Path:
    return write_lora(folder / "wrong.gguf", LlamaSpec())


def projector(folder: Path) -> Path:
    return write_model(folder / "wrong.gguf", Gemma3VisionSpec())


def vocabulary(folder: Path) -> Path:
    class Vocabulary(LlamaSpec):
        def tensors(self) -> Iterator[Tensor]:
            return iter(())

    return write_model(folder / "wrong.gguf", Vocabulary())


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (adapter, "is a LoRA adapter; give it as lora"),
        (projector, "is a multimodal projector; give it as mmproj"),
        (vocabulary, "a vocabulary alone and no weights"),
    ],
)
def test_a_gguf_file_of_another_kind_is_named(write: Callable[[Path], Path], expected: str, tmp_path: Path) -> None:
    """With the option that it is for."""
    assert expected in message(write(tmp_path))


def test_a_model_is_no_adapter_and_no_projector(model: Path) -> None:
    """The message names the tool that makes adapters, and how projectors are named."""
    assert "is not a LoRA adapter" in message(model, lora=[model])
    assert "is not a multimodal projector" in message(model, mmproj=model)
