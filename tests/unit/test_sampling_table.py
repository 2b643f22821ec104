"""The table of sampling parameters: its rows are the fields, and everything beside the engine is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paceline
from paceline.params import FIELDS, help_of
from paceline.sampling_table import BY_NAME, PARAMETERS

PACKAGE = Path(paceline.__file__).parent
ROW = (
    '    Parameter("dummy_level", "number", 0, 5, "Sampling", "--dummy-level", label="D", step=1, is_clamped=True,'
    'apis="llama_server:dummy ollama", elsewhere="dummies"),'
)
DOCUMENTED = "        dummy_level: Level of the dummy; 0 is off.\n"
FIELD = "    dummy_level: float = 0.0\n"
LOOK = """
import json, sys
from typer.main import get_command
from paceline import InvalidParams, SamplingParams
from paceline.cli.app import build_app
from paceline.server.dialects.llama_server.completion_request import ParseContext, brief_settings, parse_params
from paceline.server.dialects.llama_server.llama_bodies import CompletionBody
from paceline.server.dialects.ollama.ollama_requests import OllamaBody, OllamaChatBody, parse_ollama
from paceline.server.dialects.openai.openai_requests import OpenAIChatBody, OpenAICompletionBody, parse_generation
from paceline.server.dialects.responses.responses_request import ResponsesBody
from paceline.server.engine_routes import chat_parameters
from paceline.server.flags.display import markdown
from paceline.server.flags.table import BY_NAME

try:
    SamplingParams(dummy_level=6)
except InvalidParams as error:
    refused = str(error)
def level(body, name):
    body = body.model_validate({name: 3, "messages": []})
    return parse_generation(body, SamplingParams(), {}, {}, None).params.dummy_level

def shown(body):
    return body.model_json_schema()["properties"]

llama, warnings = CompletionBody.model_validate({"dummy": 7}), []
llama = parse_params(llama, ParseContext(base=SamplingParams(), tokenizer=None, images=None), warnings)
body = OllamaChatBody.model_validate({"options": {"dummy_level": 3}})
ollama = parse_ollama(body, SamplingParams(), lambda *_: {}, "none").params
bodies = (OpenAIChatBody, OpenAICompletionBody, ResponsesBody)
openai = [level(body, name) for body in bodies for name in ("dummy_level", "dummies")]
commands = get_command(build_app()).commands
names = ("generate", "chat", "run")
options = {name: [each.help for each in commands[name].params if each.name == "dummy_level"] for name in names}
page = [each for each in chat_parameters(SamplingParams(dummy_level=2), thinks=False) if each["name"] == "dummy_level"]
flag, _ = BY_NAME["--dummy-level"]
print(json.dumps({
    "library": SamplingParams(dummy_level=1.5).dummy_level, "refused": refused, "options": options, "page": page,
    "flag": [flag.text, flag.action.into, flag.reader("--dummy-level", "2")], "documented": "--dummy-level" in markdown(),
    "llama": [llama.dummy_level, warnings, brief_settings(llama)["dummy"], "dummy" in shown(CompletionBody)],
    "ollama": [ollama.dummy_level, "dummy_level" in shown(OllamaBody)["options"]["description"]],
    "openai": openai, "described": shown(OpenAIChatBody)["dummy_level"]["description"],
}))
"""


def test_each_field_has_a_row_and_a_sentence() -> None:
    """A parameter that command lines and pages have is described in a sentence."""
    assert set(BY_NAME) == set(FIELDS)
    assert len(BY_NAME) == len(PARAMETERS)
    for row in PARAMETERS:
        if row.group or row.label:
            assert help_of(row.name).endswith(".")


def test_a_new_parameter_touches_two_files(tmp_path: Path) -> None:
    """A row, a field and its sentence reach the library, both command lines, their help, the page and the bodies over HTTP."""
    package = tmp_path / "paceline"
    package.mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name not in ("sampling_table.py", "params.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    table, record = (PACKAGE / name for name in ("sampling_table.py", "params.py"))
    changed = table.read_text(encoding="utf-8").replace('    Parameter("seed"', f'{ROW}\n    Parameter("seed"')
    (package / table.name).write_text(changed, encoding="utf-8")
    changed = record.read_text(encoding="utf-8")
    for before, added in (("        typical_p: ", DOCUMENTED), ("    typical_p: float", FIELD)):
        assert changed.count(f"\n{before}") == 1
        changed = changed.replace(f"\n{before}", f"\n{added}{before}", 1)
    (package / record.name).write_text(changed, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    sentence = "Level of the dummy; 0 is off."
    assert found["library"] == 1.5
    assert found["refused"] == "dummy_level must be a finite number >= 0 and <= 5, not 6"
    assert found["options"] == {name: [sentence] for name in ("generate", "chat", "run")}
    assert found["flag"] == [sentence, "sampling.dummy_level", 2.0]
    assert found["documented"]
    assert found["llama"] == [5.0, ["dummy: 7.0 counts as 5.0"], 5.0, True]
    assert found["ollama"] == [3.0, True]
    assert found["openai"] == [3.0] * 6
    assert found["described"].startswith("paceline's own: as in SamplingParams")
    (page,) = found["page"]
    assert (page["default"], page["minimum"], page["maximum"], page["step"]) == (2.0, 0, 5, 1)
    assert (page["label"], page["group"], page["help"]) == ("D", "Sampling", sentence)
