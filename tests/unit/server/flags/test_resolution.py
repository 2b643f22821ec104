"""From command line, environment and file to settings: values, precedence, notes and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.server.flags.world import FILES, TRAINED, FakeFiles, resolved

from paceline.errors import InvalidParams
from paceline.hub import ModelReference
from paceline.server.flags import DiskFiles, resolve
from paceline.server.flags.resolution import _FLAGS_ELSEWHERE, unescaped
from paceline.server.flags.setters import spec_type_names
from paceline.server.flags.table import BY_NAME, ENV_NAMES, FLAGS
from paceline.server.settings import ApiKey, ServerSettings
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.speculation.named_drafter import resolve_drafter


def engine(*argv: str, **options: Any) -> Any:
    return resolved(*argv, **options).settings.engine_options


def sampling(*argv: str, **options: Any) -> Any:
    return resolved(*argv, **options).settings.sampling


def refusal(*argv: str, **options: Any) -> str:
    with pytest.raises(InvalidParams) as error:
        resolved(*argv, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def config(text: str, *argv: str, **options: Any) -> Any:
    """With a file of this text, named on the command line."""
    return resolved("--config", "serve.toml", *argv, files={"serve.toml": text}, **options)


def test_levels_of_effort_are_texts() -> None:
    """A template compares reasoning_effort with texts, so that on and off are no booleans there as they are for --reasoning."""
    given = resolved("--reasoning-effort", "off", "--reasoning", "off").settings.chat_template_kwargs
    assert given == {"reasoning_effort": "off", "enable_thinking": False}


def test_nothing_given_is_our_defaults() -> None:
    """Only the isolation differs: a server's engine has a process of its own."""
    found = resolved()
    assert found.settings == ServerSettings(engine_options={"isolation": "process"})
    assert (found.notes, found.prints) == ((), None)


# ---- llama-server's meanings


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-ngl", "auto"], {}),
        (["-ngl", "-1"], {}),
        (["-ngl", "all"], {"n_gpu_layers": -1}),
        (["-ngl", "-2"], {"n_gpu_layers": -1}),
        (["-ngl", "0"], {"n_gpu_layers": 0}),
        (["-np", "-1"], {}),
        (["-t", "-1"], {}),
        (["-t", "0"], {}),
        (["-fa", "1"], {"flash_attn": "on"}),
        (["-fa", "disabled"], {"flash_attn": "off"}),
        (["-fa", "-1"], {"flash_attn": "auto"}),
        (["-dev", "none"], {"devices": ["CPU"]}),
        (["-dev", "a, b"], {"devices": ["a", "b"]}),
        (["-cram", "0"], {"host_cache_bytes": 0}),
        (["-cram", "-1"], {"host_cache_bytes": 2**63 - 1}),
        (["--no-repack"], {"use_extra_bufts": False}),
        (["-nkvo"], {"offload_kqv": False}),
        (["--yarn-ext-factor", "-1"], {}),
        (["-ts", "3/1,2"], {"tensor_split": (3.0, 1.0, 2.0)}),
        (["-lm", "dio"], {"load_mode": "direct_io"}),
        (["--no-mmap"], {"load_mode": "none"}),
        (["--sleep-idle-seconds", "-1"], {}),
        (["--mlock", "--no-mmap"], {"load_mode": "mlock"}),
        (["--no-mmap", "--mlock"], {"load_mode": "mlock"}),
        (["--mlock", "--mmap"], {"load_mode": "mmap_mlock"}),
        (["-lm", "mmap", "--mlock"], {"load_mode": "mmap_mlock"}),
        (["-lm", "mlock", "--mmap"], {"load_mode": "mmap_mlock"}),
        (["--rope-scale", "2", "--rope-freq-scale", "0.25"], {"rope_freq_scale": 0.25}),
        (["--rope-freq-scale", "0.25", "--rope-scale", "2"], {"rope_freq_scale": 0.5}),
    ],
)
def test_options_of_the_engine_mean_what_they_mean_to_llama_server(words: list[str], options: dict[str, Any]) -> None:
    """Words and special numbers; of two flags for one thing, the last."""
    assert engine(*words) == {"isolation": "process", **options}


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (["-n", "-1"], {"max_tokens": None}),
        (["--temp", "-1"], {"temperature": 0.0}),
        (["--top-k", "-7"], {"top_k": 0}),
        (["-s", "-1"], {"seed": None}),
        (["-s", "4294967295"], {"seed": None}),
        (["-l", "15+1.5", "-l", "16-2"], {"logit_bias": {15: 1.5, 16: -2.0}}),
        (["-r", "a", "-r", "b"], {"stop": ("a", "b")}),
        (["-r", r"a\nb"], {"stop": ("a\nb",)}),
        (["-r", r"a\nb", "--no-escape"], {"stop": (r"a\nb",)}),
        (["--dry-sequence-breaker", "none"], {"dry_sequence_breakers": ()}),
        (["--dry-sequence-breaker", "a", "--dry-sequence-breaker", "none", "--dry-sequence-breaker", "b"],
         {"dry_sequence_breakers": ("b",)}),
        (["--grammar", "x", "--json-schema", "{}"], {"json_schema": "{}"}),
        (["--json-schema", "{}", "--grammar", "x"], {"grammar": "x"}),
        (["--samplers", "min-p;minp2"[:5]], {"samplers": ("min_p",)}),
        (["--sampler-seq", ""], {"samplers": ()}),
    ],
)  # fmt: skip
def test_sampling_flags_mean_what_they_mean_to_llama_server(words: list[str], params: dict[str, Any]) -> None:
    """Special numbers, repetition, escapes."""
    assert sampling(*words) == params


def test_a_negative_temperature_is_noted() -> None:
    """It counts as 0, which changes the given value."""
    assert resolved("--temp", "-1").notes == ("--temp -1 counts as 0, which is greedy",)


def test_a_context_of_0_is_what_the_model_was_trained_with() -> None:
    """Its origin names it."""
    found = resolved("-c", "0", "-m", "m.gguf")
    assert found.settings.engine_options["n_ctx"] == TRAINED
    assert str(found.origins["engine.n_ctx"]) == "derived: -c 0, as many as the model was trained with"


