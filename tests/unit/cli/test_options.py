"""Texts from arguments, files and stdin."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline import SamplingParams
from paceline.cli import inputs, options
from paceline.cli.app import build_app
from paceline.cli.inputs import read_sampling
from paceline.errors import InvalidParams
from paceline.server.flags.table import GROUPS, Store


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("data", "text"), [(b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"", ""), ("é\nb".encode(), "é\nb")]
)
def test_stdin_loses_one_line_break_at_its_end(monkeypatch: pytest.MonkeyPatch, data: bytes, text: str) -> None:
    """`echo` adds a line break; everything else stays."""
    stdin(monkeypatch, data)
    assert inputs.argument_or_stdin("PROMPT", "-") == text


def test_bytes_that_are_no_text_are_refused_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the byte and its place."""
    stdin(monkeypatch, b"ab\xff")
    with pytest.raises(InvalidParams, match="stdin is not UTF-8: byte 0xff at offset 2"):
        inputs.stdin_text()


def test_a_closed_stdin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without stdin gets an error that names it."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidParams, match="closed"):
        inputs.stdin_text()


def test_an_argument_with_stray_bytes_is_refused() -> None:
    """Python hands them over as surrogates, which are no text."""
    assert inputs.text_argument("PROMPT", "é") == "é"
    with pytest.raises(InvalidParams, match="PROMPT is not valid text: character 1"):
        inputs.text_argument("PROMPT", "a\udcff")


def test_lines_of_stdin_take_the_place_of_the_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and lines mix, in order."""
    stdin(monkeypatch, b"one\ntwo\n")
    assert inputs.arguments_or_lines("TEXT", ["a", "-", "b"]) == ["a", "one", "two", "b"]


def test_lines_of_a_redirected_stdin_are_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments; a stdin that has no text is missing text."""
    stdin(monkeypatch, b"one\ntwo\n")
    assert inputs.arguments_or_lines("TEXT", None) == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", None)
    for read in (inputs.arguments_or_lines, inputs.argument_or_stdin):
        with pytest.raises(InvalidParams, match="TEXT is missing"):
            read("TEXT", None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The message has the option, the path and the reason."""
    with pytest.raises(InvalidParams, match=r"--grammar-file: cannot read .*none: No such file"):
        inputs.text_file("--grammar-file", tmp_path / "none")
    (tmp_path / "some").write_bytes(b"\xff")
    with pytest.raises(InvalidParams, match=r"--grammar-file .*some is not UTF-8"):
        inputs.text_file("--grammar-file", tmp_path / "some")


def sampling(*args: str, **defaults: Any) -> SamplingParams:
    """Return the parameters that a command gets by its options."""
    found: list[SamplingParams] = []
    app = typer.Typer()

    @app.command(context_settings={"token_normalize_func": inputs.usual_name})
    @options.takes_options(**defaults)
    def command(**given: Any) -> None:
        found.append(inputs.sampling_params(given))

    result = CliRunner().invoke(app, list(args))
    if isinstance(result.exception, InvalidParams):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ((), {}),
        (("--temp", "0"), {"temperature": 0}),
        (("--presence-penalty", "-0.5", "--frequency-penalty", "1"), {"presence_penalty": -0.5, "frequency_penalty": 1}),
        (("--penalty-last-n", "-1", "--repeat-penalty", "1.5"), {"penalty_last_n": -1, "repeat_penalty": 1.5}),
        (("--repeat-last-n", "9", "--typical", "0.5"), {"penalty_last_n": 9, "typical_p": 0.5}),
        (("--dry-multiplier", "0.8", "--dry-sequence-breaker", ";"),
         {"dry_multiplier": 0.8, "dry_sequence_breakers": (";",)}),
        (("--dry-sequence-breaker", "none"), {"dry_sequence_breakers": ()}),
        (("--xtc-probability", "1", "--xtc-threshold", "0.2"), {"xtc_probability": 1, "xtc_threshold": 0.2}),
        (("--mirostat", "2", "--mirostat-ent", "4", "--mirostat-lr", "0.2"),
         {"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2}),
        (("--samplers", "top-k;temperature"), {"samplers": ("top_k", "temperature")}),
        (("-l", "5+1.5", "--logit-bias", "7-2"), {"logit_bias": {5: 1.5, 7: -2}}),
        (("-n", "-1", "--ignore-eos", "-r", "a", "--stop", "b"),
         {"max_tokens": None, "ignore_eos": True, "stop": ("a", "b")}),
        (("-s", "7", "--choice", "yes", "--choice", "no"), {"seed": 7, "choice": ("yes", "no")}),
        (("-j", "{}", "--disable-any-whitespace"), {"json_schema": "{}", "disable_any_whitespace": True}),
    ],
)  # fmt: skip
def test_options_set_the_fields_of_sampling_params(args: tuple[str, ...], fields: dict[str, Any]) -> None:
    """By llama.cpp's names and the fields' names; all other fields keep their defaults."""
    assert sampling(*args) == SamplingParams(**fields)


def test_a_schema_and_a_grammar_come_from_files(tmp_path: Path) -> None:
    """A file and a text for the same field exclude each other."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('root ::= "a"')
    assert sampling("-jf", str(schema)) == SamplingParams(json_schema={"type": "integer"})
    assert sampling("--grammar-file", str(grammar)) == SamplingParams(grammar='root ::= "a"')
    with pytest.raises(InvalidParams, match="--json-schema and --json-schema-file exclude each other"):
        sampling("--json-schema-file", str(schema), "-j", "{}")
    with pytest.raises(InvalidParams, match="json_schema and grammar exclude|grammar and json_schema exclude"):
        sampling("-jf", str(schema), "--grammar-file", str(grammar))
    with pytest.raises(InvalidParams, match="--json-schema-file: cannot read"):
        sampling("-jf", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--temperature", "-1"), "temperature must be"),
        (("--typical-p", "2"), "typical_p must be"),
        (("--mirostat", "3"), "mirostat must be"),
        (("--samplers", "nothing"), "--samplers"),
        (("-l", "5"), "--logit-bias must be a token id"),
        (("--stop", ""), "stop.0. must have 1 to"),
    ],
)
def test_values_out_of_range_are_refused(args: tuple[str, ...], words: str) -> None:
    """The error names the field or the option."""
    with pytest.raises(InvalidParams, match=words):
        sampling(*args)


