"""Run code that might end the process, or never end, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

PRELUDE = """
import sys, threading
import numpy as np
from paceline.errors import PacelineError
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler

def told(call):
    try:
        return repr(call())
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
"""


def run_apart(code: str, *arguments: object, timeout_s: float = 60) -> list[str]:
    """Return the lines that Python code prints in a new process, which must end well and in time."""
    command = [sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return done.stdout.splitlines()