def test_a_context_of_0_overrides_a_file() -> None:
    """The stronger source counts also if it asks for the model's own."""
    assert config("ctx-size = 512", "-c", "0").settings.engine_options["n_ctx"] == TRAINED
    assert config("ctx-size = 0", "-c", "512").settings.engine_options["n_ctx"] == 512


def test_cells_for_each_slot_make_the_context_where_it_is_not_given() -> None:
    """With the slots that were asked for; a note says that the context is not divided."""
    found = resolved("-np", "3", "--kv-unified-per-slot", "100")
    assert found.settings.engine_options["n_ctx"] == 300
    assert "may use more than 100" in found.notes[0]
    assert engine("-np", "3", "-c", "512", "--kv-unified-per-slot", "100")["n_ctx"] == 512


@pytest.mark.parametrize(
    ("words", "batch", "ubatch"),
    [
        (["-c", "300", "-b", "2048"], 512, None),
        (["-c", "300", "-b", "512"], 512, None),
        (["-b", "64", "-ub", "128"], 64, 64),
        (["-ub", "4096"], None, 2048),
        (["-c", "512", "-ub", "1024"], None, 512),
        (["-b", "4096", "-ub", "4096"], 4096, 4096),
    ],
)
def test_batches_are_lowered_to_what_they_are_part_of(words: list[str], batch: int | None, ubatch: int | None) -> None:
    """As in llama.cpp, with contexts rounded up to 256 cells."""
    options = engine(*words)
    assert (options.get("n_batch"), options.get("n_ubatch")) == (batch, ubatch)


def test_a_lowered_batch_is_noted() -> None:
    """With the flag, its value and the new one."""
    assert resolved("-b", "64", "-ub", "128").notes == ("-ub 128 is lowered to 64, the size of n_batch",)


def test_adapters_of_the_same_name_get_a_number() -> None:
    """A request can name each of them."""
    found = resolved("--lora", "a.gguf", "--lora-scaled", "y/a.gguf:2", files={"y/a.gguf": ""}).settings
    assert found.engine_options["lora"] == {"a": "a.gguf", "a-2": "y/a.gguf"}
    assert found.lora_scales == {"a": 1.0, "a-2": 2.0}


def test_a_scaled_adapter_may_have_a_colon_in_its_path() -> None:
    """The scale follows the last colon."""
    assert engine("--lora-scaled", "c:a.gguf:2", files={"c:a.gguf": ""})["lora"] == {"c:a": "c:a.gguf"}


def test_underscores_are_as_good_as_dashes_and_values_may_be_attached() -> None:
    """In long names alone; a value keeps its underscores."""
    assert engine("--ctx_size=512", "--load_mode", "none")["n_ctx"] == 512
    assert resolved("--alias=a_b").settings.aliases == ("a_b",)


@pytest.mark.parametrize("text", ["on", "enabled", "true", "1"])
def test_variables_of_switches_take_llama_servers_words(text: str) -> None:
    """For on; the same number of words for off."""
    off = {"on": "off", "enabled": "disabled", "true": "false", "1": "0"}[text]
    assert resolved(env={"LLAMA_ARG_ENDPOINT_PROPS": text}).settings.props is True
    assert resolved(env={"LLAMA_ARG_ENDPOINT_SLOTS": off}).settings.slots is False


def test_a_variable_with_no_turns_off_whatever_its_value() -> None:
    """As in llama-server, for which its presence is enough."""
    assert resolved(env={"LLAMA_ARG_NO_ENDPOINT_SLOTS": "0"}).settings.slots is False


# ---- sources


def test_the_command_line_wins_over_variables_and_these_over_the_file() -> None:
    """Of each setting, and its origin names the source."""
    env = {"LLAMA_ARG_CTX_SIZE": "1024", "LLAMA_ARG_PORT": "2", "PACELINE_CONFIG": "serve.toml"}
    files = {"serve.toml": "ctx-size = 512\nport = 1\nhost = '::1'"}
    found = resolved("-c", "2048", env=env, files=files)
    assert (found.settings.engine_options["n_ctx"], found.settings.port, found.settings.hosts) == (2048, 2, ("::1",))
    origins = [str(found.origins[name]) for name in ("engine.n_ctx", "server.port", "server.hosts")]
    assert origins == ["-c", "LLAMA_ARG_PORT", "serve.toml: host"]


def test_the_variable_of_the_build_is_no_address() -> None:
    """PACELINE_RPC=ON, with which paceline was built in the same shell, is noted and hides no addresses given elsewhere."""
    for word in ("ON", "off", "1"):
        found = resolved(env={"PACELINE_RPC": word})
        assert "rpc" not in found.settings.engine_options
        assert found.notes == (
            f"PACELINE_RPC={word} is for builds and not used here; as a flag it has addresses (--rpc)",
        )
        given = resolved(env={"PACELINE_RPC": word, "LLAMA_ARG_RPC": "a:1"})
        assert given.settings.engine_options["rpc"] == ["a:1"]
        assert str(given.origins["engine.rpc"]) == "LLAMA_ARG_RPC"
    files = {"serve.toml": "rpc = ['a:1', 'b:2']"}
    kept = resolved(env={"PACELINE_RPC": "ON", "PACELINE_CONFIG": "serve.toml"}, files=files)
    assert kept.settings.engine_options["rpc"] == ["a:1", "b:2"]
    both = {"PACELINE_RPC": "a:1", "LLAMA_ARG_RPC": "b:1"}
    assert resolved(env=both).settings.engine_options["rpc"] == ["a:1"]


def test_the_words_of_a_build_are_no_addresses_elsewhere() -> None:
    """On the command line, in llama-server's variable and in a file they are errors that name the source."""
    for argv, env, label in (
        (["--rpc", "ON"], {}, "--rpc"),
        ([], {"LLAMA_ARG_RPC": "on"}, "LLAMA_ARG_RPC"),
        ([], {"PACELINE_CONFIG": "serve.toml"}, "serve.toml: rpc"),
    ):
        with pytest.raises(
            InvalidParams, match=rf"{label} must be addresses of a host name or IPv4 address and a port"
        ):
            resolved(*argv, env=env, files={"serve.toml": "rpc = 'OFF'"})


def test_our_variable_wins_over_llama_servers() -> None:
    """If both are set."""
    env = {"PACELINE_PORT": "1", "LLAMA_ARG_PORT": "2"}
    assert resolved(env=env).settings.port == 1


