"""The programs in examples/ run unchanged and print the promised output."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
OUTPUT = {  # streams of one tick may end together
    "async_race": r"There was a \w+.+\n[012] tasks cancelled, slots in use: 0\n",
    "batch": r"(A little \w+.*\.\n){8}\d+ tokens in .* tokens/s\n",
    "best_of_n": r"(?s)(?=.*^\* +-)(.*A fox.*\n){6}",
    "conversation": r"(?s).*\[\d+ prompt tokens, 0 of them cached\].*\[\d+ prompt tokens, [1-9]\d* of them cached\].*",
    "chatbot": r"> .+\n> .+\n> ",
    "crash_recovery": r"(?s).*worker restarts: 1 - tokens: 60\n",
    "semantic_search": r"0\.\d+ a duck on the lake\n(0\.\d+ .*\n){2}",
    "labels": r"The fox.*: (happy|sad), .*\n.*\nThe duck.*: failed: prompt_too_long\nA bear.*: (happy|sad), .*\n",
    "several_models": (
        r"(?s)one: Once.*\ntwo: Once.*\none: Once.*\none needs \d+ MiB and is loaded\ntwo needs \d+ MiB and is unloaded\n"
    ),
    "strategy_on_the_fake_backend": r"small chunks +longest pause 0\.0.*\npaced +.* 0\.4.*\nprefill first +.* 1\..*\n",
    "streaming": r"(?s)[^.]+\.[^.]+\.[^.]+\..*\n",
    "tools": r" +user: What .*\?\nassistant: weather\(.*Paris.*\) \n +tool: sunny, 20 degrees\nassistant: .*20 degrees.*\n",
    "typed_reply": r"a (happy|sad) (fox|bear|duck), (brave|careful)\n",
    "structured_output": r".* is a (fox|bear|duck) of \d+ years\nmood: (happy|sad)\n",
}
INPUT = {"chatbot": "Tell me a story.\nAnd then?\n"}
AGAINST_A_SERVER = "openai_client"
A_SERVER = "web_app"  # by test_web_app.py


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    """Run an example as a program and return its output."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(INPUT.get(name, "")))
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(OUTPUT))
def test_an_example_prints_what_it_promises(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the demo model or the fake backend, without arguments."""
    printed = run(monkeypatch, capsys, name)
    assert re.fullmatch(OUTPUT[name], printed, re.MULTILINE | re.DOTALL), printed


def test_the_client_of_the_server_prints_two_completions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat's and a stream's, which it leaves half way."""
    with RunningServer(ServerSettings(engine_options=DEMO_ENGINE)) as server:
        printed = run(monkeypatch, capsys, AGAINST_A_SERVER, server.url)
    assert len(printed.split()) > 20


def test_every_example_is_run_and_documented() -> None:
    """Each program is in the lists above, and the page of examples has its text."""
    programs = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*.py")}
    assert set(programs) == {*OUTPUT, AGAINST_A_SERVER, A_SERVER}
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    shown = re.findall(r'^```python title="examples/(\w+)\.py"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    assert dict(shown) == programs
