"""Arrivals: conversations with their turns. Drawn from a seed, or read from a file of JSON lines, one conversation a line.

unrelated  one turn each, nothing shared
shared     one turn each after a long system prompt of a few, the first of them as often as all others together
chats      several turns each, with time to think between them, after a shorter system prompt of many
agents     a tree: tasks after one system prompt, each with several requests at once with its own long context
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """The caller's tokens of a turn, the number of generated tokens, and the seconds until the next turn."""

    added: tuple[int, ...]
    num_generated: int
    think_s: float = 0.0


class Dialogue(msgspec.Struct, frozen=True):
    """A conversation. head: its first tokens, which others may share."""

    start_s: float
    head: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """How much arrives. rate: requests a second, of all turns. num_requests: of a trace, about."""

    rate: float
    num_requests: int
    seed: int


def tokens(random: Random, num: int) -> tuple[int, ...]:
    """Return so many bytes, the tokens of the fake backend."""
    return tuple(random.randbytes(num))


def unrelated(shape: Shape) -> list[Dialogue]:
    """Return requests that share nothing."""
    random, now_s, found = Random(shape.seed), 0.0, []
    for _ in range(shape.num_requests):
        now_s += random.expovariate(shape.rate)
        turn = Turn(tokens(random, random.randint(256, 768)), random.randint(8, 32))
        found.append(Dialogue(now_s, (), (turn,)))
    return found


def shared(shape: Shape) -> list[Dialogue]:
    """Return requests behind a few long system prompts."""
    random, now_s, found = Random(shape.seed), 0.0, []
    heads = [tokens(random, 1500) for _ in range(8)]
    for _ in range(shape.num_requests):
        now_s += random.expovariate(shape.rate)
        head = heads[0] if random.random() < 0.5 else random.choice(heads[1:])
        turn = Turn(tokens(random, random.randint(32, 256)), random.randint(8, 32))
        found.append(Dialogue(now_s, head, (turn,)))
    return found


def chats(shape: Shape) -> list[Dialogue]:
    """Return conversations of several turns."""
    random, now_s, found, num_turns = Random(shape.seed), 0.0, [], 5
    heads = [tokens(random, 300) for _ in range(20)]
    for _ in range(shape.num_requests // num_turns):
        now_s += random.expovariate(shape.rate / num_turns)
        turns = tuple(
            Turn(tokens(random, random.randint(100, 300)), random.randint(8, 32), random.expovariate(1 / 6))
            for _ in range(num_turns)
        )
        found.append(Dialogue(now_s, random.choice(heads), turns))
    return found


def agents(shape: Shape) -> list[Dialogue]:
    """Return tasks that ask several times at once."""
    random, now_s, found, num_branches = Random(shape.seed), 0.0, [], 6
    head = tokens(random, 800)
    for _ in range(shape.num_requests // num_branches):
        now_s += random.expovariate(shape.rate / num_branches)
        context = head + tokens(random, random.randint(400, 1200))
        for _ in range(num_branches):
            turn = Turn(tokens(random, random.randint(16, 128)), random.randint(8, 32))
            found.append(Dialogue(now_s + random.random() * 2.0, context, (turn,)))
    return sorted(found, key=lambda item: item.start_s)


TRACES: dict[str, Callable[[Shape], list[Dialogue]]] = {
    "unrelated": unrelated,
    "shared": shared,
    "chats": chats,
    "agents": agents,
}


def read_trace(path: Path) -> list[Dialogue]:
    """Read a recorded trace: `{"start_s": 0.5, "head": [1, 2], "turns": [{"added": [3], "num_generated": 8}]}` a line."""
    return [msgspec.json.decode(line, type=Dialogue) for line in path.read_bytes().splitlines() if line.strip()]


def write_trace(path: Path, trace: list[Dialogue]) -> None:
    """Write a trace as `read_trace` reads it."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in trace))