def test_a_list_of_a_stronger_source_replaces_the_weaker_one() -> None:
    """It does not add to it."""
    assert resolved("--alias", "a", "--alias", "b", env={"LLAMA_ARG_ALIAS": "c"}).settings.aliases == ("a", "b")


def test_a_stronger_source_saves_from_what_a_weaker_one_cannot_have() -> None:
    """A value that a stronger source replaces causes no error."""
    assert resolved("--no-context-shift", env={"LLAMA_ARG_CONTEXT_SHIFT": "1"}).notes == ()
    assert engine("-c", "512", env={"LLAMA_ARG_CTX_SIZE": "many"})["n_ctx"] == 512


def test_given_twice_the_last_counts_with_a_note() -> None:
    """As in llama-server."""
    found = resolved("--port", "1", "--port", "2")
    assert (found.settings.port, found.notes) == (2, ("--port was given more than once; the last one counts",))


def test_a_file_takes_names_in_both_spellings_and_values_of_all_kinds() -> None:
    """Numbers, switches, texts, lists of repeatable values, and off names."""
    found = config(
        'ctx_size = 512\ntemp = 0.5\nflash-attn = true\nno-slots = true\nmetrics = false\nn-gpu-layers = "all"\n'
        "tensor-split = [3, 1]\nalias = ['a', 'b']\n"
    ).settings
    options = {"n_ctx": 512, "flash_attn": "on", "n_gpu_layers": -1, "tensor_split": (3.0, 1.0)}
    assert found.engine_options == {"isolation": "process", **options}
    assert (found.sampling, found.slots, found.metrics, found.aliases) == (
        {"temperature": 0.5},
        False,
        False,
        ("a", "b"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ctx-sise = 1", "did you mean 'ctx-size'?"),
        ("config = 'x'", "unknown option 'config'"),
        ("help = true", "unknown option 'help'"),
        ("c = 1", "unknown option 'c'"),
        ("[server]\nport = 1", "unknown option 'server'"),
        ("port = [1]", "must be a text, a number or true or false, not a list"),
        ("port = {a = 1}", "not a table"),
        ("port = 1979-05-27", "not date"),
        ("port = inf", "serve.toml: port must be an integer"),
        ("port = true", "serve.toml: port must be an integer"),
        ("no-slots = 'x'", "serve.toml: no-slots must be true or false"),
        ("[strategy]\npatience = 4", "serve.toml: strategy is a mapping without the key 'name'"),
        (
            "[strategy]\nname = 'paced'\npatienc = 4",
            "strategy 'paced': unknown option 'patienc'; did you mean 'patience'?",
        ),
        (
            "[strategy]\nname = 'paced'\npatience = []",
            "strategy.patience must be a text, a number or true or false, not list",
        ),
        ("[strategy]\nname = 'm:A'\nsize = inf", "strategy has a number that no option can have"),
        ("[port]\nx = 1", "port must be a text, a number or true or false, not a table"),
        ("alias = []", "empty list"),
        ("port = ", "serve.toml is not valid TOML"),
        ('model = "a\\u0000b"', "NUL"),
        ("a = " + "[" * 3000, "is not valid TOML"),
        ("port = " + "9" * 5000, "is not valid TOML"),
        ("port = 0x" + "9" * 5000, "more digits than any setting can have"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_name(text: str, message: str) -> None:
    """With the key, and the nearest one that is known."""
    with pytest.raises(InvalidParams) as error:
        config(text)
    assert message in str(error.value) and "serve.toml" in str(error.value) and "\n" not in str(error.value)


def test_a_section_of_the_file_wins_over_its_top_level() -> None:
    """The file of all commands has the server's flags in [serve], or on its top level."""
    found = config("port = 1\nthreads = 2\n[serve]\nport = 3\n")
    assert (found.settings.port, found.settings.engine_options["n_threads"]) == (3, 2)
    assert str(found.origins["server.port"]) == "serve.toml: [serve] port"
    with pytest.raises(InvalidParams, match=r"serve.toml: \[serve\] unknown option 'prt'; did you mean 'port'"):
        config("[serve]\nprt = 1")
    with pytest.raises(InvalidParams, match=r"serve must be a section \[serve\]"):
        config("serve = 1")


def test_the_default_file_is_read_if_it_exists_and_no_other_is_named() -> None:
    """A missing one is no error."""
    disk = FakeFiles({**FILES, "default.toml": "port = 1", "named.toml": "threads = 2"})
    default = Path("default.toml")
    assert resolve([], {}, disk, default_config=default).settings.port == 1
    assert resolve(["--config", "named.toml"], {}, disk, default_config=default).settings.port == 8080
    assert resolve([], {"PACELINE_CONFIG": "named.toml"}, disk, default_config=default).settings.port == 8080
    assert resolve([], {}, disk, default_config=Path("none.toml")).settings.port == 8080


@pytest.mark.parametrize(
    ("weaker", "argv", "model"),
    [
        ("model = 'm.gguf'", ["-hf", "user/repo:Q4_0"], "cache/user/repo:Q4_0/None/False/no token"),
        ("hf-repo = 'user/repo'\nhf-file = 'x.gguf'", ["-m", "a.gguf"], "a.gguf"),
        ("model = 'hf:user/repo'", ["-m", "a.gguf"], "a.gguf"),
    ],
)
def test_a_model_of_the_command_line_replaces_a_weaker_one(weaker: str, argv: list[str], model: str) -> None:
    """Whichever flag names it; so does a variable with a model of the file."""
    assert config(weaker, *argv).settings.model == Path(model)
    assert resolved(*argv, env={"PACELINE_MODEL": "m.gguf"}).settings.model == Path(model)
    assert config(weaker, env={"PACELINE_MODEL": "x/b.gguf"}).settings.model == Path("x/b.gguf")


def test_flags_of_several_models_replace_a_model_of_the_file() -> None:
    """Otherwise `PACELINE_MODEL` and the file's model would keep a server of several from starting."""
    assert config("model = 'm.gguf'", "--models-dir", "states").is_router
    assert resolved("--models-dir", "states", env={"PACELINE_MODEL": "m.gguf"}).is_router


def test_a_file_that_is_not_there_or_no_text_is_refused() -> None:
    """The error names the flag."""
    assert refusal("--config", "no.toml") == "--config: cannot read no.toml: No such file or directory"
    assert "x.toml is not UTF-8" in refusal("--config", "x.toml", files={"x.toml": b"a = '\xff'"})


def test_variables_that_look_like_slips_are_noted() -> None:
    """Variables with llama-server's prefix always, with ours if they are near a known name."""
    env = {"LLAMA_ARG_CTX_SIZ": "1", "PACELINE_CTX_SIZ": "1", "PACELINE_CACHE_DIR": "x", "HF_TOKEN": "x"}
    assert resolved(env=env).notes == (
        "LLAMA_ARG_CTX_SIZ is not known and not used; did you mean LLAMA_ARG_CTX_SIZE?",
        "PACELINE_CTX_SIZ is not known and not used; did you mean PACELINE_CTX_SIZE?",
    )


def test_flags_elsewhere_are_none_of_ours_and_name_some_of_ours() -> None:
    """A flag of another server is not known here, and each flag in its hint is."""
    hints = {name: re.findall(r"--[a-z-]+", hint) for name, hint in _FLAGS_ELSEWHERE.items()}
    assert not set(hints) & set(BY_NAME)
    assert {flag for flags in hints.values() for flag in flags} <= set(BY_NAME)


# ---- what is wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ctx-sise", "1"], "unknown option '--ctx-sise'; did you mean '--ctx-size'?"),
        (["-npp", "1"], "unknown option '-npp'; did you mean '-np'?"),
        (["--prot", "1"], "unknown option '--prot'; did you mean '--port'?"),
        (["--xyzzy"], "see paceline serve --help"),
        (["--max-model-len", "4096"], "unknown option '--max-model-len'; did you mean '--ctx-size'?"),
        (["--gpu-memory-utilization=0.9"], "--fit-target is the memory that the model and its KV cache leave free"),
        (["llama3.2"], "a model is named with -m"),
        (["m.gguf"], "a model is named with -m"),
        (["serve"], "unexpected 'serve'"),
        (["-"], "unexpected '-'"),
        (["--"], "unexpected '--'"),
        ([""], "unexpected ''"),
        (["-c"], "-c needs a value: -c N"),
        (["-c", "-np"], "-c needs a value, and -np is a flag"),
        (["-c", "1e3"], "-c must be an integer >= 0"),
        (["-c", "1_000"], "-c must be an integer"),
        (["-c", "\u0661"], "-c must be an integer"),
        (["-c", " 1"], "-c must be an integer"),
        (["-c", "9" * 5000], "-c must be an integer"),
        (["-c", "-1"], "-c must be an integer >= 0"),
        (["-np", "0"], "-np must be at least 1, or -1 for automatic"),
        (["-np", "1000"], "-np must be an integer >= 1 and <= 250, not 1000"),
        (["--temp", "nan"], "--temp must be a finite number, not 'nan'"),
        (["--temp", "1e999"], "--temp must be a finite number"),
        (["--top-p", "1.5"], "--top-p must be a finite number >= 0 and <= 1, not 1.5"),
        (["-fa", "maybe"], "-fa must be on, off or auto, not 'maybe'"),
        (["-ctk", "q8"], "did you mean 'q8_0'?"),
        (["--slots=maybe"], "--slots must be on or off"),
        (["--no-slots=on"], "--no-slots takes no value"),
        (["-l", "x"], "-l must be a token id, + or -, and a number, such as 15043+1, not 'x'"),
        (["-l", "5+inf"], "-l must be a finite number"),
        (["--samplers", "top_k;tempersture"], "did you mean 'temperature'?"),
        (["--sampler-seq", "kz"], "--sampler-seq must be of the letters"),
        (["--grammar-file", "no"], "--grammar-file: cannot read no: No such file"),
        (["-m", "no.gguf"], "-m: there is no file no.gguf"),
        (["-m", "no\n.gguf"], r"-m: there is no file 'no\n.gguf'"),
        (["--lora-modules", "no.gguf"], "--lora-modules must be NAME=FILE"),
        (["--lora-modules", "a=no.gguf"], "--lora-modules: there is no file no.gguf"),
        (["--lora-modules", '{"name": "a"}'], "--lora-modules must have the texts"),
        (["--lora", "a.gguf", "--lora-modules", "a=a.gguf"], "two adapters would be called 'a'"),
        (["--alias", "a", "--lora-modules", "a=a.gguf"], "the model's own name"),
        (["--lora", "no.gguf"], "--lora: there is no file no.gguf"),
        (["--lora-scaled", "a.gguf"], "--lora-scaled must be FILE:SCALE"),
        (["--slot-save-path", "no"], "--slot-save-path: there is no folder no"),
        (["--ssl-key-file", "k.pem"], "--ssl-key-file needs --ssl-cert-file beside it"),
        (["--host", "127.0.0.1,::1", "--port", "0"], "127.0.0.1 and ::1 would get different ones"),
        (["--host", ","], "--host names nothing"),
        (["--api-prefix", "llm"], "--api-prefix must begin with a slash"),
        (["--cors-origins", "page.example"], "such as https://page.example"),
        (["--cors-origins", "https://page.example/x"], "such as https://page.example"),
        (["--cors-origins", "null"], "such as https://page.example"),
        (["--cors-methods", "GET POST"], "such as GET,POST"),
        (["--cors-headers", "a:b"], "such as Authorization,Content-Type"),
        (["--allowed-hosts", "http://a"], "such as llm.example.org"),
        (["--allowed-hosts", "a:8080"], "without scheme and port"),
        (["--allowed-hosts", "a.*"], "such as llm.example.org"),
        (["--chat-template", "llama2"], "other names of templates are not supported"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--chat-template-kwargs", "{"], "must be a JSON object"),
        (["--override-kv", "a=1"], "must be KEY=TYPE:VALUE"),
        (["--isolation", "thread", "--on-engine-death", "fail"], "--on-engine-death means nothing with --isolation thread"),
        (["--isolation", "thread", "--max-restarts", "3"], "--max-restarts means nothing with --isolation thread"),
        (["--isolation", "thread", "--hang-timeout", "9"], "--hang-timeout means nothing with --isolation thread"),
        (["--hang-timeout", "0"], "--hang-timeout must be a number of seconds > 0, or -1 for never, not 0"),
        (["--isolation", "thread", "--rpc", "a:1"], "--rpc needs --isolation process"),
        (["--rpc", "a"], "--rpc must be addresses of a host name or IPv4 address and a port"),
        (["--rpc", "a:1,a:1"], "--rpc has a:1 twice"),
        (["--rpc-timeout", "0"], "--rpc-timeout must be a finite number >= 1 and <= 86400, not 0.0"),
        (["--max-restarts", "-1"], "--max-restarts must be an integer >= 0, not -1"),
        (["--strategy", "paced:patienc=4"], "--strategy 'paced': unknown option 'patienc'; did you mean 'patience'?"),
        (["--strategy", "paced:patience=x"], "--strategy 'paced': patience must be an integer, not 'x'"),
        (["--strategy", '{"name": "paced", "patience": 0}'], "--strategy 'paced': patience must be an integer >= 1, not 0"),
        (["--instrument", "tests"], "--instrument must be MODULE:ATTR, such as my_package.watching:Slow, not 'tests'"),
        (["--trace", "nowhere/t.jsonl"], "--trace: there is no folder nowhere; make it first"),
        (["--trace-max-bytes", "9"], "--trace-max-bytes must be an integer >= 4096, not 9"),
        (["--strategy", "{"], "--strategy must be a JSON object"),
        (["--isolation", "thread", "--sleep-idle-seconds", "5"], "--sleep-idle-seconds needs --isolation process"),
        (["--sleep-idle-seconds", "0"], "> 0, or -1 for never, not 0"),
        (["--isolation", "proces"], "--isolation must be one of 'thread', 'process', not 'proces'; did you mean 'process'?"),
        (["--sse-ping-interval", "0"], "or -1 for none"),
        (["--drain-s", "-1"], "--drain-s must be a finite number >= 0"),
        (["--max-total-body-bytes", "9"], "9 has no room for one body of --max-body-bytes 67108864"),
        (["--samplers", "infill;top_k"], "'infill' needs 'top_k' before it"),
        (["--control-vector-layer-range", "1"], "needs a value"),
        (["-lm", "dio", "--mlock"], "--mlock does not go with --load-mode dio"),
        (["-lm", "dio", "--no-mmap"], "--no-mmap does not go with --load-mode dio"),
        (["-hf", "a"], "-hf 'a' is not the name of a repository of the Hugging Face Hub"),
        (["-hf", "a/b", "-mu", "http://host/x.gguf"], "-hf and -mu name two models; give one of them"),
        (["-hf", "a/b", "-m", "m.gguf"], "-m and -hf name two models; give one of them"),
        (["-m", "hf:a/b", "-hf", "a/b"], "-hf and -m name two models; give one of them"),
        (["-hff", "x.gguf"], "-hff names a file of a repository; give -hf, too"),
        (["-hff", "../x.gguf", "-hf", "a/b"], "-hff: '../x.gguf' is not the path of a file in a repository"),
        (["-mu", "ftp://host/x.gguf"], "-mu must be a URL that begins with http:// or https://, not 'ftp://host/x.gguf'"),
        (["-m", "a/b"], "-m: there is no file a/b; -hf takes models of the Hugging Face Hub"),
        (["-dr", "a"], "-dr: Docker Hub is not supported"),
        (["-m", "a\udcffb"], "lone surrogate"),
        (["-r", ""], "-r is empty"),
    ],
)  # fmt: skip
def test_an_error_has_flag_value_and_way_out(words: list[str], message: str) -> None:
    """One line each."""
    assert message in refusal(*words)


def test_a_wrong_variable_is_refused_by_its_name() -> None:
    """The error has the variable's name, not the flag's."""
    assert refusal(env={"LLAMA_ARG_CTX_SIZE": "x"}).startswith("LLAMA_ARG_CTX_SIZE must be an integer")
    assert refusal(env={"LLAMA_ARG_CONTEXT_SHIFT": "on"}).startswith("LLAMA_ARG_CONTEXT_SHIFT on: ")
    assert refusal(env={"LLAMA_ARG_ENDPOINT_SLOTS": "yes"}).startswith("LLAMA_ARG_ENDPOINT_SLOTS must be on or off")


def test_a_strategy_in_a_file_may_be_a_table() -> None:
    """With its name and options in their types; as a text in the command line's form."""
    table = "[strategy]\nname = 'paced'\npatience = 4\nstretch = 1.5"
    found = config(table)
    assert found.settings.engine_options["strategy"] == {"name": "paced", "patience": 4, "stretch": 1.5}
    assert str(found.origins["engine.strategy"]) == "serve.toml: strategy"
    assert config("strategy = 'paced:patience=4'").settings.engine_options["strategy"] == "paced:patience=4"
    assert config(table, "--strategy", "balanced").settings.engine_options["strategy"] == "balanced"
    assert engine("--strategy", '{"name": "m:A", "size": "a,b"}')["strategy"] == {"name": "m:A", "size": "a,b"}


# ---- keys


@pytest.mark.parametrize("words", [["--api-key", ""], ["--api-key", ","], ["--api-key-file", "none"]])
def test_keys_that_are_none_do_not_open_the_server(words: list[str]) -> None:
    """An empty variable of a shell, or an empty file, is a mistake."""
    refusal(*words, files={"none": "# nothing\n"})


def test_keys_of_all_flags_add_up_once_each() -> None:
    """The flag, its file and the file of tenants."""
    found = resolved("--api-key", "a,three", "--api-key-file", "keys", "--tenant-key-file", "t", files={"t": "x:y"})
    assert [(key.secret, key.tenant) for key in found.settings.api_keys] == [
        ("a", ""), ("three", ""), ("one:two", ""), ("y", "x")
    ]  # fmt: skip


def test_a_key_of_two_tenants_is_refused() -> None:
    """A request's tenant would be ambiguous; the key itself is not shown."""
    message = refusal("--api-key", "hidden", "--tenant-key-file", "t", files={"t": "acme:hidden"})
    assert "two tenants" in message and "hidden" not in message


@pytest.mark.parametrize("line", ["key-alone", ":key", "tenant:", "tenant: "])
def test_a_line_of_the_tenants_file_without_both_is_refused_unseen(line: str) -> None:
    """The error has the line's number, not its text, which may be a key."""
    assert (
        refusal("--tenant-key-file", "t", files={"t": f"{line}\n"}) == "--tenant-key-file: key 1 of t is not TENANT:KEY"
    )


LIMITED = """
[[keys]]
key = "one"
tenant = "library"
name = "ci"
weight = 2
tokens_per_minute = 60_000
max_requests = 8
tokens_per_day = 2_000_000

[[keys]]
key = "two"
"""


def test_a_toml_file_has_limits_and_weights_of_keys() -> None:
    """A key without a tenant is the operator's. The ending of the file's name may be in capital letters."""
    found = resolved("--tenant-key-file", "t.TOML", files={"t.TOML": LIMITED})
    assert found.settings.api_keys == (
        ApiKey(
            secret="one",
            tenant="library",
            name="ci",
            weight=2.0,
            tokens_per_minute=60_000,
            max_requests=8,
            tokens_per_day=2_000_000,
        ),
        ApiKey(secret="two"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = hidden", "is not valid TOML"),
        ("[[keys]]\ntenant = 'a'", "missing required field `key`"),
        ("[[keys]]\nkey = 'hidden'\n[[keys]]\nkey = ''", "key 2 is empty"),
        ('[[keys]]\nkey = " \\t "', "key 1 is empty"),
        ("[[keys]]\nkey = 'hidden'\nweight = 0", "key 1: weight = 0: Expected"),
        ("[[keys]]\nkey = 'hidden'\ntokens = 1", "key 1: Object contains unknown field `tokens`; give each key"),
        ("[[keys]]\nkey = 'hidden'\nmax_requests = 0", "key 1: max_requests = 0: Expected `int` >= 1"),
        ("[[keys]]\nkey = 'hidden'\nmax_requests = 1" + "0" * 400, "max_requests = 1000"),
        ("[[keys]]\nkey = 'hidden'\nmax_requests = 1" + "0" * 5000, "is not valid TOML"),
        ("[[keys]]\nkey = ['hidden']", "key 1: Expected `str`"),
        ('[[keys]]\nkey = "hidden"\nname = "a\\nb"', "tenant or name of key 1 has characters"),
        ("[[keys]]\nkey = 'hidden'\nname = 'a'\n[[keys]]\nkey = 'x'\nname = 'a'", "2 keys have the name 'a'"),
        ("[[keys]]\nkey = 'hidden'\nname = 'key-2'\n[[keys]]\nkey = 'x'", "2 keys have the name 'key-2'"),
        ("[[keys]]\nkey = 'hidden'\n[[keys]]\nkey = 'hidden'\nname = 'x'", "with different names or limits"),
        ("[[keys]]\nkey = 'hidden'\n[[keys]]\nkey = 'hidden'\nmax_requests = 1", "given twice"),
        ("[[keys]]\nkey = 'hidden'\ntenant = 'a'\n[[keys]]\nkey = 'x'\ntenant = 'a'\nweight = 2", "one weight"),
        ("", "has no key"),
    ],
)
def test_a_wrong_toml_file_of_keys_is_refused_unseen(text: str, message: str) -> None:
    """The error names the field, and no key."""
    found = refusal("--tenant-key-file", "t.toml", files={"t.toml": text})
    assert message in found and "hidden" not in found


@pytest.mark.parametrize("secret", ["hidd\u00e9n", "hid\x07den", "hid\udcffden", "hid\nden", "hid" * 50_000])
def test_a_key_that_no_header_carries_is_refused_unseen(secret: str) -> None:
    """No header can carry it, or it is too long."""
    message = refusal("--api-key", secret)
    assert "hid" not in message and message.startswith("--api-key")


def test_secrets_are_in_no_representation() -> None:
    """Neither the result nor its origins and notes show them in their repr."""
    found = resolved("--api-key", "hidden-key", "-hft", "hidden-token", env={"HF_TOKEN": "hidden-other"})
    assert "hidden" not in repr(found)
    assert found.notes == ()


# ---- the rest


@pytest.mark.parametrize(
    ("words", "prints"),
    [(["--help"], "help"), (["-h"], "help"), (["--usage"], "help"), (["--version"], "version"),
     (["--print-config"], "config"), (["--print-config", "--help"], "help"), (["-m", "no", "--help"], "help")],
)  # fmt: skip
def test_flags_that_print_are_recognised(words: list[str], prints: str) -> None:
    """Help and version whatever else is wrong with values."""
    assert resolved(*words).prints == prints


def test_escapes_match_llama_server() -> None:
    """Unknown escapes and a backslash at the end stay."""
    assert unescaped(r"\n\r\t\'\"\\n\x41\q\x4") == "\n\r\t'\"\\nA\\q\\x4"
    assert unescaped("a\\") == "a\\"


HOSTILE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["", "-1", "0", "1", "nan", "1e400", "\0", "a,b", '"', "9" * 400, "on", "\ud800", "{", "=:", "m.gguf"]
    ),
)


def complaint(argv: list[str], env: dict[str, str], files: FakeFiles) -> str | None:
    try:
        resolve(argv, env, files)
    except InvalidParams as error:
        return str(error)
    return None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FLAGS), HOSTILE), max_size=4))
