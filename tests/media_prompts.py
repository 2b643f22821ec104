"""Prompts of text and made-up media items, as an engine takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.kv_cache import MediaItem


@dataclass(frozen=True)
class Picture:
    """A picture in a prompt. content: the shown thing."""

    content: str
    num_cells: int
    num_positions: int
    is_causal: bool = True


Part = str | Picture


def prompt_of(*parts: Part) -> dict[str, Any]:
    """The arguments of a request: token ids, with zeros for media, and the items."""
    ids: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, str):
            ids += part.encode()
            continue
        sizes = (len(ids), part.num_cells, part.num_positions)
        media.append(MediaItem(*sizes, part.content.encode(), part.is_causal))
        ids += [0] * part.num_cells
    return {"prompt": ids, "media": tuple(media)}


def positions_of(*parts: Part) -> list[int]:
    """The position of each cell, counted one by one, and that behind the last."""
    positions, next_position = [], 0
    for part in parts:
        if isinstance(part, str):
            positions += range(next_position, next_position + len(part.encode()))
            next_position += len(part.encode())
        else:
            positions += [next_position] * part.num_cells
            next_position += part.num_positions
    return [*positions, next_position]
