"""Try an installed paceline: its commands, a chat, and a server over HTTP, each with the demo model.

python tools/try_wheel.py [--core v2] [--isolation thread] -- PYTHON [ARGUMENT ...]

PYTHON is the interpreter of the environment to try, and may have an emulator before it, such as `qemu-x86_64-static -cpu Nehalem
venv/bin/python`. It runs with an environment of its own: no compiler, and no PATH but the interpreter's folder. This script
needs neither paceline nor another package.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 20, "temperature": 0}


class Trial:
    """Commands of one environment."""

    def __init__(self, python: list[str], home: str, isolation: str) -> None:
        self.command = [shutil.which(python[0]) or python[0], *python[1:], "-m", "paceline"]
        self.environment = {"HOME": home, "PATH": str(Path(python[-1]).parent)}
        self.folder, self.isolation = home, isolation

    def run(self, *arguments: str) -> str:
        """Return what a command writes to stdout. Ends the program if it fails."""
        begin = time.monotonic()
        command = [*self.command, *arguments]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=240, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
        print(f"{time.monotonic() - begin:6.1f} s  paceline {' '.join(arguments)}", flush=True)
        return done.stdout

    def serve(self) -> None:
        """Start a server, and chat with it over HTTP."""
        begin = time.monotonic()
        command = [*self.command, "serve", "--host", "127.0.0.1", "--port", "0", "--isolation", self.isolation]
        with tempfile.TemporaryFile("w+") as log:
            server = subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log)
            try:
                reply = self._post(self._url(server, log.name) + "/v1/chat/completions")
            finally:
                server.terminate()
                try:
                    status = server.wait(60)
                except subprocess.TimeoutExpired:
                    server.kill()
                    status = server.wait()
        if status:
            sys.exit(f"the server ended with status {status}")
        print(f"{time.monotonic() - begin:6.1f} s  paceline serve: {reply!r}", flush=True)

    def _url(self, server: subprocess.Popen[bytes], log: int | str) -> str:
        for _ in range(1200):
            text = Path(f"/proc/self/fd/{log}").read_text(encoding="utf-8")
            if found := re.search(r"listening on (http://[0-9.:]+)", text):
                return found[1]
            if server.poll() is not None:
                break
            time.sleep(0.1)
        sys.exit(f"the server does not listen:\n{text}")

    def _post(self, url: str) -> str:
        """Return the response to a chat, which the server refuses with 503 while it loads the model."""
        request = urllib.request.Request(url, json.dumps(CHAT).encode(), {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach the loopback
        for _ in range(1200):
            try:
                with opener.open(request, timeout=120) as reply:
                    return str(json.load(reply)["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(0.1)
        sys.exit("the server still refuses requests with 503 two minutes after its start")


def main() -> None:
    """Try the environment that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--core", help="the core that paceline must load")
    parser.add_argument("--isolation", default="process", help="of the server; an emulator runs no second process")
    parser.add_argument("python", nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        trial = Trial(options.python, home, options.isolation)
        facts = json.loads(trial.run("info", "--json"))
        core = facts["core"]
        print(f"core {core['name']}: {core['reason']}")
        if options.core and core["name"] != options.core:
            sys.exit(f"the core is {core['name']!r}, not {options.core!r}")
        story = trial.run("generate", "Once upon a time", "--seed", "1", "-n", "40")
        if len(story.split()) < 10:
            sys.exit(f"this is no story: {story!r}")
        trial.run("demo", "-n", "10")
        trial.run("run", facts["demo_models"]["demo"], "Tell me a story.", "-n", "20")
        trial.serve()


if __name__ == "__main__":
    main()