def test_hostile_values_give_settings_or_one_line(pairs: list[tuple[Any, str]]) -> None:
    """Any value of a flag either resolves or raises `InvalidParams`."""
    words = [word for flag, value in pairs for word in ([flag.names[-1], value] if flag.metavar else [flag.names[-1]])]
    message = complaint(words, {}, FakeFiles(FILES))
    assert message is None or (message and "\n" not in message)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(ENV_NAMES)), HOSTILE, max_size=4), st.binary(max_size=60))
def test_hostile_variables_and_files_give_settings_or_one_line(env: dict[str, str], data: bytes) -> None:
    """The same for the other two sources."""
    message = complaint([], {**env, "PACELINE_CONFIG": "serve.toml"}, FakeFiles({**FILES, "serve.toml": data}))
    assert message is None or (message and "\n" not in message)


def test_a_template_may_be_a_name_that_is_known() -> None:
    """As in llama-server; names that llama.cpp's Jinja does not know become their text."""
    assert resolved("--chat-template", "chatml").settings.chat_template == "chatml"
    for name in ("llama3", "command-r"):
        assert "{% for message in messages" in (resolved("--chat-template", name).settings.chat_template or "")


def test_a_model_may_be_given_by_its_name() -> None:
    """With -m, in a file too; the API's name of a repository is that of the repository, unless there is an alias."""
    found = config("model = 'hf:user/repo:Q4_0'\noffline = true").settings
    assert found.model == Path("cache/user/repo:Q4_0/None/True/no token")
    assert found.aliases == ("user/repo:Q4_0",)
    assert resolved("-m", "ollama:llama3.2").settings.model == Path("cache/ollama:llama3.2/None/False/no token")
    assert resolved("-hf", "user/repo", "--alias", "mine").settings.aliases == ("mine",)
    assert resolved("-mu", "http://host/x.gguf").settings.aliases == ()


