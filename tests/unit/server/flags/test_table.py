"""The table of flags: complete, without duplicates, and each row has an effect."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.unit.server.flags.llama_flags import LLAMA_FLAGS, Known
from tests.unit.server.flags.world import EXAMPLES, resolved, setting

import paceline.server
from paceline.config import CONFIG_NAMES
from paceline.errors import InvalidParams
from paceline.params import FIELDS
from paceline.server.flags.display import markdown
from paceline.server.flags.table import (
    BY_NAME,
    ENV_NAMES,
    FLAGS,
    SWITCH,
    Flag,
    Ignore,
    NoOp,
    Print,
    ReadConfig,
    Reject,
    Store,
)
from paceline.server.settings import ServerSettings

PAGE = Path(__file__).parents[4] / "docs" / "guide" / "flags.md"
SERVER = Path(paceline.server.__file__).parent
SETTING = [flag for flag in FLAGS if isinstance(flag.action, Store)]


def _name(value: Any) -> str:
    return value.long_name if isinstance(value, Flag) else value.names[-1]


@pytest.mark.parametrize("known", LLAMA_FLAGS, ids=_name)
def test_every_flag_of_llama_server_is_known_by_all_names_and_its_variable(known: Known) -> None:
    """All spellings lead to one row, and so does the variable."""
    rows = {BY_NAME[name][0].long_name for name in known.names}
    assert len(rows) == 1
    flag = BY_NAME[known.names[0]][0]
    assert flag.env == known.env
    assert not flag.ours


def test_no_flag_claims_to_be_llama_servers_that_is_not() -> None:
    """Flags that llama-server does not have are marked as ours."""
    theirs = {name for known in LLAMA_FLAGS for name in known.names}
    for flag in FLAGS:
        assert flag.ours == (not theirs & {*flag.names, *flag.off_names}), flag.long_name


def test_no_name_and_no_variable_belongs_to_two_flags() -> None:
    """A name means one thing."""
    names = Counter(name for flag in FLAGS for name in (*flag.names, *flag.off_names))
    variables = Counter(name for flag in FLAGS for name in (*flag.own_envs, flag.env, flag.off_env) if name)
    assert [name for name, count in (names + variables).items() if count > 1] == []


@pytest.mark.parametrize("flag", FLAGS, ids=_name)
def test_every_flag_has_an_action_and_a_sentence(flag: Flag) -> None:
    """Help ends with a full stop; reasons and ways out are put into sentences and do not."""
    assert flag.text.endswith(".") and flag.text[0].isupper()
    for action in (flag.action, *flag.actions.values()):
        match action:
            case Ignore(text) | Reject(text):
                assert text and text == text.strip() and not text.endswith(".")
            case Store() as store:
                assert store.targets
            case NoOp() | Print() | ReadConfig():
                pass


def test_every_flag_that_sets_something_has_an_example() -> None:
    """The next test covers all of them."""
    assert sorted(EXAMPLES) == sorted(flag.long_name for flag in SETTING)


@pytest.mark.parametrize("flag", SETTING, ids=_name)
def test_a_flag_arrives_in_the_settings(flag: Flag) -> None:
    """With each of its names, its value is stored."""
    words, expected = EXAMPLES[flag.long_name]
    for name in flag.names:
        found = resolved(name, *words)
        for target, value in expected.items():
            assert setting(found, target) == value
            assert type(setting(found, target)) is type(value) or isinstance(value, int | float)


@pytest.mark.parametrize("flag", [flag for flag in SETTING if flag.own_envs], ids=_name)
def test_a_variable_means_the_same_as_the_flag(flag: Flag) -> None:
    """llama-server's variable and each made of a long name; a switch's value is on."""
    words, expected = EXAMPLES[flag.long_name]
    value, others = (words[0], words[1:]) if flag.metavar != SWITCH else ("on", words)
    for name in (*flag.own_envs, *filter(None, [flag.env])):
        found = resolved(*others, env={name: value})
        assert {target: setting(found, target) for target in expected} == expected


@pytest.mark.parametrize("flag", [flag for flag in SETTING if flag.off], ids=_name)
def test_a_switch_is_turned_off_in_every_way(flag: Flag) -> None:
    """Its off names and variables turn it off."""
    words, expected = EXAMPLES[flag.long_name]
    for name in flag.off_names:
        assert any(setting(resolved(name, *words), target) != value for target, value in expected.items())
    variables = dict.fromkeys((*flag.own_envs, *filter(None, [flag.env])), "off")
    variables |= {flag.off_env: ""} if flag.off_env else {}
    for variable, text in variables.items():
        found = resolved(*words, env={variable: text})
        assert any(setting(found, target) != value for target, value in expected.items())


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ServerSettings)])
def test_every_setting_of_the_server_has_a_flag_and_a_variable(field: str) -> None:
    """Nothing can be set in code alone."""
    if field in ("engine_options", "sampling"):
        return
    flags = [flag for flag in SETTING if isinstance(flag.action, Store) and f"server.{field}" in flag.action.targets]
    assert flags and all(flag.own_envs for flag in flags)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ServerSettings)])
def test_every_setting_of_the_server_is_read_by_something(field: str) -> None:
    """By its name, in the server beside the flags or in the command that starts it."""
    sources = [path for path in SERVER.rglob("*.py") if "flags" not in path.parts and path.name != "settings.py"]
    sources.append(SERVER.parent / "cli" / "serve.py")
    assert any(re.search(rf"(settings|config)\.{field}\b", path.read_text(encoding="utf-8")) for path in sources)


def test_every_option_of_the_engine_has_a_flag() -> None:
    """The options of EngineConfig, all but `when_full`: a server refuses in any case."""
    targets = {target for flag in SETTING if isinstance(flag.action, Store) for target in flag.action.targets}
    assert {
        f"engine.{name}" for name in CONFIG_NAMES - {"mmproj", "when_full"}
    } <= targets  # which several flags set together


def test_no_flag_sets_invalid_setting() -> None:
    """Targets are existing fields; the engine's other options are tested with the core."""
    fields = {field.name for field in dataclasses.fields(ServerSettings)}
    for flag in SETTING:
        assert isinstance(flag.action, Store)
        for place, _, name in (target.partition(".") for target in flag.action.targets):
            assert place in ("engine", "aside") or name in {"server": fields, "sampling": set(FIELDS)}[place]


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if isinstance(flag.action, Reject)], ids=_name)
def test_a_rejected_flag_raises_its_name_and_the_way_out(flag: Flag) -> None:
    """In one line, however it is given."""
    assert isinstance(flag.action, Reject)
    value = "9" if flag.long_name not in ("--reasoning-format", "--spec-type") else "deepseek"
    words = [value] * len(flag.metavar.split())
    with pytest.raises(InvalidParams) as error:
        resolved(flag.names[0], *words)
    assert (
        flag.names[0] in str(error.value) and flag.action.way_out in str(error.value) and "\n" not in str(error.value)
    )


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if isinstance(flag.action, Ignore)], ids=_name)
def test_an_ignored_flag_gives_one_note_with_the_reason(flag: Flag) -> None:
    """It changes no setting."""
    assert isinstance(flag.action, Ignore)
    value = {"--lazy-mode": "on", "--log-colors": "on"}.get(flag.long_name, "9")
    words = [] if flag.metavar == SWITCH else [value]
    name = flag.names[0]
    found = resolved(name, *words)
    assert (
        [note for note in found.notes if flag.action.why in note and note.startswith(name)] == list(found.notes) != []
    )
    assert found.settings == resolved().settings


@pytest.mark.parametrize(
    "words",
    [
        ["--no-context-shift"],
        ["--jinja"],
        ["--cont-batching"],
        ["--spec-type", "none"],
        ["--no-webui"],
        ["--kv-unified"],
        ["--cache-reuse", "0"],
        ["--reasoning-format", "none"],
        ["--fit", "on"],
        ["--n-cpu-moe", "0"],
    ],
)
def test_a_no_op_gives_no_note(words: list[str]) -> None:
    """No note without a difference."""
    assert resolved(*words).notes == ()


def test_every_variable_is_in_capitals() -> None:
    """They can be exported by any shell."""
    assert all(name.isidentifier() and name == name.upper() for name in ENV_NAMES)


def test_the_page_is_generated_from_the_table() -> None:
    """Its tables are written by: python -m paceline.server.flags.display docs/guide/flags.md."""
    assert PAGE.read_text(encoding="utf-8").endswith(f"\n\n{markdown()}")
