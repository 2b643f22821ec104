"""`paceline serve`: a model over HTTP. Its flags are llama-server's and do not fit a usual parser: see paceline.server.flags."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from paceline.cli import server_log, terminal

if TYPE_CHECKING:
    from paceline.server.flags.showing import Section

_WIDEST = 120  # columns of help: longer lines are hard to follow


class RawCommand(TyperCommand):
    """A command that gets its arguments as they were written, --help among them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leaves all of them to the command."""
        ctx.args = list(args)
        return list(args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """For errors; the command writes its own help."""
        formatter.write_usage(ctx.command_path, "[FLAG [VALUE]]...")


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and of llama-server. Takes llama-server's flags."""
    from paceline.server.flags import Disk, resolve
    from paceline.server.flags.showing import config_sections, help_sections

    resolved = resolve(ctx.args, os.environ, Disk())
    match resolved.prints:
        case "help":
            _write(help_sections(min(shutil.get_terminal_size().columns, _WIDEST)))
        case "version":
            from paceline import __version__

            terminal.write(f"paceline {__version__}\n")
        case "config":
            _write(config_sections(resolved))
        case None:
            for note in resolved.notes:
                terminal.note(f"Note: {note}")
            server_log.set_up(resolved.settings)
            from paceline.server.serving import serve as run

            raise typer.Exit(run(resolved.settings))


def _write(sections: Iterable[Section]) -> None:
    for index, section in enumerate(sections):
        terminal.write("\n" * (index > 0) + section.title + "\n", style="bold")
        terminal.write("".join(f"{line}\n" for line in section.lines))
