"""Run real clients against `paceline serve`.

python -m tests.clients frameworks [FOLDER]          LangChain, LlamaIndex and instructor
python -m tests.clients agents-sdk [FOLDER]          OpenAI's Agents SDK
python -m tests.clients lm-eval [FOLDER]             EleutherAI's lm-eval
python -m tests.clients agents [FOLDER] [NAME ...] [--model FILE]   Claude Code, Codex, opencode, Qwen Code and aider

The clients are installed in FOLDER, once (default: clients/SUITE in paceline's cache folder). The coding agents run in a
network namespace with the loopback alone, by a tiny scripted model or by a real model. Not a part of the suite, since the
clients come from package indexes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.model import cache_folder

FOLDER = Path(__file__).parent
CHECKS = {
    "frameworks": ("requirements.txt", ("check_frameworks.py", "check_responses.py")),
    "lm-eval": ("requirements_lm_eval.txt", ("check_lm_eval.py",)),
    "agents-sdk": ("requirements_agents.txt", ("check_agents.py",)),
}


def main() -> int:
    """Install the clients of a suite, run its checks and return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", usage=__doc__)
    parser.add_argument("suite", choices=(*CHECKS, "agents"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    folder = given.folder or cache_folder() / "clients" / given.suite
    if given.suite == "agents":
        return _run_agents(folder.absolute(), given.names, given.model)
    return _run_python_clients(given.suite, folder)


def _run_agents(folder: Path, names: list[str], model: Path | None) -> int:
    from tests.clients import coding_agents

    if unknown := set(names) - coding_agents.RUNS.keys():
        raise SystemExit(f"no agents: {', '.join(sorted(unknown))}; there are {', '.join(coding_agents.RUNS)}")
    if "PACELINE_CLIENTS_ISOLATED" not in os.environ:
        coding_agents.install(folder)
        return coding_agents.isolate([str(folder), *names, *(["--model", str(model.absolute())] if model else [])])
    return coding_agents.run(folder, names or list(coding_agents.RUNS), model)


def _run_python_clients(suite: str, folder: Path) -> int:
    """Run pytest in an environment of the clients' own: they bring many packages, and want other versions of `openai`."""
    requirements, files = CHECKS[suite]
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
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
