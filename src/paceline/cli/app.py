"""The commands in one application, and how each of them reports an error: one line on stderr and an exit code.

The compiled core and NumPy are loaded by the commands that need
them, so `--help` and `--version` are quick.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import validation
from paceline.cli import terminal
from paceline.cli.batch_command import batch_commands
from paceline.cli.bench import bench
from paceline.cli.cache_commands import cache_commands
from paceline.cli.chat_command import chat
from paceline.cli.config_file import CONFIG_VARIABLE, known_names, option_values, read_config
from paceline.cli.demo import demo
from paceline.cli.endings import FAILED, report
from paceline.cli.inputs import usual_name
from paceline.cli.launch import launch
from paceline.cli.machines import cluster_commands, rpc_serve
from paceline.cli.model_commands import info, list_models, prune, pull, quantize, rm, show
from paceline.cli.options import model_names
from paceline.cli.perplexity import perplexity
from paceline.cli.serve import run_server
from paceline.cli.texts import embed, generate, tokenize
from paceline.cli.watch import ps, top, trace_commands
from paceline.errors import InvalidParams, PacelineError
from paceline.sampling_table import LLAMA_NAMES

_START: Final = """\
Start here:

  paceline demo                     see how several requests share one engine
  paceline run MODEL                chat with a model, downloaded if need be
  paceline run MODEL "A question?"  get one answer
  paceline serve -m MODEL           serve OpenAI's API on http://127.0.0.1:8080
  paceline --help                   list all commands

MODEL is a GGUF file or a name such as ggml-org/gemma-3-1b-it-GGUF.
"""
_DELETING: Final = ("rm", "prune")  # never suggested
_MIN_SIMILARITY: Final = 0.66  # "ls" and "list" have 0.67, "pul" and "prune" 0.5
_COMMANDS_ELSEWHERE: Final = {  # of Ollama and llama.cpp: the same command here, or a sentence about it
    "cp": "a model is a file: copy the file, or name it in PACELINE_MODEL or the config file",
    "create": "options take the place of a Modelfile, as flags or in the config file",
    "llama-bench": "bench",
    "llama-cli": "run",
    "llama-perplexity": "perplexity",
    "llama-quantize": "quantize",
    "llama-server": "serve",
    "login": "set HF_TOKEN, or run `hf auth login`, for gated models of the Hugging Face Hub",
    "push": "paceline uploads no models; `hf upload` does",
    "signin": "no account is needed; HF_TOKEN is for gated models of the Hugging Face Hub",
    "stop": "a model is unloaded when its command ends: press Ctrl-C there; `paceline ps` lists the servers",
    "version": "`paceline --version` prints the version",
}
_OPTIONS_ELSEWHERE: Final = {  # of Ollama and llama-cli: the same option here, or a sentence about it
    "--conversation": "leave it out: `paceline chat` is a conversation unless it gets a message",
    "--display-prompt": "--echo",
    "--escape": "write escapes for the shell, as in $'one\\ntwo'",
    "--format": 'use --json-schema; \'{"type": "object"}\' allows any JSON object, as --format json does',
    "--hf-file": "name the model hf:USER/REPO/FILE.gguf",
    "--hf-repo": "name the model hf:USER/REPO[:QUANT]",
    "--interactive": "leave it out: `paceline chat` is a conversation unless it gets a message",
    "--jinja": "leave it out: a chat uses the model's own template",
    "--keepalive": "leave it out: the model is in memory until the command ends",
    "--model-url": "name the model by its URL",
    "--multiline-input": 'leave it out: """ begins and ends a message of several lines',
    "--num-ctx": "--ctx-size",
    "--no-conversation": "`paceline generate` continues a text without a chat template",
    "--no-display-prompt": "--no-echo",
    "--nowordwrap": "use a pipe: lines are wrapped on a terminal alone",
    "--reasoning": "--reasoning-effort",
    "--reasoning-budget": "use --reasoning-effort none to switch thinking off, if the model's template can",
    "--single-turn": "leave it out: a message as the argument gets one reply",
    "--system-prompt": "--system",
    "--system-prompt-file": 'use --system "$(cat FILE)"',
    "--think": "use --reasoning-effort, with none, low, medium or high; none is --think=false",
    "--flash-attn": "leave it out: flash attention is used if the model and the device can",
    "-cnv": "leave it out: `paceline chat` is a conversation unless it gets a message",
    "-fa": "leave it out: flash attention is used if the model and the device can",
    "-hf": "name the model hf:USER/REPO[:QUANT]",
    "-i": "leave it out: `paceline chat` is a conversation unless it gets a message",
    "-mu": "name the model by its URL",
    "-no-cnv": "`paceline generate` continues a text without a chat template",
    "-st": "leave it out: a message as the argument gets one reply",
    "-sys": "--system",
}
_IF_MISSING: Final = {  # commands without their first argument
    "run": "; `paceline chat` uses the demo model",
    "launch": "; `paceline launch --help` lists the agents",
    "quantize": "; name a GGUF file and a type, as in `paceline quantize model-F16.gguf Q4_K_M`",
    "pull": "; name one such as ggml-org/gemma-3-1b-it-GGUF",
    "show": "; `paceline list` has the names of the models on this machine",
    "rm": "; `paceline list` has the names of the models on this machine",
}
_SHORT_NAME: Final = re.compile(r"-[a-z][a-z-]+")
_HYPHEN: Final = "\N{NON-BREAKING HYPHEN}"


