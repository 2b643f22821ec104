"""`paceline trace show`: a summary of a recorded trace, its picture, and its timeline as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import terminal

if TYPE_CHECKING:
    from paceline.cli.trace_summary import TraceSummary

commands = typer.Typer(no_args_is_help=True, help="Look at traces: what an engine did, tick by tick.")


@commands.callback()
def _trace() -> None:
    pass


@commands.command(no_args_is_help=True)
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace, one JSON object a line.", show_default=False)],
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write a picture (SVG) there.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a timeline to move about in there, as one HTML file.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[int, typer.Option(min=400, max=20_000, help="Of the picture, in pixels.")] = 1200,
) -> None:
    """Summarize a trace, and draw it: slots over time, ticks as columns."""
    from paceline.cli.trace_picture import draw
    from paceline.cli.trace_summary import summarize
    from paceline.observability.trace_file import read_trace

    trace = read_trace(file)
    if output is not None:
        output.write_text(draw(trace, width=width, title=_title(file)), encoding="utf-8")
    if html is not None:
        from paceline.cli.trace_viewer import viewer_html

        html.write_text(viewer_html(_viewer(), trace, title=_title(file)), encoding="utf-8")
    if trace.is_truncated:
        terminal.note(f"{file} ends within a line, which was left out")
    terminal.write_section(_title(file), _rows(summarize(trace)))


def _viewer() -> str:
    """Return the trace viewer of the built page. Raises `Unsupported` where the page was not built."""
    from paceline.errors import Unsupported
    from paceline.server.web_page import TRACE_VIEWER, built_folder

    path = built_folder() / TRACE_VIEWER
    if not path.is_file():
        raise Unsupported(
            "--html needs the trace viewer, which was not built into this installation: it is built with the web page "
            "where Node.js is installed (PACELINE_WEBUI=ON); --output writes a picture without it"
        )
    return path.read_text(encoding="utf-8")


def _title(file: Path) -> str:
    """Return the file's name, with undecodable bytes replaced."""
    return file.name.encode(errors="surrogateescape").decode(errors="replace")


def _rows(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    from paceline.cli.trace_summary import seconds

    embedding = f", {summary.num_embedding_ticks:,} of them embedding" if summary.num_embedding_ticks else ""
    yield "ticks", f"{summary.num_ticks:,} in {summary.duration_s:.3f} s{embedding}"
    ended = ", ".join(f"{num} {reason}" for reason, num in summary.ended if num)
    yield "requests", f"{summary.num_requests:,}" + (f" ({ended})" if ended else "")
    yield "generated", f"{summary.num_generated:,} tokens, {summary.tokens_per_s:,.1f} a second"
    shared = f", {summary.num_from_memory:,} taken from memory" if summary.num_from_memory else ""
    yield "prefilled", f"{summary.num_prefill:,} tokens{shared}"
    drafts = f"{summary.num_drafts:,} verified, {summary.num_accepted:,} accepted"
    yield "drafts", drafts if summary.num_drafts else ""
    yield "embedded", f"{summary.num_embedded:,} texts" if summary.num_embedded else ""
    yield "preemptions", f"{summary.num_preemptions:,}" if summary.num_preemptions else ""
    yield "first token", f"p50 {seconds(summary.ttft_s, 0.5)}, p95 {seconds(summary.ttft_s, 0.95)}"
    yield "next token", f"p50 {seconds(summary.itl_s, 0.5)}, p99 {seconds(summary.itl_s, 0.99)}"
