"""A source distribution like that of llama-cpp-python, which pip takes for one."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

BACKEND = """
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.mkdir(os.path.join(folder, "llama_cpp_python-9.9.dist-info"))
    with open(os.path.join(folder, "llama_cpp_python-9.9.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 9.9\\n")
    return "llama_cpp_python-9.9.dist-info"
def build_wheel(*args): raise NotImplementedError
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "fake"\nbackend-path = ["."]\n'


def write_archive(folder: Path, files: dict[str, str]) -> str:
    """Write llama_cpp_python-9.9.tar.gz with these files and the files that pip needs; return its hash."""
    folder.mkdir(exist_ok=True)
    path = folder / "llama_cpp_python-9.9.tar.gz"
    files = {"pyproject.toml": PYPROJECT, "fake.py": BACKEND, "PKG-INFO": "Name: llama-cpp-python\n"} | files
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"llama_cpp_python-9.9/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def vendored(files: dict[str, str]) -> dict[str, str]:
    """Return the distribution's folder of llama.cpp."""
    return {f"vendor/llama.cpp/{name}": text for name, text in files.items()}