def test_defaults_match_the_fields_unless_the_command_has_its_own() -> None:
    """`paceline chat` has no limit on the tokens of a reply."""
    assert sampling(max_tokens=-1) == SamplingParams(max_tokens=None)
    assert sampling("-n", "5", max_tokens=-1) == SamplingParams(max_tokens=5)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_flags_of_the_server_are_options(command: str) -> None:
    """All of llama-server's names that set a field of `SamplingParams`, each with a help text of whole sentences."""
    made: Any = typer.main.get_command(build_app())
    parameters = made.commands[command].params
    names = {name for parameter in parameters for name in parameter.opts}
    flags = [item for item in GROUPS["Sampling"] if isinstance(item.action, Store) and "sampling." in item.action.into]
    known = {name if name in names else f"--{inputs.usual_name(name[2:])}" for flag in flags for name in flag.names}
    assert known - names == {"--sampler-seq", "--sampling-seq"}
    assert all(parameter.help.endswith((".", "?")) for parameter in parameters if parameter.help)


def test_adapters_have_names_and_scales(tmp_path: Path) -> None:
    """The name is the file's; a file with an equals sign in its name is found."""
    odd = tmp_path / "a=2"
    odd.touch()
    assert options.lora_adapters(["x/style.gguf", "sql.gguf=0.5", str(odd)]) == {
        "style": (Path("x/style.gguf"), 1.0),
        "sql": (Path("sql.gguf"), 0.5),
        "a=2": (odd, 1.0),
    }
    for given, words in ((["a.gguf=x"], "FILE=SCALE"), (["x/a.gguf", "y/a.gguf"], "two adapters would be called 'a'")):
        with pytest.raises(InvalidParams, match=words):
            options.lora_adapters(given)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("temperature", "0", "temperature", 0.0),
        ("--temp", "0.5", "temperature", 0.5),
        ("top-k", "3", "top_k", 3),
        ("top_k", "-", "top_k", 7),
        ("n_predict", "-1", "max_tokens", None),
        ("seed", "5", "seed", 5),
        ("ignore_eos", "true", "ignore_eos", True),
        ("stop", "a b", "stop", ("a b",)),
        ("choice", "-", "choice", None),
        ("json_schema", '{"const": 5}', "json_schema", '{"const": 5}'),
    ],
)
def test_a_sampling_option_is_read_from_its_name_and_text(name: str, text: str, field: str, value: object) -> None:
    """By the name of the field or llama.cpp's; a dash is the value at the start."""
    assert read_sampling(name, text, SamplingParams(top_k=7)) == (field, value)


def test_a_file_is_read_for_the_field_that_it_sets(tmp_path: Path) -> None:
    """As the option of the command line reads it."""
    (tmp_path / "g").write_text('root ::= "a"\n')
    assert read_sampling("grammar_file", str(tmp_path / "g"), SamplingParams()) == ("grammar", 'root ::= "a"\n')


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("temprature", "1", "did you mean 'temperature'"),
        ("num_predict", "1", "did you mean 'max_tokens'"),
        ("think", "false", 'reasoning_effort="none"'),
        ("n", "2", "unknown option 'n'"),
        ("top_k", "1.5", "top_k must be a whole number, not '1.5'"),
        ("temp", "hot", "temp must be a number, not 'hot'"),
        ("temperature", "nan", "temperature must be"),
        ("ignore_eos", "maybe", "ignore_eos must be on or off"),
        ("stop", "", "stop"),
    ],
)
def test_a_sampling_option_that_cannot_be_set_says_why(name: str, text: str, words: str) -> None:
    """An unknown name, another package's name, a value of another kind."""
    with pytest.raises(InvalidParams, match=re.escape(words)):
        read_sampling(name, text, SamplingParams())
