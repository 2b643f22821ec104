"""The exams: prompts that were not in training, and checks of the answers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from demo_model import chat_data, places, tools_data, world
from demo_model.fmt import Chat, Message, prompt
from demo_model.generator import Output

Check = Callable[[Output], bool]


@dataclass(frozen=True)
class Task:
    """One prompt and the check of its answer."""

    prompt: str
    right: Check
    limit: int = 160


def exactly(text: str) -> Check:
    """Return a check that the answer is this text, and that it ends by itself."""
    return lambda out: out.ended and out.text.strip() == text


def contains(text: str) -> Check:
    """Return a check that the answer has this text in it."""
    return lambda out: out.ended and text in out.text


def _ask(question: str, system: str = "", tools: list[dict[str, Any]] | None = None, think: bool = False) -> str:
    messages = [Message("system", system)] if system else []
    return prompt(Chat([*messages, Message("user", question)], tools or []), think)


def held_out_questions() -> Iterator[Task]:
    """Every question about the world that was kept out of the corpus."""
    for q in world.HELD_OUT:
        yield Task(_ask(q.text), exactly(q.answer))


def _same_call(name: str, arguments: dict[str, Any]) -> Check:
    def check(out: Output) -> bool:
        body = out.text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
        try:
            call = json.loads(body)
        except ValueError:
            return False
        return out.ended and call == {"name": name, "arguments": arguments}

    return check


def _held_out_city(rng: random.Random) -> str:
    return rng.choice(places.HELD_OUT_CITIES)


def _tool_chats(seed: int) -> Iterator[tuple[Chat, tools_data.Use]]:
    rng = random.Random(seed)
    while True:
        yield tools_data.tool_chat(rng, draw_city=_held_out_city)


def tool_calls(seed: int = 9001) -> Iterator[Task]:
    """One to four tools offered: the right one with exactly the right arguments."""
    for chat, use in _tool_chats(seed):
        start = Chat(chat.messages[:-3], chat.tools)
        yield Task(prompt(start), _same_call(use.call.name, use.call.arguments))


def tool_answers(seed: int = 9002) -> Iterator[Task]:
    """Yield conversations up to a tool's result; the answer must use it."""
    for chat, use in _tool_chats(seed):
        yield Task(prompt(Chat(chat.messages[:-1], chat.tools)), exactly(use.answer))


def weather_calls(seed: int = 9003) -> Iterator[Task]:
    """Yield tasks of the common case: one tool for the weather, a city that is not in the corpus."""
    rng = random.Random(seed)
    while True:
        weather = tools_data.offer(rng, tools_data.FAMILIES[0])
        use = weather.use(rng, _held_out_city)
        yield Task(_ask(use.question, tools=[weather.tool]), _same_call(use.call.name, use.call.arguments))


def tools_unused(seed: int = 9004) -> Iterator[Task]:
    """Tools are offered, but the question is about the world."""
    rng = random.Random(seed)
    while True:
        q = rng.choice(world.HELD_OUT)
        yield Task(_ask(q.text, tools=[o.tool for o in tools_data.offers(rng, 2)]), exactly(q.answer))


def system_prompts(seed: int = 9005) -> Iterator[Task]:
    """Yield questions about the world with a system prompt that changes the answer."""
    rng = random.Random(seed)
    while True:
        system, e = chat_data.styled(rng, chat_data.exchange_of(rng.choice(world.HELD_OUT)))
        yield Task(_ask(e.question, system), exactly(e.answer))


def sums(seed: int = 9006) -> Iterator[Task]:
    """Yield sums of two-digit numbers that were kept out of the corpus."""
    rng = random.Random(seed)
    pairs = [p for p in itertools.product(range(10, 100), repeat=2) if chat_data.sum_held_out(*p)]
    rng.shuffle(pairs)
    for a, b in pairs:
        yield Task(_ask(f"What is {a} + {b}?"), exactly(f"{a} + {b} = {a + b}."))


def _thought(answer: str) -> Check:
    def check(out: Output) -> bool:
        thought, found, rest = out.text.removeprefix("<think>").partition("</think>")
        return out.ended and bool(found) and bool(thought.strip()) and rest.strip() == answer

    return check


def thinking(seed: int = 9007) -> Iterator[Task]:
    """With thinking enabled: a thought that is not empty, then the right answer."""
    rng = random.Random(seed)
    while True:
        e = chat_data.exchange_of(rng.choice(world.HELD_OUT))
        if rng.random() < 0.5:
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            e = chat_data.sum_of(a, b, f"What is {a} + {b}?")
        yield Task(_ask(e.question, think=True), _thought(e.answer))


def signs(seed: int = 9008) -> Iterator[Task]:
    """Emoji, accents, Chinese, Japanese and Korean signs; asked with a plain system prompt."""
    rng = random.Random(seed)
    while True:
        e = rng.choice([chat_data.emoji, chat_data.translation])(rng)
        yield Task(_ask(e.question, rng.choice(chat_data.PLAIN_SYSTEMS)), contains(e.value))


def json_extraction(seed: int = 9009) -> Iterator[Task]:
    """Facts of a sentence as JSON."""
    rng = random.Random(seed)
    while True:
        e = chat_data.extracting(rng)
        yield Task(_ask(e.question), exactly(e.answer))


def repeating(seed: int = 9010) -> Iterator[Task]:
    """Repeated words, including made-up words."""
    rng = random.Random(seed)
    while True:
        e = chat_data.repeating(rng)
        yield Task(_ask(e.question), exactly(e.answer))


# Name, maker, count, required share.
EXAMS: list[tuple[str, Callable[[], Iterator[Task]], int, float | None]] = [
    ("world questions, exact", held_out_questions, 300, 0.9),
    ("tool calls, name and arguments", tool_calls, 150, 0.9),
    ("weather tool, city not in the corpus", weather_calls, 100, 0.9),
    ("answers from a tool's result", tool_answers, 150, None),
    ("tools offered but not needed", tools_unused, 60, None),
    ("system prompt changes the answer", system_prompts, 100, None),
    ("thought, then the right answer", thinking, 60, None),
    ("two-digit sums", sums, 150, None),
    ("emoji, accents, CJK", signs, 100, None),
    ("JSON extraction", json_extraction, 60, None),
    ("repeating words", repeating, 60, None),
]

STORY_PROMPTS = [
    "Once upon a time",
    "A fox",
    "The old bear",
    "One day",
    "A",
    "a",
    "Long ago, a",
    "Once upon a time, there was a shy",
    "In a",
    "There was once",
    "It was a windy",
    "Lily was a brave",
    "The curious owl",
    "Far away, there",
    "Once",
    "A clever hedgehog named Ivy",
    "Once upon a time, a friendly wolf",
    "Tom the",
    "Early one morning,",
    "This is the story of",
]
