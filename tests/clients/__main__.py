"""Run LangChain, LlamaIndex and instructor against `paceline serve` with the demo model.

python -m tests.clients VENV

The frameworks bring many packages, so they have a virtual environment of their own: VENV is made, and `requirements.txt`
installed into it, where it does not exist. Not a part of the suite, since it needs a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    """Make the environment, start the server, run the checks and return pytest's exit code."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    python = Path(sys.argv[1]) / "bin" / "python"
    if not python.exists():
        venv.create(sys.argv[1], with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", FOLDER / "requirements.txt"], check=True)
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--log-level", "error", "-c", "4096"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = ""
        for line in server.stderr:
            if found := re.search(r"listening on (http://\S+:\d+)", line):
                url = found[1]
            if "is ready" in line:
                break
        checks = [python, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", FOLDER]
        environment = {**os.environ, "PACELINE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
        try:
            return subprocess.run([*checks, FOLDER / "check_frameworks.py"], env=environment, check=False).returncode
        finally:
            server.terminate()


if __name__ == "__main__":
    raise SystemExit(main())
