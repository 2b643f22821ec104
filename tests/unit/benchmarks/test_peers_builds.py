"""What is built before servers are measured."""

import sys
from pathlib import Path

import pytest
from benchmarks.peers.builds import compile_bytecode


def test_paceline_has_bytecode_also_where_python_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server of a source tree compiles all of it at each start, which an installed one does not."""
    module = tmp_path / "paceline" / "room" / "noun.py"
    module.parent.mkdir(parents=True)
    for path in (tmp_path / "paceline" / "__init__.py", module):
        path.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    compile_bytecode(Path(sys.executable))
    assert [path.name.partition(".")[0] for path in module.parent.glob("__pycache__/*.pyc")] == ["noun"]
