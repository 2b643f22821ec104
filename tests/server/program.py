"""A server in a process of its own, over a fake engine with blocked passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.server.running import LONG_S

PROGRAM = """
import os, sys
if len(sys.argv) > 3:  # as a service manager passes a socket
    os.dup2(int(sys.argv[3]), 3)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
from tests.server import probe
from tests.server.stand_in import StandInEngine, StandInLLM
from paceline.server import application, model_front, startup
from paceline.server.settings import ServerSettings

engine = StandInEngine()
engine.backend.hold()
build = application.build_app

def with_probe(settings, front):
    app = build(settings, front)
    app.include_router(probe.routes(app.state.service))
    return app

application.build_app = with_probe
model_front.ModelFront = lambda settings: StandInLLM(engine)
sys.exit(startup.serve(ServerSettings(port=0, drain_s=float(sys.argv[1]), hosts=tuple(sys.argv[2].split(",")))))
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Program:
    """A server in a process of its own, with blocked passes. lines: its output on stderr. url: empty without a TCP address."""

    def __init__(self, drain_s: float, host: str = "127.0.0.1", *inherited: int) -> None:
        """inherited: the descriptor of a socket to listen on in place of the host."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(drain_s), host, *map(str, inherited)],
            pass_fds=inherited,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=ENVIRONMENT,
        )
        self.lines: list[str] = []
        found = re.search(r"http://\S+", self.wait_for("listening on"))
        self.url = "" if found is None else found[0].replace("0.0.0.0", "127.0.0.1")

    def wait_for(self, words: str) -> str:
        """The next line with them."""
        assert self._process.stderr is not None
        for line in iter(self._process.stderr.readline, b""):
            self.lines.append(line.decode())
            if words in self.lines[-1]:
                return self.lines[-1]
        raise AssertionError(f"it never wrote {words!r} but {self.lines}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close_stderr(self) -> None:
        assert self._process.stderr is not None
        self._process.stderr.close()

    def code(self) -> int:
        assert self._process.stderr is not None
        if not self._process.stderr.closed:
            self.lines += self._process.stderr.read().decode().splitlines()
        return self._process.wait(LONG_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(LONG_S)
        if self._process.stderr is not None:
            self._process.stderr.close()
