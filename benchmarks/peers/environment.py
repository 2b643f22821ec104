"""The environment of a figure: the machine, the builds, the revision."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def revision() -> str:
    """Return the short commit of the checkout, with a + if files differ from it."""
    commit = _output("git", "rev-parse", "--short=9", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return (commit or "unknown") + ("+" if changed else "")


def cpu_name() -> str:
    """Return the processor by its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_names() -> list[str]:
    """Return the NVIDIA GPUs by their names."""
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def record(info: dict[str, Any]) -> dict[str, Any]:
    """Return the environment to be recorded with every run; `info` is `builds.build_info` of paceline."""
    return {
        "revision": revision(),
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "llama_cpp": info["llama_cpp_commit"],
        "compiler": info["compiler"],
        "flags": info["flags"],
        "cpu_features": [name.removeprefix("CPU.") for name, value in info.get("features", ()) if value == "1"],
    }


def program_id(path: Path) -> str:
    """Return a program's name and the beginning of its hash: a name alone stands for many builds."""
    with path.open("rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def now() -> str:
    """Return the time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)  # noqa: S603
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