@pytest.mark.parametrize(
    "words",
    [
        ["--isolation", "thread", "--max-restarts", "3"],
        ["--isolation", "thread", "--sleep-idle-seconds", "5"],
        ["--ssl-key-file", "k.pem"],
        ["--host", "127.0.0.1,::1", "--port", "0"],
        ["--max-total-body-bytes", "9"],
        ["--lora", "a.gguf", "--lora", "a.gguf", "--lora", "x/a-2.gguf"],
        ["--temp", "nan"],
        ["-mu", "http://host/x.gguf"],
        ["-hff", "../x.gguf"],
        ["--fit-ctx", "512", "--fit", "off", "-m", "m.gguf"],
    ],
)
def test_nothing_is_downloaded_for_flags_that_are_wrong(words: list[str]) -> None:
    """A model of 40 GB is no price for a spelling; the conflicts of flags are looked for first."""

    class NoDownload(FakeFiles):
        def download(self, model: ModelReference, *_: Any, **__: Any) -> Any:
            raise AssertionError(f"{model} is downloaded")

    files = NoDownload({**FILES, "x/a-2.gguf": ""})
    assert complaint(["-hf", "user/repo", *words], {}, files)
    with pytest.raises(AssertionError, match="is downloaded"):
        resolve(["-hf", "user/repo"], {}, files)


