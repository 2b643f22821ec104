"""The builds of the servers to be measured."""

import sys
from pathlib import Path

import pytest
from benchmarks.peers.builds import compile_bytecode


def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Import another package under paceline's name, in its place; return its module."""
    module = folder / "paceline" / "room" / "noun.py"
    module.parent.mkdir(parents=True)
    for path in (folder / "paceline" / "__init__.py", module):
        path.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return module


def test_paceline_has_bytecode_also_where_python_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server of a source tree compiles all of it at each start, which an installed one does not."""
    module = package(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    compile_bytecode(Path(sys.executable))
    assert [path.name.partition(".")[0] for path in module.parent.glob("__pycache__/*.pyc")] == ["noun"]


def test_values_that_cannot_be_compiled_end_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured core would be no installed package."""
    package(tmp_path, monkeypatch).write_text("def")
    with pytest.raises(SystemExit, match="ended with 1"):
        compile_bytecode(Path(sys.executable))
