"""Run LangChain, LlamaIndex and instructor, or OpenAI's Agents SDK, against `paceline serve` with the demo model.

python -m tests.clients VENV [agents]

The frameworks bring many packages, so they have a virtual environment of their own: VENV is made, and the requirements are
installed into it, where it does not exist. The Agents SDK needs another one, since it wants another version of `openai`. Not a
part of the suite, since it needs a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent
CHECKS = {
    "frameworks": ("requirements.txt", ("check_frameworks.py", "check_responses.py")),
    "agents": ("requirements_agents.txt", ("check_agents.py",)),
}


def main() -> int:
    """Make the environment, start the server, run the checks and return pytest's exit code."""
    if len(sys.argv) not in (2, 3) or (name := sys.argv[2] if len(sys.argv) == 3 else "frameworks") not in CHECKS:
        raise SystemExit(__doc__)
    requirements, files = CHECKS[name]
    python = Path(sys.argv[1]) / "bin" / "python"
    if not python.exists():
        venv.create(sys.argv[1], with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", FOLDER / requirements], check=True)
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--log-level", "error", "-c", "4096"]
    command += ["--responses-store", "100"]
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
            return subprocess.run(
                [*checks, *(FOLDER / file for file in files)], env=environment, check=False
            ).returncode
        finally:
            server.terminate()


if __name__ == "__main__":
    raise SystemExit(main())