def test_an_interrupted_download_says_that_it_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the server starts."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.server.flags.setters.local_model", interrupted)
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        resolve(["-hf", "user/repo"], {}, DiskFiles(notes.append))
    assert notes == ["the download was stopped; the next start continues it"]


def test_printing_the_settings_downloads_nothing() -> None:
    """A note says that it happens later; -c 0 is left until then."""
    found = resolved("--print-config", "-hf", "user/repo", "-c", "0")
    assert found.settings.model is None
    assert any("-hf user/repo is looked for" in note for note in found.notes)


def test_paths_stay_as_they_were_given() -> None:
    """Relative paths are relative to the server's folder, not to the file that names them."""
    assert config("model = 'm.gguf'").settings.model == Path("m.gguf")


def test_another_kind_of_drafts_is_refused_with_those_that_are_there() -> None:
    """N-grams with several followers."""
    assert "--spec-type ngram-simple, ngram-map-k, draft-simple" in refusal("--spec-type", "ngram-map-k4v")


@pytest.mark.parametrize(
    "words",
    [
        "--spec-type ngram-mod",
        "--spec-type ngram-cache",
        "--spec-ngram-mod-n-max 8",
        "-lcs a",
        "-lcd a",
    ],
)
def test_n_grams_of_all_requests_are_refused_with_the_drafter_that_is_there(words: str) -> None:
    """By whatever flag of llama-server they are asked for."""
    assert refusal(*words.split()).endswith("or give --spec-type ngram-simple")


