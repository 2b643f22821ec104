"""`paceline tokenize`: text to tokens, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import terminal
from paceline.cli.interrupt import StopSignal, run
from paceline.cli.options import (
    ModelChoice,
    ModelOption,
    ParseSpecialOption,
    argument_or_stdin,
    load,
    reading_text,
    showing,
)
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    from paceline.runtime import Tokenizer

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def tokenize(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="Text, or with --decode token ids; without it, the text of stdin.", show_default=False
        ),
    ] = None,
    *,
    model: ModelOption = None,
    no_special: Annotated[bool, reading_text("--no-special", help="Add no tokens for beginning and end.")] = False,
    parse_special: ParseSpecialOption = False,
    decode: Annotated[bool, reading_text("--decode", help="Convert token ids to text.")] = False,
    ids: Annotated[bool, showing("--ids", help="Write the ids only, on one line.")] = False,
    pieces: Annotated[bool, showing("--pieces", help="Write the pieces only, one a line.")] = False,
    count: Annotated[bool, showing("--count", help="Write the number of tokens only.")] = False,
    as_json: Annotated[bool, showing("--json", help="One JSON object.")] = False,
) -> None:
    r"""Show the tokens of a text: the id and the piece of text of each, one a line.

    Pieces are quoted; bytes that are no text on their own are shown as \xNN. Only the model's vocabulary is loaded.
    """
    show = _format(decode=decode, ids=ids, pieces=pieces, count=count, as_json=as_json)
    given = argument_or_stdin("TEXT", text)
    wanted = _parse_ids(given) if decode else None

    def work(stop: StopSignal) -> None:
        tokenizer = load(ModelChoice(path=model, vocab_only=True, show_progress=False), stop).model.tokenizer
        if wanted is not None:
            terminal.write(_with_line_end(tokenizer.decode(wanted, special=parse_special)))
            return
        found = tokenizer.encode(given, add_special=not no_special, parse_special=parse_special)
        terminal.write(show(tokenizer, found))

    run(work)


Format = Callable[["Tokenizer", list[int]], str]


def _format(**wanted: bool) -> Format:
    """Return the requested form of output. Raise `InvalidParams` for more than one."""
    chosen = ["--json" if name == "as_json" else f"--{name}" for name, given in wanted.items() if given]
    if len(chosen) > 1:
        raise InvalidParams(f"{' and '.join(chosen)} exclude each other; choose one")
    formats: dict[str, Format] = {
        "--ids": lambda _, ids: " ".join(map(str, ids)) + "\n",
        "--count": lambda _, ids: f"{len(ids)}\n",
        "--pieces": lambda tokenizer, ids: "".join(f"{_shown(tokenizer.token_bytes(token))}\n" for token in ids),
        "--json": _as_json,
    }
    return formats.get(chosen[0], _as_lines) if chosen else _as_lines


def _as_lines(tokenizer: Tokenizer, ids: list[int]) -> str:
    width = len(str(tokenizer.n_vocab - 1))
    return "".join(f"{token:>{width}}  {_shown(tokenizer.token_bytes(token))}\n" for token in ids)


def _as_json(tokenizer: Tokenizer, ids: list[int]) -> str:
    tokens = [_record(token, tokenizer.token_bytes(token)) for token in ids]
    return json.dumps({"count": len(ids), "ids": ids, "tokens": tokens}, ensure_ascii=False) + "\n"


def _record(token: int, data: bytes) -> dict[str, object]:
    """Return a token as JSON; its text is null if its bytes are no text on their own."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    return {"id": token, "text": text, "bytes": list(data)}


def _shown(data: bytes) -> str:
    """Quote bytes for people: text as it is, everything invisible escaped."""
    text = data.decode("utf-8", "surrogateescape").translate(_ESCAPES)
    return '"' + "".join(character if character.isprintable() else _escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    raw = character.encode("utf-8", "surrogateescape")
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise InvalidParams(f"--decode takes token ids as whole numbers, not {text[:40]!r}") from None


def _with_line_end(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"
