"""`paceline cache`: what is on the disk, what is damaged, and how it is removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.app import build_app
from paceline.engine.disk_blocks import BlockName, ModelFolder, files_of

MODELS = (b"\xab" * 16, b"\xac" * 16)


def invoke(*args: object) -> Any:
    return CliRunner().invoke(build_app(), ["cache", *map(str, args)], prog_name="paceline")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of one model, and one of another."""
    root = tmp_path / "kv"
    for model, ends in zip(MODELS, (b"xy", b"z"), strict=True):
        writer = ModelFolder(root, model, {"model": "demo", "files": [f"{model.hex()[:2]}.gguf"]})
        for end in ends:
            name = BlockName(b"s" * 16, 3, 1, bytes([end]) * 16, is_state=False)
            writer.write(name, np.arange(1, 4, dtype="<i4").tobytes(), 0, 3, np.zeros(1000, np.uint8))
    return root


def test_ls_has_a_line_for_each_model(folder: Path) -> None:
    result = invoke("ls", "--folder", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["ID", "MODEL", "FILES", "TOKENS", "SIZE", "USED"]
    assert [row.split()[:6] for row in rows] == [
        ["abababab", "ab.gguf", "2", "6", "2.22", "kB"],
        ["acacacac", "ac.gguf", "1", "3", "1.11", "kB"],
    ]


def test_ls_writes_json(folder: Path) -> None:
    records = json.loads(invoke("ls", "--folder", folder, "--json").stdout)
    assert [(each["id"], each["model"], each["files"], each["tokens"]) for each in records] == [
        (MODELS[0].hex(), "ab.gguf", 2, 6),
        (MODELS[1].hex(), "ac.gguf", 1, 3),
    ]


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    result = invoke("ls", "--folder", tmp_path / "none")
    assert result.exit_code == 0
    assert "There are no prefixes in" in result.stderr
    assert invoke("ls", "--folder", tmp_path, "--json").stdout.strip() == "[]"


def test_verify_names_the_damaged_files(folder: Path) -> None:
    result = invoke("verify", "--folder", folder)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "3 files, 0 damaged" in result.stderr
    path = min(file.path for file in files_of(folder))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = invoke("verify", "--folder", folder)
    assert result.exit_code == 1
    assert result.stdout == f"{path}: its checksum does not match\n"
    assert path.exists()


def test_rm_removes_the_files_of_a_model(folder: Path) -> None:
    assert invoke("rm", "abab", "--folder", folder).exit_code == 0
    assert {file.model for file in files_of(folder)} == {MODELS[1].hex()}
    assert not (folder / MODELS[0].hex()).exists()
    assert invoke("rm", "--all", "--folder", folder).exit_code == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "name the models by their ID in `paceline cache ls`, or give --all"),
        (["a"], "several models have an ID that begins with 'a'; `paceline cache ls` lists them"),
        (["ff"], "no model has an ID that begins with 'ff'; `paceline cache ls` lists them"),
        ([""], "several models have an ID that begins with ''; `paceline cache ls` lists them"),
    ],
)
def test_rm_without_a_model_is_an_error(folder: Path, given: list[str], message: str) -> None:
    result = invoke("rm", *given, "--folder", folder)
    assert result.exit_code != 0
    assert message in result.stderr
    assert len(list(files_of(folder))) == 3