@pytest.mark.parametrize(
    ("words", "speculation"),
    [
        ("--spec-type ngram-simple", {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 1}),
        (
            "--spec-type ngram-map-k --spec-ngram-map-k-size-n 3 --spec-ngram-map-k-min-hits 2",
            {"name": "ngram", "size_n": 3, "size_m": 48, "min_hits": 2},
        ),
        ("--spec-type draft-mtp", {"name": "mtp"}),
        ("--speculation mtp:p_min=0.5", "mtp:p_min=0.5"),
        ("--speculation ngram,eagle3:model=e.gguf,p_min=0.1", "ngram,eagle3:model=e.gguf,p_min=0.1"),
        ("--speculation ngram:size_n=3,size_m=9,mtp", "ngram:size_n=3,size_m=9,mtp"),
        (
            "--spec-type draft-mtp,ngram-map-k --spec-ngram-map-k-size-n 3",
            [{"name": "ngram", "size_n": 3, "size_m": 48, "min_hits": 1}, {"name": "mtp"}],
        ),
    ],
)
def test_llama_servers_kinds_of_drafts_have_its_sizes(words: str, speculation: object) -> None:
    """As its flags say, or its defaults; and each is a drafter."""
    found = resolved(*words.split()).settings.engine_options["speculation"]
    assert found == speculation
    assert resolve_drafter(found) is not None


def test_names_that_are_no_kind_of_drafts_are_refused() -> None:
    """So are sizes out of range, and drafters by two flags."""
    assert "ngram-simple" in refusal("--spec-type", "ngram")
    assert "--spec-type" in refusal("--spec-type", "ngram-simple,ngram-map-k4v")
    assert "ngram-modd" in refusal("--speculation", "ngram,ngram-modd")
    assert "size_n" in refusal("--speculation", "ngram:size_n=99")
    assert "--spec-draft-n-max" in refusal("--spec-draft-n-max", "65")
    assert "min_draft" in refusal("--spec-draft-n-max", "4", "--spec-draft-n-min", "5")
    assert "both name drafters" in refusal("--spec-type", "ngram-simple", "--speculation", "ngram")
    assert "both name drafters" in refusal("--spec-default", "--speculation", "ngram")
    assert "ngram-simple" in refusal("--spec-type", "ngram-map-k,ngram-mod")


def test_a_draft_model_with_its_options_is_used_where_no_other_drafter_is_named() -> None:
    """As in llama-server; beside others draft-simple names it, and --speculation its own name."""
    found = resolved("-md", "m.gguf", "-ctkd", "q8_0", "-td", "2", "--spec-draft-p-min", "0.5").settings.engine_options
    assert found["draft_model"] == "m.gguf"
    assert found["draft_options"] == {"p_min": 0.5, "n_threads": 2, "type_k": "q8_0"}
    assert found["speculation"] == {"name": "draft-model"}
    both = resolved("-md", "m.gguf", "--spec-type", "draft-simple,ngram-simple").settings.engine_options
    ngrams = {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 1}
    assert both["speculation"] == [ngrams, {"name": "draft-model"}]
    own = resolved("-md", "m.gguf", "--speculation", "ngram,draft-model").settings.engine_options
    assert (own["speculation"], own["draft_model"]) == ("ngram,draft-model", "m.gguf")
    assert not any("no effect" in note for note in resolved("-md", "m.gguf", "--spec-draft-n-max", "8").notes)
    hub = resolved("-hfd", "u/d:Q8_0").settings.engine_options
    assert "u/d:Q8_0" in hub["draft_model"]


