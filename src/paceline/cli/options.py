"""Options that several commands share, and the headings that help lists options under."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

choosing_model = partial(typer.Option, rich_help_panel="Which model")
choosing_tokens = partial(typer.Option, rich_help_panel="How tokens are chosen")
ending = partial(typer.Option, rich_help_panel="When it ends")
reading_text = partial(typer.Option, rich_help_panel="How the text is read")
making_vectors = partial(typer.Option, rich_help_panel="What the vectors are")
running = partial(typer.Option, rich_help_panel="How it runs")
showing = partial(typer.Option, rich_help_panel="What is shown")

ModelOption = Annotated[
    Path | None,
    choosing_model(
        "--model",
        "-m",
        metavar="FILE",
        help="GGUF file; of a split set, its first part.",
        show_default="the demo model",
    ),
]
GpuLayersOption = Annotated[
    int | None,
    choosing_model(
        "--n-gpu-layers", "-ngl", metavar="N", help="Layers on the GPU, -1 for all.", show_default="as many as fit"
    ),
]
DeviceOption = Annotated[
    list[str] | None,
    choosing_model(
        metavar="NAME", help="Compute on this device, may be repeated; see `paceline info`.", show_default="all"
    ),
]
ThreadsOption = Annotated[
    int | None,
    running(
        "--threads",
        "-t",
        metavar="N",
        help="CPU threads.",
        show_default="physical cores, fewer for small models",
    ),
]
ParseSpecialOption = Annotated[
    bool, reading_text("--parse-special", help="Take names like <|im_start|> in it for control tokens.")
]
VerboseOption = Annotated[bool, running("--verbose", "-v", help="Show llama.cpp's log on stderr.")]
