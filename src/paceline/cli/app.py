"""The commands in one application, and how each of them reports an error: one line on stderr and an exit code.

The compiled core and NumPy are loaded by the commands that need
them, so `--help` and `--version` are quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli import cluster_commands, terminal, trace
from paceline.cli.chat_command import chat
from paceline.cli.demo import demo
from paceline.cli.embed import embed
from paceline.cli.exit_codes import FAILED, report
from paceline.cli.generate import generate
from paceline.cli.info import info
from paceline.cli.launch import launch
from paceline.cli.model_commands import list_models, prune, pull, rm, show
from paceline.cli.options import stdin_is_redirected
from paceline.cli.rpc_serve import rpc_serve
from paceline.cli.serve import run_server
from paceline.cli.tokenize import tokenize
from paceline.cli.top import top
from paceline.errors import PacelineError


class CommandGroup(TyperGroup):
    """The group of all commands; reports an error as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run one command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, PacelineError, OSError) as error:
            raise typer.Exit(report(error) or FAILED) from None


class TextCommand(TyperCommand):
    """A command whose text may come from stdin; without arguments it shows its help unless stdin is redirected."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, or show the help."""
        self.no_args_is_help = not stdin_is_redirected()
        return super().parse_args(ctx, args)


class RawCommand(TyperCommand):
    """A command that receives its arguments unparsed, --help included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave all arguments to the command."""
        ctx.args = list(args)
        return list(args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line of errors; the command writes its own help."""
        formatter.write_usage(ctx.command_path, "[FLAG [VALUE]]...")


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and of llama-server. Takes llama-server's flags."""
    raise typer.Exit(run_server(ctx.args))


def build_app(*, rich_help: bool = False) -> typer.Typer:
    """Build the application. rich_help: help and usage errors in colours and boxes, for terminals; else plain text."""
    app = typer.Typer(
        cls=CommandGroup,
        help="Runs GGUF models on llama.cpp. Without -m, the small demo model of the package is used.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the output's reader went away.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich" if rich_help else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for command in (demo, chat, generate, tokenize, embed, info):
        app.command(cls=TextCommand if command in (generate, tokenize, embed) else None)(command)
    for about_a_model in (pull, show, rm):
        app.command(no_args_is_help=True)(about_a_model)
    app.command(name="list")(list_models)
    app.command()(prune)
    app.command(cls=RawCommand)(serve)
    app.command(name="rpc-serve")(rpc_serve)
    app.command(no_args_is_help=True)(launch)
    app.command()(top)
    app.add_typer(trace.commands, name="trace")
    app.add_typer(cluster_commands.commands, name="cluster")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        terminal.write(f"paceline {__version__}\n")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
