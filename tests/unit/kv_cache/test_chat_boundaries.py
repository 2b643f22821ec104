"""Checkpoints at ends of messages of a chat: the cost of a load of conversations, in tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.engine_world import Outcome
from tests.unit.kv_cache.prefix_rig import UNCUT, Rig, text

from paceline.testing.fake_backend import EOS

HEADER = 3
THINK = [11, 12]


def message(role: int, content: list[int]) -> list[int]:
    """As ChatML has it: a control token in front and one behind."""
    return [EOS, role, 10, *content, EOS, 10]


@dataclass
class Chat:
    """A conversation with prompts that ask for thinking, which later prompts leave out, as templates do."""

    tokens: list[int]
    thinks: bool = False
    turns: list[Outcome] = field(default_factory=list)

    def ask(self, world: Rig, question: list[int], num_tokens: int = 30) -> Outcome:
        self.tokens += message(1, question)
        self.turns.append(world.ask([*self.tokens, EOS, 2, 10, *(THINK if self.thinks else [])], num_tokens))
        answer = self.turns[-1].token_ids()
        self.tokens += message(2, answer[10:] if self.thinks else answer)
        return self.turns[-1]


@pytest.mark.parametrize("kind", UNCUT)
def test_a_system_prompt_is_shared_from_the_second_conversation_on(kind: str) -> None:
    """And instructions behind it, though no conversation has branched there yet."""
    world = Rig(kind=kind)
    system, instructions = message(0, text(90, 1)), message(3, text(300, 2))
    for seed in range(3, 6):
        found = Chat([*system, *instructions]).ask(world, text(40, seed))
        shared = world.shared(found)
        assert shared == ([] if seed == 3 else [(len(system) + len(instructions) - 2, "host")])
        world.check_output_as_alone(found)
    assert world.computed(world.ask([*system, *message(3, text(200, 9))])) == len(message(3, text(200, 9))) + 2
    world.check_done()


@pytest.mark.parametrize("kind", UNCUT)
@pytest.mark.parametrize("thinks", [False, True])
def test_the_next_turn_computes_new_tokens_though_thinking_is_left_out(kind: str, thinks: bool) -> None:
    """Its prompt differs from the last before the header of the reply, or after the reply if nothing is left out."""
    world = Rig(kind=kind)
    chat = Chat(message(0, text(200, 1)), thinks)
    chat.ask(world, text(50, 2))
    for seed in range(3, 7):
        before = len(chat.tokens) - (20 if thinks else 30) - len(message(2, []))
        turn = chat.ask(world, text(50, seed))
        num_new = len(turn.request.prompt) - before
        assert world.recorder.prefilled[turn.request.key] <= num_new + 2
    world.check_output_as_alone(turn)
    world.check_done()


@pytest.mark.parametrize("kind", ["sliding_window", "hybrid"])
def test_a_prompt_stops_a_few_times_only(kind: str) -> None:
    """A long new conversation has a place at its end, a place at each twice as long beginning, and regular places."""
    world = Rig(
        kind=kind, num_cells=8192, limits={"num_slots": 1, "max_positions": 8192, "chunk_size": 8192, "n_batch": 8192}
    )
    prompt = [token for seed in range(60) for token in message(1, text(60, seed))]
    world.begin([*prompt, EOS, 2, 10], 1)
    world.run()
    nodes = world.scheduler.kv_cache._tree.nodes()
    places = sorted(node.end for node in nodes if node.state is not None)
    assert places[0] < 2 * 66 + 1
    assert places[-1] > len(prompt) - 66
    assert len(places) <= 9


@pytest.mark.parametrize("kind", UNCUT)
def test_the_same_prompt_again_computes_the_header_of_its_reply(kind: str) -> None:
    """One pass, as for its last token alone; choices of one request share all but the last."""
    world = Rig(kind=kind)
    prompt = [*message(0, text(100, 1)), *message(1, text(100, 2)), EOS, 2, 10]
    world.ask(prompt)
    assert world.computed(world.ask(prompt)) == 2 + HEADER
    both = world.ask([*prompt, EOS, 2], n=2)
    assert world.computed(both) <= 2 * 8
    world.check_output_as_alone(both)
    world.check_done()


@pytest.mark.parametrize("kind", ["attention", *UNCUT])
def test_a_load_of_conversations_computes_little_twice(kind: str) -> None:
    """8 chats on each of 3 system prompts, 4 turns, in random order, half of them with thinking that is left out later.

    With memory that can be cut the same load computes only new tokens of prompts and replies; with others little more.
    """
    chosen = random.Random(7)
    world = Rig(kind=kind, num_cells=16384, limits={"max_positions": 8192, "host_bytes": 10_000_000})
    systems = [message(0, text(size, size)) for size in (80, 350, 900)]
    chats = [Chat(list(system), thinks=bool(index % 2)) for index, system in enumerate(systems * 8)]
    known: list[list[int]] = []
    num_new = 0
    for _ in range(4 * len(chats)):
        chat = chosen.choice([chat for chat in chats if len(chat.turns) < 4])
        turn = chat.ask(world, text(chosen.randrange(20, 90), chosen.randrange(1000)))
        prompt = turn.request.prompt
        num_new += len(prompt) - max([num_common(prompt, entry) for entry in known], default=0)
        known.append([*prompt, *turn.token_ids()[:-1]])
    num_prefilled = sum(world.recorder.prefilled.values())
    assert num_new <= num_prefilled <= (1.0 if kind == "attention" else 1.15) * num_new
    world.check_done()


def num_common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
