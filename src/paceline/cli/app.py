"""The commands in one application, and how each of them reports an error: one line on stderr and an exit code.

The compiled core and NumPy are loaded by the commands that need
them, so `--help` and `--version` are quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import terminal, trace
from paceline.cli.chat_command import chat
from paceline.cli.demo import demo
from paceline.cli.embed import embed
from paceline.cli.generate import generate
from paceline.cli.info import info
from paceline.cli.model_commands import list_models, prune, pull, rm, show
from paceline.cli.serve import RawCommand, serve
from paceline.cli.tokenize import tokenize
from paceline.errors import InvalidParams, PacelineError

FAILED, WRONG_USAGE, INTERRUPTED, READER_GONE = 1, 2, 130, 141


class CommandGroup(TyperGroup):
    """The group of all commands; reports an error as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run one command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except PacelineError as error:
            terminal.report(str(error))
            raise typer.Exit(WRONG_USAGE if isinstance(error, InvalidParams) else FAILED) from None
        except BrokenPipeError:
            terminal.abandon_output()
            raise typer.Exit(READER_GONE) from None
        except OSError as error:
            terminal.abandon_output()
            place = f"{error.filename}" if error.filename else "cannot write to stdout"
            terminal.report(f"{place}: {error.strerror or error}")
            raise typer.Exit(FAILED) from None


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
        app.command(no_args_is_help=command not in (demo, chat, info))(command)
    for about_a_model in (pull, show, rm):
        app.command(no_args_is_help=True)(about_a_model)
    app.command(name="list")(list_models)
    app.command()(prune)
    app.command(cls=RawCommand)(serve)
    app.add_typer(trace.commands, name="trace")
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
