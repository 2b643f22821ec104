"""Flags against their readers: llama.cpp's source, the engine's options, and a model's file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.server.flags.llama_flags import LLAMA_FLAGS
from tests.unit.server.flags.world import EXAMPLES, FILES, FakeFiles

from paceline import _native, demo_model_path
from paceline.chat.chat_format import NAMED
from paceline.engine.arguments import engine_arguments
from paceline.errors import ModelLoadError
from paceline.runtime import Model
from paceline.runtime.context_options import ContextOptions
from paceline.server.flags import DiskFiles, resolve
from paceline.server.flags.readers import NAMED_TEMPLATES

pytestmark = pytest.mark.native

_ROW = re.compile(r"\| `(-[^`]*)` \| (.*) \|$", re.MULTILINE)
_NAME = re.compile(r"--?[A-Za-z][\w.-]*")


def test_the_list_of_flags_is_the_one_of_the_pinned_source() -> None:
    """All rows of llama-server's own tables, with their names and variables."""
    page = Path(_native.build_info()["llama_cpp_source"]) / "tools/server/README.md"
    if not page.is_file():
        pytest.skip("llama.cpp's source is not on this machine")
    listed = {}
    for spelled, text in _ROW.findall(page.read_text(encoding="utf-8")):
        names = [word for word in re.split(r",?\s+", spelled) if _NAME.fullmatch(word)]
        env = re.search(r"\(env: (\w+)\)", text)
        listed[tuple(names)] = env[1] if env else None
    assert len(listed) > 200
    assert {known.names: known.env for known in LLAMA_FLAGS} == listed


@pytest.mark.parametrize(
    "name", [name for name, (_, expected) in EXAMPLES.items() if any("engine." in key for key in expected)]
)
def test_what_a_flag_makes_of_the_engines_options_is_taken(name: str) -> None:
    """The engine's options, contexts and model loading accept it."""
    options = resolve([name, *EXAMPLES[name][0]], {}, FakeFiles(FILES)).settings.engine_options
    sorted_ = engine_arguments(options)
    loading = {key: value for key, value in sorted_.model.items() if key != "main_gpu"}  # there may be no second GPU
    with Model.load(demo_model_path(), vocab_only=True, **loading) as model:
        ContextOptions(**sorted_.context).resolve(model)


def test_a_context_of_0_is_read_from_the_models_file() -> None:
    """The same number as that of the loaded model."""
    with Model.load(demo_model_path()) as model:
        trained = model.n_ctx_train
    assert resolve(["-c", "0"], {}, DiskFiles(print)).settings.engine_options["n_ctx"] == trained


def test_a_context_of_0_of_an_invalid_model_is_refused(tmp_path: Path) -> None:
    """With the file's name."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=re.escape(str(path))):
        resolve(["-c", "0", "-m", str(path)], {}, DiskFiles(print))


def test_the_disk_distinguishes_files_and_folders(tmp_path: Path) -> None:
    """It distinguishes them and reads the files."""
    (tmp_path / "file").write_bytes(b"x")
    disk = DiskFiles(print)
    assert disk.read(tmp_path / "file") == b"x"
    assert [disk.is_file(tmp_path / name) for name in ("file", "", "no")] == [True, False, False]
    assert [disk.is_folder(tmp_path / name) for name in ("file", "", "no")] == [False, True, False]
    with pytest.raises(OSError, match="No such file"):
        disk.read(tmp_path / "no")


def test_the_names_of_templates_are_those_that_chat_formats_know() -> None:
    """Every format that has a name can be chosen by it."""
    assert set(NAMED) <= set(NAMED_TEMPLATES)