def test_heads_take_their_file_and_bound_from_the_flags_of_draft_models() -> None:
    """An EAGLE-3 file always, next-token-prediction heads if they are not in the model's."""
    found = resolved("--spec-type", "draft-eagle3", "-md", "m.gguf", "--spec-draft-p-min", "0.5")
    assert found.settings.engine_options["speculation"] == {"name": "eagle3", "model": "m.gguf", "p_min": 0.5}
    assert "draft_model" not in found.settings.engine_options
    for name in ("draft-dflash", "draft-dspark"):
        blocks = resolved("--spec-type", name, "-md", "m.gguf").settings.engine_options
        assert blocks["speculation"] == {"name": "dflash", "model": "m.gguf"}
        assert f"{name} needs its file; give -md" in refusal("--spec-type", name)
    both = resolved("--spec-type", "draft-mtp,ngram-simple", "-ngld", "3")
    ngrams = {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 1}
    assert both.settings.engine_options["speculation"] == [ngrams, {"name": "mtp"}]
    assert any("-ngld has no effect with draft-mtp" in note for note in both.notes)
    assert "needs its file; give -md" in refusal("--spec-type", "draft-eagle3")
    assert "-md" in refusal("--spec-type", "draft-eagle3", "-hfd", "u/d")
    assert "one of them" in refusal("--spec-type", "draft-mtp,draft-eagle3", "-md", "m.gguf")
    assert "one of them" in refusal("--spec-type", "draft-mtp,draft-simple", "-md", "m.gguf")
    assert "there is no file" in refusal("--spec-type", "draft-eagle3", "-md", "missing.gguf")


def test_a_draft_model_that_is_not_used_or_not_there_is_said() -> None:
    """Options without a model have no effect; a kind of drafts without its model is an error."""
    unused = resolved("-md", "m.gguf", "--spec-type", "ngram-simple")
    assert "-md has no effect without draft-simple in --spec-type" in unused.notes
    assert "draft_model" not in unused.settings.engine_options
    assert "-ngld has no effect without -md or -hfd, a draft model" in resolved("-ngld", "3").notes
    assert "needs a draft model; give -md or -hfd" in refusal("--spec-type", "draft-simple")
    assert "there is no file" in refusal("-md", "missing.gguf")
    assert "two draft models" in refusal("-md", "m.gguf", "-hfd", "u/d")
    assert "draft-model: add it there" in refusal("-md", "m.gguf", "--speculation", "ngram")
    assert "--spec-draft-p-min" in refusal("--spec-draft-p-min", "2")


def test_sizes_without_their_drafter_get_a_note() -> None:
    """They change nothing."""
    found = resolved("--spec-ngram-simple-size-n", "4")
    assert "without --spec-type ngram-simple" in found.notes[0]
    assert found.settings == resolved().settings
    other = resolved("--spec-ngram-map-k-size-n", "4", "--spec-type", "ngram-simple")
    assert "--spec-ngram-map-k-size-n has no effect without --spec-type ngram-map-k" in other.notes


def test_bounds_of_drafts_without_a_drafter_get_a_note() -> None:
    """Whoever makes the drafts, they count."""
    words = ("--spec-draft-n-max", "8", "--spec-draft-n-min", "2")
    without = "has no effect without --spec-type or --speculation"
    assert resolved(*words).notes[:2] == (f"--spec-draft-n-max {without}", f"--spec-draft-n-min {without}")
    for drafter in (("--speculation", "ngram"), ("--spec-type", "ngram-simple")):
        assert not any("no effect" in note for note in resolved(*words, *drafter).notes)


def test_none_takes_back_what_came_before() -> None:
    """The command line comes after the environment."""
    found = resolved("--spec-type", "none", env={"LLAMA_ARG_SPEC_TYPE": "ngram-simple"})
    assert "speculation" not in found.settings.engine_options


@pytest.mark.parametrize(
    ("speculation", "names"),
    [
        (None, "none"),
        ("ngram:size_n=3,size_m=4", "ngram-simple"),
        (["mtp", "my.module:Drafter"], "draft-mtp,my.module:Drafter"),
        (NgramDrafter(), "NgramDrafter"),
    ],
)
def test_drafters_go_by_llama_servers_names(speculation: object, names: str) -> None:
    """If it has one, in the routes' responses."""
    assert spec_type_names(speculation) == names


def test_the_projector_of_a_repository_comes_with_its_model() -> None:
    """Unless another one is given, or none is wanted."""
    found = resolved("-hf", "user/seeing")
    assert found.settings.engine_options["mmproj"] == "mmproj-seeing.gguf"
    assert "user/seeing" in str(found.origins["engine.mmproj"])
    assert resolved("-hf", "user/seeing", "-mm", "a.gguf").settings.engine_options["mmproj"] == "a.gguf"
    assert resolved("-hf", "user/seeing", "--no-mmproj").settings.engine_options["mmproj"] is False
    assert "mmproj" not in resolved("-hf", "user/repo").settings.engine_options


def test_projectors_that_cannot_be_are_refused() -> None:
    """Two of them, and a file that is not there; --no-mmproj wins, with a note."""
    assert "name two projectors" in refusal("-mm", "a.gguf", "-mmu", "https://x.example/m.gguf")
    assert "there is no file b.gguf" in refusal("-mm", "b.gguf")
    assert "must be a URL" in refusal("-mmu", "a.gguf")
    found = resolved("-mm", "a.gguf", "--no-mmproj")
    assert found.settings.engine_options["mmproj"] is False
    assert found.notes == ("-mm has no effect with --no-mmproj",)


@pytest.mark.parametrize("name", ["https://a.example", "a.example:80", "*", "a b"])
def test_domains_of_media_are_names(name: str) -> None:
    """Without scheme and port; there is no way to allow all."""
    assert "must be names such as images.example.org" in refusal("--media-domains", name)