class CommandGroup(TyperGroup):
    """The group of all commands; reports an error as one line and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in _commands_in(self):
            _lay_out(command, is_rich=self.rich_markup_mode is not None)

    def invoke(self, ctx: Any) -> Any:
        """Run one command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, PacelineError, OSError) as error:
            raise typer.Exit(report(error) or FAILED) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `help COMMAND` is `COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. For an unknown name, suggest the nearest commands, up to the first that deletes."""
        name = args[0]
        if name in _COMMANDS_ELSEWHERE:
            ctx.fail(f"No such command {name!r}. {_hint(_COMMANDS_ELSEWHERE[name], self.commands)}")
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            near = [known for known in self.commands if known.startswith(name) and known not in _DELETING]
            if not near:
                nearest = validation.nearest_names(name, self.commands, 3, _MIN_SIMILARITY)
                near = list(itertools.takewhile(lambda known: known not in _DELETING, nearest))
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their groups, without cutting a line."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            groups.setdefault(command.rich_help_panel or "Commands", []).append((name, command.short_help))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _hint(text: str, known: Collection[str]) -> str:
    """Return the sentence that suggests a known name, or the text as a sentence."""
    if text in known:
        return f"Did you mean {text!r}?"
    return f"{text[0].upper()}{text[1:]}."


def _commands_in(group: TyperGroup) -> Iterator[Any]:
    yield group
    for command in group.commands.values():
        if isinstance(command, TyperGroup):
            yield from _commands_in(command)
        else:
            yield command


def _lay_out(command: Any, *, is_rich: bool) -> None:
    """Join the lines of each paragraph of the help, and take the first sentence as the short help.

    is_rich: whether rich will read the text as markup, so that brackets are escaped.
    """

    def shown(text: str) -> str:
        if not is_rich:
            return text
        from rich.markup import escape

        return escape(text)

    paragraphs = [" ".join(text.split()) for text in cleandoc(command.help or "").split("\n\n")]
    command.help = shown("\n\n".join(paragraphs))
    command.short_help = shown(re.split(r"(?<=\.)\s", paragraphs[0])[0])
    for parameter in command.params:
        parameter.help = shown(parameter.help or "")

    def get_help_option(ctx: Any) -> Any:
        for parameter in command.params:  # now: Typer adds the options of completion late
            _hide_type(parameter)
        return _hide_type(type(command).get_help_option(command, ctx))

    command.get_help_option = get_help_option
    if not is_rich:
        command.get_help = lambda ctx: _plain_help(command, ctx)


def _plain_help(command: Any, ctx: Any) -> str:
    """Return the help with words such as "llama-server" on one line each, which the formatter breaks at hyphens."""
    formatter = ctx.make_formatter()
    write_rows, write_text = formatter.write_dl, formatter.write_text
    formatter.write_dl = lambda rows: write_rows([(name, text.replace("-", _HYPHEN)) for name, text in rows])
    formatter.write_text = lambda text: write_text(text.replace("-", _HYPHEN))
    command.format_help(ctx, formatter)
    return str(formatter.getvalue()).replace(_HYPHEN, "-").rstrip("\n")


def _hide_type(parameter: Any) -> Any:
    """Keep "<bool>" and "<str>" out of the help of switches and arguments, and return the parameter."""
    if parameter is not None and (parameter.param_type_name == "argument" or parameter.is_flag):
        parameter.display_type_rich = lambda ctx: None  # noqa: ARG005 - called by keyword
    return parameter


class HintedCommand(TyperCommand):
    """A command with errors about options and missing arguments that name the way out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        for word in itertools.takewhile(lambda word: word != "--", args):
            # Typer reads -hf as -h -f, and -np as -n with the value p
            if _SHORT_NAME.fullmatch(word) and word not in self._names() and self._is_elsewhere(word):
                ctx.fail(self._no_such_option(word))
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            refused: Any = error  # of a private class of Typer's, which older versions have from another package
            if hasattr(refused, "possibilities"):
                ctx.fail(self._no_such_option(refused.option_name))
            if hasattr(refused, "param_type"):
                ctx.fail(f"{refused.param.metavar} is missing{_IF_MISSING.get(str(self.name), '')}")
            raise

    def _names(self) -> list[str]:
        return [name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)]

    def _is_elsewhere(self, option: str) -> bool:
        from paceline.server.flags.table import BY_NAME

        return option in _OPTIONS_ELSEWHERE or option in BY_NAME

    def _has_flag_of(self, hint: str) -> bool:
        """Return whether the command has the first flag that a hint names, or whether the hint names none."""
        flag = re.search(r"--[a-z-]+", hint)
        return flag is None or flag[0] in self._names()

    def _no_such_option(self, given: str) -> str:
        known, option = self._names(), given.replace("_", "-")
        if option in ("-m", "--model") and "model" in known:
            hint = f"MODEL is an argument: paceline {self.name} MODEL"
        elif option in _OPTIONS_ELSEWHERE:
            hint = _OPTIONS_ELSEWHERE[option]
            if not self._has_flag_of(hint):
                hint = f"`paceline {self.name} --help` lists the options"
        elif self._is_elsewhere(option):
            hint = "it is a flag of `paceline serve`"
        else:
            names = [name for name in known if name.startswith("-")]
            names += [f"--{name}" for name, usual in LLAMA_NAMES.items() if f"--{usual}" in known]
            known = validation.nearest_names(option, names)
            hint = known[0] if known else f"`paceline {self.name} --help` lists the options"
        return f"No such option {given!r}. {_hint(hint, known)}"


class RawCommand(TyperCommand):
    """A command that receives its arguments unparsed, --help included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave all arguments to the command."""
        ctx.args = list(args)
        return list(args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line of errors; the command writes its own help."""
        formatter.write_usage(ctx.command_path, "[FLAG [VALUE]]...")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the long names of the flags of `serve`, or values of a flag: names of models, or of a fixed choice."""
        from paceline.server.flags.table import BY_NAME, SWITCH

        name, equals, value = incomplete.partition("=")
        asked = name if equals else ctx.args[-1] if ctx.args else ""
        flag, is_true = BY_NAME.get(asked, (None, True))
        if flag is not None and is_true and flag.metavar not in ("", SWITCH):
            word = value if equals else incomplete
            choice = flag.metavar.split("|") if "|" in flag.metavar else []  # a file completes other values
            names = model_names(word) if flag.long_name == "--model" else choice
            return [ShellWord(each) for each in names if each.startswith(word)]
        return [
            ShellWord(each, flag.text)
            for each, (flag, _) in BY_NAME.items()
            if each.startswith("--") and each.startswith(incomplete)
        ]


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word that a shell may complete to, as Typer's classes for shells read it."""

    value: str
    help: str | None = None
    type: str = "plain"


def complete_in_bash() -> NoReturn:
    """Write completions for the words that bash passes, and end the process.

    Bash breaks words at ":" and "=", and replaces the text after the last of them alone: "hf:user/repo" are three words.
    """
    words, current = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    joined: list[str] = []
    for index, word in enumerate(words[: current + 1]):
        is_part = word in (":", "=") or (index > 1 and words[index - 1] in (":", "="))
        if is_part and joined:
            joined[-1] += word
        else:
            joined.append(word)
    os.environ["COMP_WORDS"] = shlex.join(joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)
    typed = joined[-1].rpartition("=")[2]
    kept = len(typed) - len(typed.rpartition(":")[2])
    found = io.StringIO()
    with redirect_stdout(found), suppress(SystemExit):
        build_app()(prog_name="paceline")
    for line in found.getvalue().splitlines():
        terminal.write(line[kept:] + "\n")
    sys.exit()


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and of llama-server. Takes llama-server's flags."""
    raise typer.Exit(run_server(ctx.args, names_beside_serve))


# Options are laid out by hand, a few lines each.
# fmt: off
RunModel = Annotated[str, typer.Argument(
    metavar="MODEL", autocompletion=model_names,
    help="GGUF file, of a split set its first part; or USER/REPO[:QUANT] on the Hugging Face Hub, a URL, ollama:NAME.",
)]
RunPrompt = Annotated[list[str] | None, typer.Argument(
    metavar="PROMPT", help="One message, whose reply ends the command. Without it, a chat.", show_default=False,
)]
# fmt: on


def run(model: str, prompt: list[str] | None = None, **options: Any) -> None:
    """Chat with a model, or get one answer. A model that is not on this machine is downloaded first.

    The words of PROMPT are joined by spaces. The options are those of `paceline chat`.
    """
    chat(prompt, model=_with_scheme(model), **options)


def _with_scheme(model: str) -> str:
    """Return a model's path or name, with "hf:" before the name of a repository of the hub."""
    from paceline.hub import is_reference, parse_hub_reference

    if is_reference(model) or model.endswith(".gguf") or Path(model).exists():
        return model
    try:
        return f"hf:{parse_hub_reference(model)}"
    except InvalidParams:
        return model  # a path, for which loading reports the error


def _use_config(ctx: typer.Context, named: Path | None) -> None:
    """Take the command's values of the config file as defaults, and keep the file in the context for `info`."""
    if ctx.resilient_parsing:  # for completion
        return
    ctx.obj = config = read_config(named)
    if config is not None:
        group: Any = ctx.find_root().command
        ctx.default_map = option_values(config, str(ctx.info_name), group.commands)


# The parameters of `run` are those of `chat`, with arguments in place of its message and model.
_OF_CHAT = signature(chat, eval_str=True).parameters
run.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=RunModel),
        Parameter("prompt", Parameter.POSITIONAL_OR_KEYWORD, annotation=RunPrompt, default=None),
        *(_OF_CHAT[name] for name in _OF_CHAT if name not in ("message", "model")),
    ]
)


ConfigOption = Annotated[Path | None, typer.Option(
    "--config", metavar="FILE", envvar=CONFIG_VARIABLE, show_envvar=False, help="Read options from this config file.",
    show_default="~/.config/paceline/config.toml", callback=_use_config, expose_value=False, is_eager=True,
)]  # fmt: skip


def _with_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with the option --config, which names a file with defaults of the other options."""
    own = signature(command, eval_str=True)
    config = Parameter("config", Parameter.KEYWORD_ONLY, annotation=ConfigOption, default=None)

    @functools.wraps(command)
    def configured(*, config: Path | None = None, **options: Any) -> Any:  # noqa: ARG001 - its callback uses it
        return command(**options)

    configured.__signature__ = own.replace(parameters=[*own.parameters.values(), config])  # type: ignore[attr-defined]
    return configured


def build_app(*, rich_help: bool = False) -> typer.Typer:
    """Build the application. rich_help: help and usage errors in colours and boxes, for terminals; else plain text."""
    app = typer.Typer(
        cls=CommandGroup,
        help="Runs GGUF models on llama.cpp. Without a model, the small demo model of the package is used.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the output's reader went away.",
        invoke_without_command=True,
        rich_markup_mode="rich" if rich_help else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": usual_name},
    )
    app.callback()(_common)
    groups: dict[str, dict[str, Callable[..., Any] | typer.Typer]] = {
        "Everyday": {
            "run": run,
            "chat": chat,
            "generate": generate,
            "serve": serve,
            "batch": batch_commands,
            "launch": launch,
            "demo": demo,
        },
        "Models on this machine": {
            "pull": pull,
            "list": list_models,
            "show": show,
            "rm": rm,
            "prune": prune,
            "quantize": quantize,
            "cache": cache_commands,
        },
        "Watching an engine": {
            "ps": ps,
            "top": top,
            "bench": bench,
            "perplexity": perplexity,
            "trace": trace_commands,
            "info": info,
        },
        "Tokens and vectors": {"tokenize": tokenize, "embed": embed},
        "Several machines": {"rpc-serve": rpc_serve, "cluster": cluster_commands},
    }
    for heading, commands in groups.items():
        for name, command in commands.items():
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=heading)
                continue
            kind, configured = (RawCommand, command) if command is serve else (HintedCommand, _with_config(command))
            app.command(name, cls=kind, rich_help_panel=heading)(configured)
    return app


def names_beside_serve() -> set[str]:
    """Return the names on the top level of a config file that are for commands other than `serve`."""
    from typer.main import get_command

    group: Any = get_command(build_app())
    return known_names(group.commands)


def _print_version(is_given: bool) -> None:
    if is_given:
        from paceline import __version__

        terminal.write(f"paceline {__version__}\n")
        raise typer.Exit


def _common(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Write how to start if no command is named."""
    if ctx.invoked_subcommand is None:
        terminal.write(_START)
